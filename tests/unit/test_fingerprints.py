"""The PTX of the kernels is what was recorded: a third of the configurations here, all of them with ``-m slow``."""

from __future__ import annotations

import re

import pytest
import sampling
from ptx_fingerprints import compiled, configurations, difference, fingerprint, normalised, recorded, versions

from cute_nvfp4.ops.gemv import compile_gemv

NAMES = sorted(recorded()["kernels"])
SAMPLE = sampling.one_in(6, NAMES)
pytestmark = pytest.mark.skipif(
    recorded()["versions"] != versions(),
    reason=f"fingerprints are of {recorded()['versions']}, installed is {versions()}",
)


def test_every_configuration_is_recorded() -> None:
    assert sorted(configurations()) == NAMES


@pytest.mark.parametrize("name", [x if x in SAMPLE else pytest.param(x, marks=pytest.mark.slow) for x in NAMES])
def test_unchanged(name: str) -> None:
    """Where a change is meant, ``python tests/ptx_fingerprints.py --write`` records it."""
    assert difference(recorded()["kernels"][name], fingerprint(compiled(name)[1])) == ""


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
