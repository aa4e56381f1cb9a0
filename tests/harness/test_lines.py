"""``eval --json-lines``: what programs read does not change without another version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import create_model
from submission_files import HONEST, TINY
from support import forked

from cute_nvfp4.harness import lines
from cute_nvfp4.harness.results import VERDICTS

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "eval_lines.json"
FOLDERS = Path(__file__).parent / "folders"
EVENTS = {event.model_fields["event"].default: event for event in lines.EVENTS}


def complaint() -> str:
    """What is wrong with the schema as it is; "" where it is the one that was recorded for its version."""
    recorded = json.loads(RECORDED.read_text())
    if str(lines.VERSION) not in recorded:
        return f"version {lines.VERSION} is not recorded: add schema() to {RECORDED.name}, and leave the others there"
    same = recorded[str(lines.VERSION)] == json.loads(json.dumps(lines.schema()))
    return "" if same else "the schema has changed: raise lines.VERSION, and record the new one beside the old"


def test_the_schema_is_that_of_its_version():
    assert complaint() == ""


def test_a_change_without_another_version_is_seen(monkeypatch):
    more = create_model("Ended", __base__=lines.Ended, event=(lines.Ended.model_fields["event"].annotation, "ended"))
    monkeypatch.setattr(lines, "EVENTS", (*lines.EVENTS[:3], more, lines.EVENTS[4]))
    assert complaint() == ""
    more = create_model("Ended", __base__=more, seconds=(float, 0.0))
    monkeypatch.setattr(lines, "EVENTS", (*lines.EVENTS[:3], more, lines.EVENTS[4]))
    assert "raise lines.VERSION" in complaint()
    monkeypatch.undo()
    monkeypatch.setattr(lines, "EXIT_CODES", lines.EXIT_CODES | {"bad task file": 3})
    assert "raise lines.VERSION" in complaint()
    monkeypatch.setattr(lines, "VERSION", lines.VERSION + 1)
    assert "is not recorded" in complaint()


def test_every_verdict_is_in_the_schema():
    assert lines.schema()["events"]["case"]["verdict"] == {"one of": list(VERDICTS)}


def told(*words: str) -> tuple[int, list]:
    """The exit code of ``eval --json-lines`` and its events, each read by its record."""
    command = [sys.executable, "-m", "cute_nvfp4", "eval", "--json-lines", *map(str, words)]
    done: subprocess.CompletedProcess = forked.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(event["schema_version"] == lines.SCHEMA for event in found)
    return done.returncode, [EVENTS[event["event"]].model_validate(event) for event in found]


def test_events_of_several_submissions(tmp_path):
    bad, broken = tmp_path / "bad.py", tmp_path / "broken.py"
    bad.write_text("def custom_kernel(data):\n    return data[0] * 2\n")
    broken.write_text("import nowhere\n")
    task, good = FOLDERS / "scale" / "task.yml", tmp_path / "good.py"
    good.write_text("def custom_kernel(data):\n    return data[2] * data[0] + data[1]\n")
    code, events = told("--task", task, good, broken, bad, "--backend", "reference")
    assert code == 112
    by_name = {path: [e for e in events if e.submission == str(path)] for path in (good, broken, bad)}
    assert [e.event for e in by_name[good]] == ["started", "working", "case", "working", "case", "ended"]
    assert [case.spec for case in by_name[good][0].cases] == ["size: 96; seed: 4242", "size: 1000; seed: 77"]
    assert by_name[good][-1].exit_code == 0 and by_name[good][-1].verdicts["right"] == 2
    assert [e.event for e in by_name[broken]] == ["started", "failed"] and by_name[broken][-1].exit_code == 112
    assert [e.verdict for e in by_name[bad] if e.event == "case"] == ["wrong", "wrong"]
    assert by_name[bad][-1].exit_code == 112 and not by_name[bad][-1].passed


@pytest.mark.parametrize(
    "words,code,error",
    [
        (["nvfp4_gem"], 2, "unknown problem"),
        ([], 2, "what to judge"),
        (["nvfp4_gemv", "--case", "99"], 2, "case 99 does not exist"),
        (["--task", "none.yml", "x.py"], 113, "does not exist"),
        (["nvfp4_gemv", "--json"], 2, "takes the place of --json"),
    ],
)
def test_what_cannot_be_judged_is_an_event_too(words, code, error):
    returned, (event,) = told(*words)
    assert (returned, event.exit_code, event.event) == (code, code, "failed") and error in event.error


def test_a_case_of_ours_has_its_errors():
    code, events = told("nvfp4_gemv", HONEST, "--task", TINY, "--case", "0", "--backend", "reference")
    (case,) = [event for event in events if event.event == "case"]
    assert code == 0 and case.max_abs_error is not None and case.measured is None and case.modelled_us is None
