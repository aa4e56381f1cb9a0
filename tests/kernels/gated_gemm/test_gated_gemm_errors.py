"""What gated_gemm() refuses, and how it says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.gated_gemm_problems import Gated, make, subset
from support.gemm_problems import Case

from cute_nvfp4 import BlockScaledTensor, gated_gemm, interleave, to_blocked
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.kernels.gemm.limits import can_implement
from cute_nvfp4.ops.gated_gemm import compile_gated_gemm
from cute_nvfp4.planning.gemm import Plan

BASE = Case(m=64, n=128, k=256, batch=0, out="new")


def operands(**changes: object) -> tuple[BlockScaledTensor, ...]:
    problem = make(Gated(replace(BASE, **changes)))
    return problem.a, *problem.alone


A, B1, B2 = operands()
OTHER_K = operands(k=288)[2]
OTHER_ROWS = operands(n=256)[2]
BATCHED = operands(batch=1)[2]
MX = operands(a_format="mxfp4", b_format="mxfp4")[2]
ODD = operands(n=72)
HALVES = make(Gated(BASE, form="halves")).weights[0]
NAN_OUT = BlockScaledTensor(torch.zeros(64, 64, dtype=torch.uint8), to_blocked(torch.zeros(64, 8, dtype=torch.uint8)))
QUANTIZED_OUT = replace(NAN_OUT, global_scale=torch.tensor(1.0))


def plan(swap: bool = False, workers: int = 2, **fields: object) -> Plan:
    return Plan(GemmConfig(**fields), swap, workers)


REFUSED = {
    "gate": ((A, B1, B2), {"gate": "swish"}, "gate: got 'swish', expected one of silu, gelu_tanh, gelu_erf, relu"),
    "type of b2": ((A, B1, B2.data), {}, "b: got Tensor"),
    "K": ((A, B1, OTHER_K), {}, "K of a and b: got 256 and 288"),
    "rows": ((A, B1, OTHER_ROWS), {}, "rows of b1 and b2: got 128 and 256"),
    "batch": ((A, B1, BATCHED), {}, "batch dimension: got a 2-d, b2 3-d"),
    "formats of the weights": ((A, B1, MX), {}, "formats of b1 and b2: got nvfp4 and mxfp4"),
    "one global scale": (
        (A, B1, replace(B2, global_scale=torch.tensor(2.0))), {},
        "global scales of b1 and b2: got none and one, expected the same",
    ),
    "formats": ((A, MX, MX), {}, "formats of a and b1: got nvfp4 and mxfp4"),
    "row-major scales": ((subset(A, slice(None)), B1, B2), {}, "scales of a: got rowmajor, expected blocked"),
    "row-major scales of b2": ((A, B1, subset(B2, slice(None))), {}, "scales of b2: got rowmajor"),
    "half a weight": ((ODD[0], ODD[1]), {}, "rows of b1, which is both weights: got 72, expected a multiple of 256"),
    "interleaved and two": ((A, B1, B2), {"interleaved": True}, "interleaved: got True with b2"),
    "interleaved": ((A, HALVES), {"interleaved": 1}, "interleaved: got int, expected bool"),
    "alpha": ((A, B1, B2), {"alpha": torch.ones(2)}, "alpha: got shape (2,), expected one element"),
    "out": ((A, B1, B2), {"out": torch.empty(64, 64)}, "shape of out: got (64, 64), expected (64, 128)"),
    "out overlaps": ((A, B1, B2), {"out": B2.data.view(torch.float16)[:64, :64].as_strided((64, 128), (0, 1))}, "out"),
    "quantized and dtype": ((A, B1, B2), {"out_global_scale": 1.0, "out_dtype": torch.float16}, "out_dtype: got"),
    "quantized N": (ODD, {"out_global_scale": 1.0}, "N of a quantized result: got 72, expected a multiple of 16"),
    "global scale": ((A, B1, B2), {"out_global_scale": 2.0**119}, "global scale: got"),
    "type of a global scale": ((A, B1, B2), {"out_global_scale": "auto"}, "global scale: got 'auto'"),
    "quantized, other out": ((A, B1, B2), {"out": torch.empty(64, 128), "out_global_scale": 1.0}, "out: got Tensor"),
    "two global scales": ((A, B1, B2), {"out": QUANTIZED_OUT, "out_global_scale": 1.0}, "out_global_scale: got one"),
    "out without global scale": ((A, B1, B2), {"out": NAN_OUT}, "global scale of out: got none"),
    "shape of a quantized out": (operands(n=256), {"out": QUANTIZED_OUT}, "shape of out: got (64, 128), expected"),
    "quantized out overlaps": (
        (A, B1, B2), {"out": replace(QUANTIZED_OUT, data=B2.data[:64, :64])}, "memory of out: got bytes",
    ),
    "quantized out, one row": (
        (A, B1, B2), {"out": replace(QUANTIZED_OUT, data=QUANTIZED_OUT.data[:1].expand(64, 64))}, "strides of out",
    ),
    "swap, quantized": (
        (A, B1, B2), {"config": plan(True), "out_global_scale": 1.0}, "contiguous dimension of a quantized output",
    ),
    "tensor memory": ((A, B1, B2), {"config": plan(tile_n=256)}, "2 x 256"),
    "interleaved tiles": (
        (A, interleave(B1, B2)), {"interleaved": True, "config": plan(tile_n=192)}, "whole blocks of 128 interleaved",
    ),
    "quantized slices": (
        (A, *operands(k=2048)[1:]), {"out_global_scale": 1.0}, "K of a and b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("backend", ["sim", "reference"])
def test_bad_input(name: str, backend: str) -> None:
    args, options, message = REFUSED[name]
    only_kernels = ("scales", "whole", "2 x 256", "contiguous dimension")
    if backend == "reference" and any(x in message for x in only_kernels):
        return
    with pytest.raises((OperandError, OperandTypeError)) as error:
        gated_gemm(*args, **options, backend=backend)
    assert message in str(error.value)


def test_negative_scales_are_refused_in_the_simulator() -> None:
    problem = make(Gated(BASE))
    problem.weights[1].scale[3, 0, 0, 1, 0, 0] = 0x90
    with pytest.raises(OperandError, match="scales of b2: got 1 negative ones"):
        problem.run()


def test_interleave_refuses() -> None:
    for weights, message in (
        ((B1, OTHER_ROWS), "rows of b1 and b2"),
        (ODD[1:], "rows of b1: got 72, expected a multiple of 128"),
        ((replace(B1, global_scale=torch.tensor(1.0)), B2), "global scales of b1 and b2: got one and none"),
        (
            tuple(replace(b, global_scale=torch.tensor(value)) for b, value in ((B1, 1.0), (B2, 2.0))),
            "global scales of b1 and b2: got 1.0 and 2.0, expected equal ones",
        ),
        ((B1, subset(B2, slice(None))), "scale layout: got rowmajor"),
    ):
        with pytest.raises(OperandError, match=message):
            interleave(*weights)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gate": "silu"}, "gate: got silu, expected one of "),
        ({"products": 2}, "gate: got , expected one of silu"),
        ({"shared": "b"}, "shared: got b, expected one of a"),
        ({"interleaved": True}, "interleaved: got True"),
        ({"products": 2, "gate": "silu", "out": "nvfp4"}, "store of a quantized output: got tma"),
        (
            {"products": 2, "gate": "silu", "out": "nvfp4", "store": "direct", "tile_n": 64, "split_k": 8},
            "columns that a thread quantizes: got 8, expected a multiple of 16",
        ),
        ({"bias_dtype": "nvfp4"}, "bias_dtype: got nvfp4"),
    ],
)
def test_impossible_configurations(fields: dict, message: str) -> None:
    assert message in can_implement(GemmConfig(**fields))


def test_a_gated_kernel_has_two_products_and_no_bias() -> None:
    for config, message in (
        (GemmConfig(), "products of a gated GEMM: got 1"),
        (GemmConfig(products=2, gate="silu", bias="n"), "bias of a gated GEMM: got n"),
    ):
        with pytest.raises(OperandError, match=message):
            compile_gated_gemm(config)
