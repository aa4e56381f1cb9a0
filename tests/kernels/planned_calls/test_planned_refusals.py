"""gated_gemm and the grouped GEMMs refuse bad input alike, whether a call like it was planned before or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.roads import Roads, table

from cute_nvfp4 import gated_gemm, simulating
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.gated_gemm import GATED
from cute_nvfp4.ops.grouped_gemm import GROUPED, grouped_gemm
from cute_nvfp4.ops.grouped_gemm_contiguous import CONTIGUOUS, grouped_gemm_contiguous
from tests.kernels.gated_gemm import test_gated_gemm_errors as gated_input
from tests.kernels.grouped_gemm import test_grouped_gemm_input as grouped_input

A, B1, B2 = gated_input.A, gated_input.B1, gated_input.B2
GOOD, DEALT = grouped_input.GOOD, grouped_input.DEALT


@pytest.fixture(scope="module", autouse=True)
def simulator() -> Iterator[None]:
    with simulating():
        yield
    for operation in (GATED, GROUPED, CONTIGUOUS):
        operation.calls.clear()


# --- gated_gemm

OUT = gated_input.QUANTIZED_OUT


@pytest.fixture(scope="module")
def gated_roads(simulator: None) -> Roads:
    return Roads(
        GATED.calls,
        [
            lambda: gated_gemm(A, B1, B2),
            lambda: gated_gemm(A, B1, B2, alpha=1.0),
            lambda: gated_gemm(A, B1, B2, out=torch.empty(64, 128)),
            lambda: gated_gemm(A, B1, B2, out=torch.empty(64, 128, dtype=torch.float16)),
            lambda: gated_gemm(A, B1, B2, out_global_scale=1.0),
            lambda: gated_gemm(A, B1, B2, out=OUT),
            # as an output in the bytes of B2
            lambda: gated_gemm(A, B1, B2, out=replace(OUT, data=torch.empty(128, 128, dtype=torch.uint8)[:64, :64])),
            lambda: gated_gemm(A, gated_input.HALVES, interleaved=True),
        ],
    )


def test_gated_table(gated_roads: Roads) -> None:
    for name, (args, options, message) in gated_input.REFUSED.items():
        said = gated_roads.refused(lambda args=args, options=options: gated_gemm(*args, **options))
        assert message in said, (name, said)


@pytest.mark.parametrize("which", ["a", "b2"])
def test_gated_over_an_operand(gated_roads: Roads, which: str) -> None:
    """A good call of the same key was planned."""
    memory = (A if which == "a" else B2).data.view(-1)
    out = memory[: 64 * 64].view(torch.float16).as_strided((64, 32), (32, 1))
    a = A
    weights = [BlockScaledTensor(b.data[:32], b.scale) for b in (B1, B2)]
    gated_gemm(a, *weights, out=torch.empty(64, 32, dtype=torch.float16))
    roads = Roads(GATED.calls, [lambda: gated_gemm(a, *weights, out=torch.empty(64, 32, dtype=torch.float16))])
    if which == "b2":
        out = out[:1].expand(1, 32)
        a = BlockScaledTensor(A.data[:1], A.scale)
        roads = Roads(GATED.calls, [lambda: gated_gemm(a, *weights, out=torch.empty(1, 32, dtype=torch.float16))])
    assert f"overlap {which}.data" in roads.refused(lambda: gated_gemm(a, *weights, out=out))


def test_gated_quantized_over_itself(gated_roads: Roads) -> None:
    """Codes over scales, and over the global scale: only addresses are wrong."""
    room = torch.zeros(64 * 64 + 1024, dtype=torch.uint8)
    scale = room.view(-1)[: OUT.scale.numel()].as_strided(OUT.scale.shape, OUT.scale.stride())
    bad = BlockScaledTensor(room[: 64 * 64].view(64, 64), scale, OUT.global_scale)
    assert "overlap out.data" in gated_roads.refused(lambda: gated_gemm(A, B1, B2, out=bad))
    factor = OUT.data.view(torch.float32).view(-1)[16]
    bad = replace(OUT, global_scale=factor)
    assert "overlap out.global_scale" in gated_roads.refused(lambda: gated_gemm(A, B1, B2, out=bad))


def test_gated_signs(gated_roads: Roads) -> None:
    scale = B2.scale.clone(memory_format=torch.preserve_format)
    scale[3, 0, 0, 1, 0, 0] = 0x90
    bad = replace(B2, scale=scale)
    assert "scales of b2: got 1 negative" in gated_roads.refused(lambda: gated_gemm(A, B1, bad))


# --- lists of groups


def _over() -> list[tuple[list, list[torch.Tensor]]]:
    """An output in an operand of its own group, and of another."""
    a, b = grouped_input.pair(k=512)
    out = a.data.view(torch.float32).view(-1)[:64].view(8, 8)
    return [([(a, b)], [out]), ([GOOD, (a, b)], [out, grouped_input.OUT[:8]])]


@pytest.fixture(scope="module")
def grouped_roads(simulator: None) -> Roads:
    pairs, other = [GOOD, GOOD], _over()
    return Roads(
        GROUPED.calls,
        [
            lambda: grouped_gemm(pairs),
            lambda: grouped_gemm([GOOD] * 3),
            lambda: grouped_gemm(pairs, alpha=1.0),
            lambda: grouped_gemm(pairs, alpha=torch.ones(2)),
            lambda: grouped_gemm(pairs, out=[grouped_input.OUT[:8], grouped_input.OUT[8:16]]),
            *(lambda x=x: grouped_gemm(x[0], out=[torch.empty(8, 8) for _ in x[1]]) for x in other),
        ],
    )


def test_grouped_tables(grouped_roads: Roads) -> None:
    for bad, words, _ in table(grouped_input.test_a_group_that_cannot_be_is_named):
        assert words in grouped_roads.refused(lambda bad=bad: grouped_gemm([GOOD, bad, GOOD]))
    for out, words, _ in table(grouped_input.test_outputs):
        assert words in grouped_roads.refused(lambda out=out: grouped_gemm([GOOD, GOOD], out=out))
    for options, words, _ in table(grouped_input.test_options):
        assert words in grouped_roads.refused(lambda options=options: grouped_gemm([GOOD, GOOD], **options))
    assert "problems: got none" in grouped_roads.refused(lambda: grouped_gemm([]))
    for problems, out in _over():
        assert "memory of " in grouped_roads.refused(lambda problems=problems, out=out: grouped_gemm(problems, out=out))


@pytest.mark.parametrize("backend", ["sim", "reference"])
@pytest.mark.parametrize("what", ["alpha", "global scale of a of group 1"])
def test_grouped_over_what_scales(what: str, backend: str) -> None:
    """The kernel reads both where they are."""
    room = torch.ones(192)
    scaled = BlockScaledTensor(GOOD[0].data, GOOD[0].scale, room[4] if what != "alpha" else None)
    options = {"backend": backend, "alpha": room[8:10] if what == "alpha" else None}
    problems, apart = [GOOD, (scaled, GOOD[1])], room[128:].view(8, 8)
    roads = Roads(GROUPED.calls, [lambda: grouped_gemm(problems, out=[apart, torch.empty(8, 8)], **options)])
    said = roads.refused(lambda: grouped_gemm(problems, out=[room[:64].view(8, 8), torch.empty(8, 8)], **options))
    # whichever comes first in memory is what the other overlaps
    assert f"overlap {what}" in said or f"memory of {what.removesuffix(' of group 1')}: got bytes" in said


def test_grouped_signs(grouped_roads: Roads) -> None:
    a, b = grouped_input.pair()
    a.scale[0] |= 0x80
    assert "group 1: scales of a: got " in grouped_roads.refused(lambda: grouped_gemm([GOOD, (a, b)]))


# --- rows of groups


def _dealt(**options: Any) -> torch.Tensor:
    return grouped_gemm_contiguous(options.pop("a", DEALT.rows), DEALT.stack, **options)


@pytest.fixture(scope="module")
def dealt_roads(simulator: None) -> Roads:
    return Roads(
        CONTIGUOUS.calls,
        [
            _dealt,
            lambda: _dealt(alpha=2.0),
            lambda: _dealt(alpha=torch.ones(2)),
            lambda: _dealt(status=torch.zeros(1, dtype=torch.int32)),
            lambda: _dealt(out=torch.empty(6, 8, dtype=torch.float16)),
        ],
    )


def test_dealt_table(dealt_roads: Roads) -> None:
    for a, options, words, _ in table(grouped_input.test_contiguous_form):
        assert words in dealt_roads.refused(lambda a=a, options=options: _dealt(a=a, **options))
    assert "alpha: got str" in dealt_roads.refused(lambda: _dealt(alpha="1"))
    assert "status: got list" in dealt_roads.refused(lambda: _dealt(status=[0]))


@pytest.mark.parametrize("part", ["data", "scale", "offsets", "alpha"])
def test_dealt_over_an_input(dealt_roads: Roads, part: str) -> None:
    """Only addresses are wrong."""
    alpha = torch.ones(64)
    memory = alpha if part == "alpha" else getattr(DEALT.rows, part)
    a = DEALT.rows
    if part == "offsets":
        offsets = torch.zeros(64, dtype=torch.int32)
        offsets[:3] = DEALT.rows.offsets
        a, memory = replace(a, offsets=offsets[:3]), offsets
    given = {"a": a, "alpha": alpha[:2]}
    raw = memory.reshape(-1).view(torch.uint8)
    out = raw[:96].view(torch.float16).view(6, 8)
    good = Roads(CONTIGUOUS.calls, [lambda: _dealt(**given, out=_twin(out))])
    assert f"overlap {'alpha' if part == 'alpha' else f'a.{part}'} at" in good.refused(lambda: _dealt(**given, out=out))


def _twin(x: torch.Tensor) -> torch.Tensor:
    """Memory of its own at an address that is aligned as that of ``x``."""
    room = torch.empty(x.numel() + 64, dtype=x.dtype)
    first = (x.data_ptr() - room.data_ptr()) % 64 // x.element_size()
    return room[first : first + x.numel()].view(x.shape)
