"""The PTX of the kernels is what was recorded: a sixth of the configurations here, all of them with ``-m slow``.

The record names the DSL that made it. With another one each kernel still has to compile, and its PTX is compared:
where it is equal the test passes, as nothing has changed; where it differs nobody can say whether the compiler or the
kernel is the reason, so the test is skipped with the difference as its reason, and ``-rs`` lists them.
"""

from __future__ import annotations

import json
import re

import pytest
from support import sampling
from support.ptx_fingerprints import (
    compiled,
    configurations,
    difference,
    fingerprint,
    normalised,
    of_another_dsl,
    recorded,
)
from support.ptx_fingerprints import main as command

from cute_nvfp4.ops.gemv import compile_gemv

NAMES = sorted(recorded()["kernels"])
SAMPLE = sampling.one_in(6, NAMES)


def test_every_configuration_is_recorded() -> None:
    assert sorted(configurations()) == NAMES


@pytest.mark.parametrize("name", [x if x in SAMPLE else pytest.param(x, marks=pytest.mark.slow) for x in NAMES])
def test_unchanged(name: str) -> None:
    """Where a change is meant, ``python -m tests.support.ptx_fingerprints --write`` records it."""
    judge(difference(recorded()["kernels"][name], fingerprint(compiled(name)[1])))


def judge(words: str) -> None:
    """Fails a difference that is ours, and skips one that may be another DSL's."""
    if words and (other := of_another_dsl()):
        pytest.skip(f"{other}: {words}")
    assert words == ""


@pytest.mark.parametrize("words", ["", "826 → 827 instructions: add.s32 +1"])
@pytest.mark.parametrize("version", ["the recorded", "9.9.9"])
def test_a_difference_fails_with_the_recorded_dsl_only(
    words: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = recorded()["versions"]
    installed = known if version == "the recorded" else known | {"nvidia-cutlass-dsl": version}
    monkeypatch.setattr("support.ptx_fingerprints.versions", lambda: installed)
    if not words:
        judge(words)
    elif version == "the recorded":
        with pytest.raises(AssertionError):
            judge(words)
    else:
        with pytest.raises(
            pytest.skip.Exception, match=r"recorded with nvidia-cutlass-dsl .*, got 9\.9\.9.*: 826 → 827"
        ):
            judge(words)


@pytest.mark.parametrize("version", ["the recorded", "9.9.9"])
def test_the_command_lists_what_differs(version: str, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path) -> None:
    """Exit code 1 only where the difference is ours, and no record of two versions is written."""
    name, known = "gemv sm_90a 7168 16384 1", recorded()
    known["kernels"] = {name: known["kernels"][name] | {"sha256": "another"}}
    file = tmp_path / "record.json"
    file.write_text(json.dumps(known))
    monkeypatch.setattr("support.ptx_fingerprints.RECORDED", file)
    installed = known["versions"] | ({} if version == "the recorded" else {"nvidia-cutlass-dsl": version})
    monkeypatch.setattr("support.ptx_fingerprints.versions", lambda: installed)
    ended = command(["--only", name, "--jobs", "1"])
    out = capsys.readouterr().out
    assert ended == (version == "the recorded") and "1 kernels, 1 changed" in out and "otherwise placed" in out
    if version != "the recorded":
        with pytest.raises(SystemExit):
            command(["--only", name, "--write"])
        assert "a record is of one version" in capsys.readouterr().err


# (pattern, replacement, how often, what is said of it)
CHANGES = {
    "an instruction": (r"add\.s32", "sub.s32", 1, "add.s32 -1, sub.s32 +1"),
    "an operand": (", 16;", ", 17;", 1, "the same ones, otherwise placed"),
    "a barrier left out": (r"bar\.sync \t0;", "", 1, "bar.sync -1"),
    "a comment": ("\tret;", "\t// nothing\n\tret;", 1, ""),
    "a register's number": (r"%r1\b", "%r100001", 0, ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    """And named; what the compiler may choose anew is none."""
    pattern, new, count, words = CHANGES[change]
    ptx = compile_gemv("sm_90a", m=256, k=4096)[0].ptx
    mutant = re.sub(pattern, new, ptx, count=count)
    assert mutant != ptx
    found = difference(fingerprint(normalised(ptx)), fingerprint(normalised(mutant)))
    assert words in found and bool(words) == bool(found)
