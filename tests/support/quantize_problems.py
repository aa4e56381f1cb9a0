"""Inputs and the comparison for tests of the fused quantization kernels, in the simulator and on a GPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cute_nvfp4.formats import decode_e4m3, encode_e4m3
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.planning.quantize import QuantizeProblem, can_implement
from cute_nvfp4.quantization.block_request import GlobalScale, Request, residual
from cute_nvfp4.quantization.blocks import _error
from cute_nvfp4.quantization.rounding import round_e2m1
from cute_nvfp4.quantization.rules import resolve_format, resolve_rule, rules_of
from support import backends

DATA = Path(__file__).parents[1] / "data" / "quantization"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VIEWS = {
    "rows apart": lambda x: x[::2, :128],
    "from 2": lambda x: x[:, 2:130],
    "from 4": lambda x: x[:, 4:132],
    "from 1": lambda x: x[:, 1:129],
    "columns apart": lambda x: x[:, ::2],
}
"""Views of a matrix with at least 132 columns, with strides and alignments that whole rows do not have."""
SWEEP = pytest.mark.sweep(shared=("arch", "format,rule", "rule", "dtype", "layout", "cluster"))
"""A sweep of the quantization kernels: the tests of a module cover these axes together."""
FORMATS = ("nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2")
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def rules(format: str, tile: bool = False) -> list[str]:
    """The rules of ``format`` that the kernels have, of square tiles if ``tile``."""
    kind = resolve_format(format)
    problems = {rule: QuantizeProblem(kind, resolve_rule(rule, kind), 128, 512, tile=tile) for rule in rules_of(format)}
    return [rule for rule, problem in problems.items() if not can_implement(problem)]


PAIRS = [(format, rule) for format in FORMATS for rule in rules(format)]
TILE_PAIRS = [(format, rule) for format in FORMATS for rule in rules(format, tile=True)]


@functools.cache
def golden_inputs() -> dict[str, torch.Tensor]:
    """The inputs of the golden vectors that are matrices of whole blocks, by peer and name."""
    found = {}
    for path in sorted(DATA.glob("*.npz")):
        with np.load(path) as file:
            for name in file.files:
                if name.startswith("input/") and file[name].ndim == 2 and file[name].shape[1] % 32 == 0:
                    found[f"{path.stem}/{name}"] = torch.from_numpy(file[name].astype(np.float32))
    return found


def edges(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    """Random values with blocks of everything that rounds, overflows, vanishes or is not a number."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    blocks = x.view(-1, 16)
    ties = torch.tensor([0.0, *TIES, 6.0, *[-tie for tie in TIES]])
    special = [
        torch.zeros(16),
        -torch.zeros(16),
        torch.full((16,), 1e-41),
        torch.full((16,), 3.4e38),
        torch.full((16,), 2.0**-127),
        torch.full((16,), 464.0),
        ties,
        ties * 448,
        ties * 2.0**-9,
        ties * 1.3,
        torch.arange(-8.0, 8.0),
        torch.arange(16) % 3 - 1.0,
    ]
    for number, block in enumerate(special):
        blocks[4 * number] = block
    for number, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        blocks[4 * len(special) + number, 5 * number] = value
    blocks[1] *= 1e-30
    blocks[5] *= 1e30
    return x


def near_ties(dtype: torch.dtype, global_scale: float) -> torch.Tensor:
    """(127, 512): for each E4M3 scale a row whose blocks get that scale from rule ``max``, with elements exactly on
    every tie and on both sides of it, as near as ``dtype`` allows."""
    factor = torch.tensor(global_scale, dtype=torch.float32).double()
    scale = decode_e4m3(torch.arange(1, 127, dtype=torch.uint8)).double() * factor
    ties = torch.tensor(TIES, dtype=torch.float64) * torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    nearest = (scale[:, None, None] * ties).to(dtype)
    bits = nearest.view(torch.int32 if dtype is torch.float32 else torch.int16)
    beside = [(bits + step).view(dtype) for step in range(-15, 16)]
    values = torch.cat([part.reshape(len(scale), -1) for part in beside], 1)
    blocks = torch.zeros(len(scale), 32, 16, dtype=dtype)
    blocks[:, :, 0] = (6 * scale).to(dtype)[:, None]
    blocks[:, :, 1:] = values[:, torch.arange(32 * 15) % values.shape[1]].reshape(len(scale), 32, 15)
    return blocks.reshape(len(scale), -1)


def nearly_equal(rule: str, global_scale: float, dtype: torch.dtype, rows: int = 64, in_row: int = 32) -> torch.Tensor:
    """(rows, 512) of random blocks. In each row, ``in_row`` blocks have the most similar errors under the two scales of
    4/6; the others have the most different ones."""
    x, order = _by_likeness(rule, global_scale, dtype)
    chosen = torch.cat([order[: rows * in_row].view(rows, -1), order.flip(0)[: rows * (32 - in_row)].view(rows, -1)], 1)
    places = torch.rand(rows, 32, generator=torch.Generator().manual_seed(10)).argsort(1)
    return x[:, chosen.gather(1, places).flatten()].t().reshape(rows, -1).to(dtype)


@functools.lru_cache(maxsize=4)
def _by_likeness(rule: str, global_scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(16, 2**17) random blocks, and their order by similarity of the two errors, most similar first."""
    resolved = resolve_format("nvfp4")
    factor = GlobalScale.of(torch.tensor(global_scale))
    request = Request(resolved, resolve_rule(rule, resolved), factor)
    x = torch.randn(16, 1 << 17, generator=torch.Generator().manual_seed(9)) * (200 * factor.value)
    x = x.to(dtype).float()
    wanted = x.abs().amax(0) / 6 * factor.inverse
    errors = []
    for scale in (encode_e4m3(wanted), encode_e4m3(wanted * 1.5)):
        value = decode_e4m3(scale)
        difference = residual(x, round_e2m1(x * (1.0 / (factor.value * value))), value, factor)
        errors.append(_error(difference, request))
    return x, ((errors[0] - errors[1]).abs() / errors[0]).argsort()


def fused(x: torch.Tensor, format: str, rule: str, **options: object) -> BlockScaledTensor:
    """``x`` (MN, K) or (L, MN, K) quantized by the kernels. options: of ``quantize``; the default is no global scale,
    and ``seed`` means stochastic rounding."""
    return _quantized(x, format, rule, **{"backend": backends.backend(), **options})


def _quantized(
    x: torch.Tensor, format: str, rule: str, *, seed: int | None = None, global_scale: object = None, **options: Any
) -> BlockScaledTensor:
    x = backends.place(x)
    options = _placed({"global_scale": global_scale, **options})
    if seed is not None:
        options |= {"rounding": "stochastic", "generator": seed}
    return quantize(x if x.ndim == 3 else x[None], format, rule, **options)


def _placed(options: dict[str, Any]) -> dict[str, Any]:
    return {name: backends.place(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def differences(x: torch.Tensor, format: str, rule: str, **options: object) -> list[str]:
    """Where the kernels and the reference disagree, including every byte of the scales' padding."""
    got = fused(x, format, rule, **options)
    want = _quantized(x, format, rule, **{**options, "backend": "reference"})
    parts = [("data", got.data, want.data), ("scale", got.scale, want.scale)]
    if want.global_scale is not None:
        parts.append(("global scale", got.global_scale.view(torch.int32), want.global_scale.view(torch.int32)))
    assert (got.global_scale is None) == (want.global_scale is None)
    return [f"{name}: {int((a != b).sum())} of {a.numel()}" for name, a, b in parts if not torch.equal(a, b)]
