"""Every array of the peers' golden vectors, bit for bit, but for the differences of ``quant_differences``."""

from __future__ import annotations

import types
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import quant_golden
import torch
from quant_differences import DIFFERENCES, marks
from quant_golden import PEERS, arrays, case_of, compute, out_of_scope, unrolled

from cute_nvfp4 import formats
from cute_nvfp4.quantization import block_request, blocks, rounding

# of the arrays in which no difference occurs, so many must be equal
REQUIRED_SHARE = 0.95


@dataclass
class Tally:
    """One peer's arrays: results there are, equal ones, those that nothing marks and equal ones of these."""

    results: int = 0
    equal: int = 0
    unmarked: int = 0
    unmarked_equal: int = 0
    elements: int = 0
    elements_equal: int = 0
    unexplained: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)


def same_bits(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Element for element, −0 told from +0; NaN equal to the same NaN."""
    if got.dtype == np.float32:
        return got.view(np.uint32) == want.view(np.uint32)
    return got == want


def compare(peer: str) -> Tally:
    tally = Tally()
    for key, want in arrays(peer).items():
        skipped = out_of_scope(key)
        if skipped:
            tally.skipped[skipped] += 1
            continue
        got = np.atleast_1d(compute(peer, key))
        want = np.atleast_1d(want)
        assert (got.shape, got.dtype) == (want.shape, want.dtype), key
        case = case_of(peer, key)
        equal = same_bits(unrolled(case, got), unrolled(case, want))
        marked, found = marks(case)
        assert marked.shape == (1, 1) or marked.size in (1, equal.size), (key, marked.shape, equal.shape)
        marked = np.broadcast_to(marked.reshape(-1), equal.shape)
        tally.results += 1
        tally.equal += bool(equal.all())
        tally.unmarked += not marked.any()
        tally.unmarked_equal += bool(equal.all()) and not marked.any()
        tally.elements += equal.size
        tally.elements_equal += int(equal.sum())
        if not (equal | marked).all():
            tally.unexplained.append(f"{key}: {int((~equal & ~marked).sum())} of {equal.size}")
        if not equal.all():
            tally.reasons.update(difference.name for difference in found)
    return tally


@pytest.fixture(scope="module")
def tallies() -> dict[str, Tally]:
    return {peer: compare(peer) for peer in PEERS}


def test_every_array(tallies: dict[str, Tally], capsys: pytest.CaptureFixture[str]) -> None:
    total = Counter()
    with capsys.disabled():
        print()
        for peer, tally in tallies.items():
            counts = {name: getattr(tally, name) for name in ("results", "equal", "unmarked", "unmarked_equal")}
            counts |= {"elements": tally.elements, "elements_equal": tally.elements_equal}
            total.update(counts)
            print(f"{peer}: {counts}")
            for reason, number in sorted(tally.reasons.items()):
                print(f"    differs in {number} arrays: {reason}")
            for reason, number in sorted(tally.skipped.items()):
                print(f"    not compared, {number} arrays: {reason}")
        share = total["unmarked_equal"] / total["unmarked"]
        print(f"equal where semantics agree: {total['unmarked_equal']} of {total['unmarked']} arrays, {share:.1%}")
        print(f"equal altogether: {total['equal']} of {total['results']} arrays, ", end="")
        print(f"{total['elements_equal'] / total['elements']:.2%} of the elements")
    # the differences must not hollow the comparison out
    assert total["unmarked"] > 550 and total["elements_equal"] / total["elements"] > 0.97
    assert share >= REQUIRED_SHARE


@pytest.mark.parametrize("peer", PEERS)
def test_what_differs_is_explained(tallies: dict[str, Tally], peer: str) -> None:
    """Also in the arrays that differ, every element that no difference marks is equal."""
    assert tallies[peer].unexplained == []


def test_every_difference_occurs(tallies: dict[str, Tally]) -> None:
    """A difference that explains nothing any more has to leave the list."""
    seen = sum((tally.reasons for tally in tallies.values()), Counter())
    assert [difference.name for difference in DIFFERENCES if not seen[difference.name]] == []


def forget() -> None:
    """Results are kept between arrays; a mutation needs new ones."""
    for cached in (quant_golden._fouroversix_quantize, quant_golden._qwantize_quantize, quant_golden._torchao_quantize):
        cached.cache_clear()


def half_up(x: torch.Tensor) -> torch.Tensor:
    """E2M1 codes with ties away from zero."""
    return formats.encode_e2m1(torch.where(x.abs() < 6, x * (1 + 2.0**-23), x))


MUTATIONS = {
    "ties away from zero": (rounding._ENCODE, "e2m1", half_up),
    "absolute errors instead of squares": (
        blocks,
        "_error",
        lambda difference, request: block_request.ordered_sum(difference.abs(), request.tile),
    ),
    "one more rounding of scales": (
        blocks,
        "formats",
        types.SimpleNamespace(
            encode_e4m3=lambda x: formats.encode_e4m3(x.to(torch.float16)),
            decode_e4m3=formats.decode_e4m3,
            decode_e2m1=formats.decode_e2m1,
            decode_ue8m0=formats.decode_ue8m0,
        ),
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Must fail: what is nearly the peers' arithmetic is not."""
    where, name, replacement = MUTATIONS[mutation]
    (monkeypatch.setitem if isinstance(where, dict) else monkeypatch.setattr)(where, name, replacement)
    forget()
    try:
        assert compare(quant_golden.FOUROVERSIX).unexplained
    finally:
        forget()
