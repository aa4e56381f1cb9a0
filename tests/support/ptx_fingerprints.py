"""Fingerprints of the PTX of kernels: one for each of the kernels of ``fingerprint_kernels``.

A change that should alter no kernel leaves them unchanged; for another change they show which kernels it alters, and by
how many instructions of each kind.

    python -m tests.support.ptx_fingerprints                compile all, compare, say what changed
    python -m tests.support.ptx_fingerprints --write        make these the recorded ones
    python -m tests.support.ptx_fingerprints --dump FOLDER  keep the normalised PTX, for a diff

Names of kernels, and the numbers of parameters, registers and labels, are not part of a fingerprint. With another DSL
than the record's, kernels are compared too, and differences are listed; but the exit code is 0, since the compiler may
be the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path

from .fingerprint_kernels import configurations

RECORDED = Path(__file__).parents[1] / "data" / "ptx_fingerprints.json"
_PARAMETER = re.compile(r"\b\w+_param_(\d+)\b")
_NUMBERED = re.compile(r"%[a-z]+\d+\b|\$L__\w+\b")
_MANGLED = re.compile(r"\bkernel_cutlass_\w+|\b__internal_\w+")


def normalised(ptx: str) -> str:
    """PTX without comments, names and numbering: registers, labels and parameters are numbered in the order of their
    use."""
    lines = []
    for line in ptx.splitlines():
        line = _MANGLED.sub("kernel", _PARAMETER.sub(r"param#\1", line.split("//")[0])).strip()
        if line and not line.startswith((".reg", ".loc", ".file")):
            lines.append(re.sub(r"\s+", " ", line))
    declared = sorted(re.sub(r"param#\d+", "param", x).rstrip(",") for x in lines if x.startswith(".param"))
    # a register that a parameter is loaded into gets its number on first use, whatever the order of the loads
    loads = {}
    for line in lines:
        found = re.fullmatch(r"(?:ld\.param|mov)\.\w+ (%\w+), (\[?param#\d+(?:\+\d+)?\]?);", line)
        if found:
            loads[found[1]] = line
    rest = [x for x in lines if not x.startswith(".param") and x not in loads.values()]
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        word = match[0]
        if word not in names:
            kind = re.match(r"%[a-z]+|\$L", word)
            names[word] = f"{kind[0]}#{len(names)}"
        return names[word]

    body = [_NUMBERED.sub(name, line) for line in rest]
    loaded = sorted(re.sub(r"param#\d+", "param", _NUMBERED.sub(name, line)) for line in loads.values())
    return "\n".join([*declared, *body, *loaded]) + "\n"


def opcodes(text: str) -> Counter[str]:
    """How often each opcode occurs in normalised PTX."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        match = re.match(r"(?:@!?%\S+ )?([a-z][a-z0-9_]*(?:\.\S+)?)(?: |;)", line)
        if match:
            found[match[1]] += 1
    return found


def versions() -> dict[str, str]:
    """The versions, besides the kernels, that the PTX depends on."""
    installed = {dist.name for dist in metadata.distributions()}
    toolkits = [name for name in ("cu12", "cu13") if f"nvidia-cutlass-dsl-libs-{name}" in installed]
    return {"nvidia-cutlass-dsl": metadata.version("nvidia-cutlass-dsl"), "libraries": "+".join(toolkits)}


def of_another_dsl() -> str:
    """A sentence that names the record's DSL if it is another one; otherwise empty."""
    known, installed = recorded()["versions"], versions()
    if known == installed:
        return ""
    words = [f"{name} {x}, got {installed.get(name)}" for name, x in known.items() if installed.get(name) != x]
    return f"recorded with {', '.join(words)}"


def compiled(name: str) -> tuple[str, str]:
    """(name, normalised PTX) of a kernel, compiled now."""
    return name, normalised(configurations()[name]().ptx)


def fingerprint(text: str) -> dict:
    """The record of a kernel."""
    counts = opcodes(text)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {"sha256": digest, "instructions": counts.total(), "opcodes": dict(sorted(counts.items()))}


def difference(old: dict, new: dict) -> str:
    """How two fingerprints differ, in words; empty if they do not."""
    if old["sha256"] == new["sha256"]:
        return ""
    names = sorted({*old["opcodes"], *new["opcodes"]})
    changes = {n: new["opcodes"].get(n, 0) - old["opcodes"].get(n, 0) for n in names}
    words = [f"{n} {d:+}" for n, d in changes.items() if d]
    listed = ", ".join(words[:12]) + (" …" if len(words) > 12 else "")
    return f"{old['instructions']} → {new['instructions']} instructions: {listed or 'the same ones, otherwise placed'}"


def recorded() -> dict:
    return json.loads(RECORDED.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record the fingerprints of the present kernels")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="keep the normalised PTX")
    parser.add_argument("--only", default="", metavar="TEXT", help="configurations whose name contains TEXT")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(arguments)
    other = RECORDED.exists() and of_another_dsl()
    if args.write and args.only and other:
        parser.error(f"--write --only: {other}; a record is of one version, so write all kernels")
    names = [name for name in configurations() if args.only in name]
    old = {} if args.write and not RECORDED.exists() else recorded()["kernels"]
    new, changed = {}, 0
    with ProcessPoolExecutor(args.jobs) as pool:
        for name, text in pool.map(compiled, names):
            new[name] = fingerprint(text)
            if args.dump:
                args.dump.mkdir(parents=True, exist_ok=True)
                (args.dump / f"{name.replace(' ', '_')}.ptx").write_text(text)
            words = difference(old[name], new[name]) if name in old else "not recorded"
            if words:
                changed += 1
                print(f"{name}: {words}", flush=True)
    print(f"{len(names)} kernels, {changed} changed" + (f"; {other}" if other else ""))
    if args.write:
        known = {**old, **new}
        kernels = {name: known[name] for name in configurations() if name in known}
        RECORDED.write_text(json.dumps({"versions": versions(), "kernels": kernels}, indent=1) + "\n")
        print(f"recorded in {RECORDED}")
        return 0
    return int(bool(changed and not other))


if __name__ == "__main__":
    sys.exit(main())
