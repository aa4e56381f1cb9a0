"""The code of the README, the tour and two pages runs, CI uses the README's command, and links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import forked

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TOUR = (ROOT / "docs" / "tutorials" / "tour.md").read_text()
FUSED = (ROOT / "docs" / "explanation" / "fused.md").read_text()
LAUNCH = (ROOT / "docs" / "how-to" / "launch.md").read_text()
BLOCKS = re.findall(r"(?:<!-- ([^>]*?) -->\n)?```(\w+)\n(.*?)```", README + TOUR + FUSED, flags=re.DOTALL)
# the blocks of this page go on from each other; README's run in tests/unit/test_recipes.py
EXAMPLES = [text for mark, language, text in BLOCKS if language == "python" and not mark and text not in README]
EXAMPLES += ["\n".join(re.findall(r"```python\n(.*?)```", LAUNCH, flags=re.DOTALL))]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "notebooks/README.md",
    *(p.relative_to(ROOT).as_posix() for room in ("docs", "benchmarks/records") for p in ROOT.glob(f"{room}/**/*.md")),
]


def block(label: str) -> str:
    """The one code block that the comment ``label`` marks."""
    (found,) = (text for mark, _, text in BLOCKS if mark == label)
    return found.strip()


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": paths} | environment
    start = forked.run if command[0] == sys.executable else subprocess.run
    return start(command, capture_output=True, text=True, cwd=folder, env=variables, timeout=280)


@pytest.mark.sweep
@pytest.mark.parametrize("source", EXAMPLES)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_examples_run(source: str, arch: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(source)
    done = run([sys.executable, "example.py"], tmp_path, CUTE_NVFP4_ARCH=arch)
    assert done.returncode == 0, done.stderr


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("change, code", [(("", ""), 0), (("matrix, vector,", "matrix, vector, alpha=2.0,"), 112)])
def test_the_submission_is_judged(change: tuple[str, str], code: int, tmp_path: Path) -> None:
    """As printed it passes; with twice the numbers it does not."""
    (tmp_path / "submission.py").write_text(block("file: submission.py").replace(*change))
    command = [sys.executable, "-m", "cute_nvfp4", "eval", "nvfp4_gemv", "--submission", "submission.py", "--case", "0"]
    done = run(command, tmp_path)
    assert done.returncode == code, done.stdout + done.stderr


def test_the_race_is_found_and_its_cure_is_clean(tmp_path: Path) -> None:
    """As printed a barrier is missing, although the numbers are right; with it nothing is reported."""
    script = block("file: reverse.py")
    cured = script.replace("    y[tidx]", "    cute.arch.sync_threads()\n    y[tidx]")
    for text, options, code, out in ((script, [], 112, "Race"), (script, ["--no-checks"], 0, ""), (cured, [], 0, "")):
        (tmp_path / "reverse.py").write_text(text)
        done = run([sys.executable, "-m", "cute_nvfp4", "sim", *options, "reverse.py"], tmp_path)
        assert done.returncode == code and out in done.stderr, done.stdout + done.stderr
        assert code or done.stdout.strip() == "right"
    assert "reverse.py:12" in TOUR and "reverse.py:13" in TOUR


def test_ci_runs_the_command_of_the_readme(tmp_path: Path) -> None:
    """``.ci/run`` beside a README whose command only prints: it runs that one, and fails where there is none."""
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / "README.md").write_text(README.replace(block("command: test"), "echo installed &&\necho 3 passed"))
    done = run(["bash", str(script)], ROOT)
    assert done.returncode == 0 and done.stdout.splitlines()[-2:] == ["installed", "3 passed"]
    (tmp_path / "README.md").write_text(README.replace(block("command: test"), "echo installed && false"))
    assert run(["bash", str(script)], ROOT).returncode == 1
    (tmp_path / "README.md").write_text(README.replace("<!-- command: test -->", ""))
    done = run(["bash", str(script)], ROOT)
    assert done.returncode == 1 and "has no command" in done.stderr


def test_both_commands_install_what_was_tested() -> None:
    for label in ("command: run", "command: test"):
        command = block(label)
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ")
        assert "\n" not in command


def test_no_index_and_no_machine_path_is_named() -> None:
    """Installing depends on nothing but pip's own configuration."""
    files = [ROOT / name for name in ("constraints.txt", "pyproject.toml", ".ci/run", *DOCUMENTS)]
    bad = re.compile(r"index-url|find-links|--index|pypi\.org|file://|/root/|/home/|/opt/")
    found = [f"{path.name}: {match.group()}" for path in files for match in bad.finditer(path.read_text())]
    assert not found


def anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for link, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        target = path.parent / link if link else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"
