#!/usr/bin/env bash
# Runs the two commands of the README for several interpreters and both builds of torch, each in a clean clone of HEAD,
# and prints a table in Markdown.
#
#   tests/interpreters.sh [--builds "cpu cuda"] [--folder DIR] [PYTHON ...]
#
# PYTHON is an interpreter (a path, or a name on PATH); without one, python3.10 to python3.14 as far as they are found.
# A build that pip does not find for an interpreter is a row that says so, and no failure. The logs stay in DIR
# (default: a temporary folder); the environments, some gigabytes each, go.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

builds="cpu cuda" folder=
while [[ ${1-} == --* ]]; do
  [[ $# -ge 2 ]] || { echo "$1 needs a value" >&2; exit 2; }
  case $1 in
    --builds) builds=$2 ;;
    --folder) folder=$2 ;;
    *) echo "got option $1, expected --builds or --folder" >&2; exit 2 ;;
  esac
  shift 2
done
folder=$(mkdir -p "${folder:=$(mktemp -d)}" && cd "$folder" && pwd)

pythons=("$@")
if [[ $# == 0 ]]; then
  for minor in 10 11 12 13 14; do
    if command -v "python3.$minor" >/dev/null; then pythons+=("python3.$minor"); fi
  done
fi
[[ ${#pythons[@]} -gt 0 ]] || { echo "found no interpreter: name some" >&2; exit 2; }

readme() { # the command that the README marks with this name
  awk -v mark="<!-- command: $1 -->" '
    $0 == mark { marked = 1; next }
    marked && /^```/ { if (inside) exit; inside = 1; next }
    inside { print }
  ' README.md
}
version=$(sed -n 's/^torch==//p' constraints.txt)
# a local version is no part of what '===' compares: this one cannot be a CPU build
declare -A wanted=([cpu]="torch==$version+cpu" [cuda]="torch===$version")

row() { printf '| %s | %s | %s | %s | %s |\n' "$@" | tee -a "$folder/table.md"; }
took() { printf '%d s' $((SECONDS - $1)); }

: >"$folder/table.md"
row Python torch 'command 1' 'command 2' 'of command 2'
row --- --- --- --- ---
failed=0
for python in "${pythons[@]}"; do
  name=$("$python" -c 'import platform; print(platform.python_version())')
  for build in $builds; do
    log=$folder/$name-$build.log clone=$folder/$name-$build
    rm -rf "$clone"
    git clone -q . "$clone"
    mkdir "$clone.bin"
    ln -s "$("$python" -c 'import sys; print(sys.executable)')" "$clone.bin/python3"
    if ! (cd "$clone" && "$python" -m venv .venv && .venv/bin/pip install -q "${wanted[$build]}") >"$log" 2>&1; then
      if grep -q "No matching distribution" "$log"; then
        row "$name" "$build" "pip finds no ${wanted[$build]}" '' ''
      else
        row "$name" "$build" 'torch was not installed' '' "$log"; failed=1
      fi
      rm -rf "$clone" "$clone.bin"
      continue
    fi
    found=$("$clone/.venv/bin/python" -W ignore -c 'import torch; print(torch.__version__)')
    # a cache of compiled kernels for each: what one interpreter compiled must not help the next
    export CUTE_NVFP4_CACHE_DIR=$clone.cache
    first=passed second=passed start=$SECONDS
    (cd "$clone" && PATH=$clone.bin:$PATH bash -euo pipefail -c "$(readme run)") >>"$log" 2>&1 || { first=failed; failed=1; }
    first+=", $(took "$start")" start=$SECONDS
    (cd "$clone" && PATH=$clone.bin:$PATH bash -euo pipefail -c "$(readme test)") >>"$log" 2>&1 || { second=failed; failed=1; }
    row "$name" "$found" "$first" "$second, $(took "$start")" "$(tail -n 1 "$log")"
    rm -rf "$clone" "$clone.bin" "$clone.cache"
  done
done
echo "logs and table: $folder"
exit $failed
