"""``quantize(…, out=)``: the same bits in memory that is there already, and what cannot be written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import NVFP4, as_bytes
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.quantization.rules import resolve_format
from cute_nvfp4.scale_layout import blocked_view

X = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(1))
CASES: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "computed": (X, {}),
    "a vector": (X[0, 0], {}),
    "a number": (X[0], {"global_scale": 0.01}),
    "a tensor": (X[0], {"global_scale": torch.tensor([0.01])}),
    "no global scale": (X[0], {"global_scale": None}),
    "row-major": (X, {"scale_layout": "rowmajor"}),
    "tiles, stochastic": (X[0], {"block_2d": True, "rounding": "stochastic", "generator": 3}),
    "read transposed": (X[0].t(), {"transpose": True}),
    "MX": (X[0], {"format": "mxfp8_e4m3"}),
    "padded": (X[0, :, :50], {"pad": True}),
    "searched": (X[0], {"rule": "optimal"}),
}


def room(like: BlockScaledTensor) -> BlockScaledTensor:
    """An operand like ``like`` of other values; rows of data are twice as long as they need be, scales are views."""
    shape = like.data.shape
    data = torch.full((*shape[:-1], 2 * shape[-1]), 0xEE, dtype=torch.uint8)[..., : shape[-1]]
    if like.scale_layout == "blocked":
        flat = torch.full((like.scale.numel(),), 0xEE, dtype=torch.uint8)
        scale = flat if like.is_batched else blocked_view(flat, like.rows, like.format.scale_columns(like.k))
    else:
        scale = torch.full_like(like.scale, 0xEE).view(like.format.scale_dtype)
    global_scale = None if like.global_scale is None else torch.full((1,), torch.nan)
    return BlockScaledTensor(data, scale, global_scale, like.format)


def check(x: torch.Tensor, **options: Any) -> None:
    want = quantize(x, **options)
    out = room(want)
    before = out.data.data_ptr(), out.scale.data_ptr()
    assert quantize(x, **options, out=out) is out
    assert (out.data.data_ptr(), out.scale.data_ptr()) == before
    assert torch.equal(out.data, want.data)
    blocked = want.scale_layout == "blocked"
    got_scale, want_scale = (x.blocked_scale() if blocked else x.scale for x in (out, want))
    assert torch.equal(as_bytes(got_scale), want_scale)
    if want.global_scale is not None:
        assert float(out.global_scale) == float(want.global_scale)
    # nothing beside the rows was written
    assert out.data.untyped_storage()[-1] == 0xEE


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_the_same_bits(name: str, backend: str) -> None:
    x, options = CASES[name]
    if backend == "sim" and name == "padded":
        pytest.skip("the kernels do not pad")
    check(x, **options, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_the_global_scale_of_out_may_be_the_given_one(backend: str) -> None:
    """A decoding step: one operand, calibrated once and reused."""
    out = quantize(X[0], global_scale=0.01, backend="reference")
    given = out.global_scale
    for x in (X[1], X[0]):
        want = quantize(x, global_scale=0.01, backend="reference")
        quantize(x, global_scale=given, out=out, backend=backend)
        assert (
            torch.equal(out.data, want.data)
            and torch.equal(out.scale, want.scale)
            and float(given) == float(want.global_scale)
        )


@pytest.mark.parametrize("backend", ["reference", "sim"])
@pytest.mark.parametrize("scale", ["auto", "given"])
def test_autograd_knows_what_was_written(backend: str, scale: str) -> None:
    """What it had saved of ``out`` is not used. A global scale that is only read stays as it is."""
    out = quantize(X[0], backend="reference")
    parts = (out.data, out.scale, out.global_scale)
    before = [x._version for x in parts]
    quantize(X[1], global_scale=out.global_scale if scale == "given" else scale, out=out, backend=backend)
    written = [x._version > old for x, old in zip(parts, before)]
    assert written[:2] == [True, True]
    assert written[2] or scale == "given"
    with torch.inference_mode():
        quantize(X[1], out=quantize(X[0]), backend=backend)


def test_a_compiled_function_writes_to_it() -> None:
    out, want = room(quantize(X)), quantize(X)
    torch.compile(lambda x: quantize(x, out=out), fullgraph=True, backend="aot_eager")(X)
    assert torch.equal(out.data, want.data) and torch.equal(as_bytes(out.blocked_scale()), want.scale)


def operand(**changed: Any) -> BlockScaledTensor:
    """What the result of ``quantize(X[0])`` fits, but for what is ``changed``."""
    data = changed.pop("data", torch.zeros(40, 32, dtype=torch.uint8))
    scale = changed.pop("scale", torch.zeros(512, dtype=torch.uint8))
    return BlockScaledTensor(data, scale, changed.pop("global_scale", torch.ones(1)), changed.pop("format", NVFP4))


SHARED = torch.zeros(40 * 64 + 512, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("out", "match"),
    [
        (operand(data=torch.zeros(41, 32, dtype=torch.uint8)), "shape of the data of out: got .41, 32., expected"),
        (operand(data=torch.zeros(1, 40, 32, dtype=torch.uint8)), "shape of the data of out"),
        (operand(global_scale=None), "global scale of out: got none, expected one"),
        (operand(scale=torch.zeros(40, 4, dtype=torch.uint8)), "scale layout of out: got rowmajor, expected blocked"),
        (operand(global_scale=torch.ones(1).requires_grad_()), "one that requires a gradient"),
        (operand(data=torch.zeros(32, dtype=torch.uint8).expand(40, 32)), "strides of out"),
        (operand(data=SHARED[:1280].view(40, 32), scale=SHARED[1024:1536]), "overlap out.data"),
    ],
    ids=str,
)
def test_what_cannot_be_written_to(out: BlockScaledTensor, match: str) -> None:
    with pytest.raises(OperandError, match=match):
        quantize(X[0], out=out)


def test_errors_of_other_requests() -> None:
    mx = operand(data=torch.zeros(40, 64, dtype=torch.uint8), global_scale=None, format=resolve_format("mxfp8"))
    with pytest.raises(OperandError, match="format of out: got mxfp8, expected nvfp4"):
        quantize(X[0], out=mx)
    with pytest.raises(OperandError, match="global scale of out: got one, expected none"):
        quantize(X[0], global_scale=None, out=operand())
    with pytest.raises(OperandTypeError, match="out: got Tensor, expected BlockScaledTensor"):
        quantize(X[0], out=torch.zeros(40, 32))
    rows = torch.zeros(40 * 4 + 1, dtype=torch.uint8)[1:].view(40, 4)
    with pytest.raises(OperandError, match="expected contiguous, at a multiple of 4 bytes"):
        quantize(X[0], scale_layout="rowmajor", out=operand(scale=rows))
    memory = torch.randn(40 * 64 + 512)
    own = operand(data=memory.view(torch.uint8)[: 40 * 32].view(40, 32))
    with pytest.raises(OperandError, match="overlap x"):
        quantize(memory[: 40 * 64].view(40, 64), out=own)
