"""Where this library and its peers differ on purpose: every difference once, with its reason and where it applies.

A difference marks elements (and whole blocks) from the *input* and the rule alone, never from what came out, so that a
mark excuses nothing it does not explain. Everywhere else the arrays must be equal, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from cute_nvfp4 import formats


@dataclass(frozen=True)
class Case:
    """One golden array: what it was made from. x: (rows, K) float64, as quantized; global_scale 1 where there is none.

    kind: "elements" or "scales" (row-major), "blocked" scales, "values" that were dequantized, or "scalar".
    """

    peer: str
    key: str
    kind: str
    x: np.ndarray
    block: int = 16
    tile: int = 1
    global_scale: float = 1.0

    @property
    def blocks(self) -> np.ndarray:
        """(rows / tile, K / block, tile · block)."""
        rows, k = self.x.shape
        tiles = self.x.reshape(rows // self.tile, self.tile, k // self.block, self.block)
        return tiles.transpose(0, 2, 1, 3).reshape(rows // self.tile, k // self.block, -1)

    @property
    def largest(self) -> np.ndarray:
        """Largest magnitude of each block."""
        return np.abs(self.blocks).max(-1)

    def spread(self, blocks: np.ndarray) -> np.ndarray:
        """Something of each block, for each of its elements."""
        return blocks.repeat(self.tile, 0).repeat(self.block, 1)


Mask = np.ndarray | bool


@dataclass(frozen=True)
class Difference:
    """``of`` matches "peer:key"; ``blocks`` and ``elements`` mark what differs; ``reason`` says why."""

    name: str
    of: str
    reason: str
    blocks: Callable[[Case], Mask] = lambda case: False
    elements: Callable[[Case], Mask] = lambda case: False

    def applies(self, case: Case) -> bool:
        return re.search(self.of, f"{case.peer}:{case.key}") is not None


def e4m3(values: np.ndarray) -> np.ndarray:
    codes = formats.encode_e4m3(torch.from_numpy(np.asarray(values, np.float32)))
    return formats.decode_e4m3(codes).to(torch.float64).numpy()


def rule_of(case: Case) -> str:
    return re.sub(r"^api/", "", case.key).split("/")[2]


def candidates(case: Case) -> list[np.ndarray]:
    """The scales, times the global scale, that an NVFP4 rule of fouroversix considers for each block."""
    wanted = case.largest / (4 if rule_of(case) == "static_4" else 6) / case.global_scale
    adaptive = not rule_of(case).startswith("static")
    return [e4m3(wanted * factor) * case.global_scale for factor in ((1, 1.5) if adaptive else (1,))]


def scaled(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(scale == 0, 0, values / scale)


def beyond_seven(case: Case) -> np.ndarray:
    """Elements that some candidate scales to 7 or more."""
    return np.any([np.abs(scaled(case.x, case.spread(scale))) > 6.9999 for scale in candidates(case)], axis=0)


def unsaturated_blocks(case: Case) -> Mask:
    if rule_of(case).startswith("static"):
        return False
    with np.errstate(invalid="ignore"):
        return np.any([case.largest > 6.9999 * scale for scale in candidates(case)], axis=0)


def near_a_midpoint(case: Case) -> np.ndarray:
    """Blocks whose unrounded scale lies within rounding error of the middle between two E4M3 numbers."""
    wanted = case.largest / (4 if rule_of(case) == "static_4" else 6) / case.global_scale
    near = [e4m3(wanted * f * (1 - 1e-6)) != e4m3(wanted * f * (1 + 1e-6)) for f in (1, 1.5)]
    return near[0] if rule_of(case).startswith("static") else near[0] | near[1]


def near_a_tie(case: Case) -> np.ndarray:
    """Blocks whose two candidates have errors that float32 cannot tell apart."""
    if rule_of(case).startswith("static"):
        return np.zeros_like(case.largest, bool)
    errors = []
    for scale in candidates(case):
        y = scaled(case.blocks, scale[..., None])
        codes = formats.encode_e2m1(torch.from_numpy(y))
        error = np.abs(formats.decode_e2m1(codes).numpy() * scale[..., None] - case.blocks)
        rule = rule_of(case)
        errors.append(error.max(-1) if rule == "abs_max" else (error**2 if rule == "mse" else error).sum(-1))
    # an exact block has an error of rounding only: compare with the block, not with the error
    size = case.largest if rule_of(case) != "mse" else case.largest**2
    if not np.isfinite(case.x).all():
        return np.ones_like(case.largest, bool)
    return np.abs(errors[0] - errors[1]) <= 1e-6 * np.maximum(errors[0], errors[1]) + 1e-13 * size


def negative_zero(case: Case) -> np.ndarray:
    """Elements that are −0, or that become −0 in float32 when they are scaled."""
    scale = candidates(case)[0] if "nvfp4" in case.key else np.maximum(case.largest, 2.0**-126)
    with np.errstate(invalid="ignore"):
        return np.signbit(case.x) & (np.abs(scaled(case.x, case.spread(scale))) < 2.0**-148)


def not_finite(case: Case) -> np.ndarray:
    return ~np.isfinite(case.largest)


def quotient_is_tiny(case: Case) -> np.ndarray:
    """Blocks whose scale is 2**-127, the smallest of UE8M0."""
    top = 4 if "static_4" in case.key else 6
    return (case.largest > 0) & (case.largest / top <= 2.0**-127)


def just_above_a_power_of_two(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        mantissa = np.frexp(values)[0] * 2
    return (mantissa > 1) & (mantissa < 1 + 2.0**-18)


def just_below_a_power_of_two(case: Case) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.frexp(case.largest)[0] > 1 - 2.0**-16


def torchao_smallest_scale(case: Case) -> np.ndarray:
    """Blocks whose MX scale is code 0."""
    largest_exponent = {"mx_e4m3": 8, "mx_e5m2": 15, "mx_fp4": 2}[case.key.split("/")[1]]
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.maximum(case.largest, 2.0**-127))) - largest_exponent
    return (case.largest > 0) & (exponent <= -126)


def midpoints(case: Case) -> np.ndarray:
    """Elements exactly between two E2M1 values under qwantize's scale, of its golden array."""
    y = np.abs(scaled(case.x, case.spread(qwantize_scale(case))))
    return np.isin(y, [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def qwantize_scale(case: Case) -> np.ndarray:
    from quant_golden import arrays

    return arrays(case.peer)[re.sub("code_u8$", "scale_f32", case.key)].astype(np.float64)


def double_rounding(case: Case) -> np.ndarray:
    """Elements that bfloat16 moves onto a midpoint between two E2M1 values."""
    with np.errstate(divide="ignore"):
        exponent = np.ceil(np.log2(np.maximum(case.largest, 2.0**-126) / 6))
    y = case.x / case.spread(2.0**exponent)
    rounded = torch.from_numpy(y).to(torch.float32).to(torch.bfloat16).to(torch.float64).numpy()
    return (y != rounded) & np.isin(np.abs(rounded), [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


FOUROVERSIX_NVFP4 = r"^fouroversix[^:]*:.*nvfp4/"
FOUROVERSIX_MXFP4 = r"^fouroversix[^:]*:.*mxfp4/"


def everything(case: Case) -> Mask:
    return True


DIFFERENCES = (
    Difference(
        "NaN, infinity (fouroversix NVFP4)",
        r"^fouroversix.*:nonfinite/nvfp4/",
        "one NaN or infinity makes the peer's global scale, and so its whole tensor, garbage; here its block is NaN",
        blocks=everything,
    ),
    Difference(
        "NaN, infinity (blocks)",
        r"^(fouroversix.*:nonfinite/mxfp4|qwantize.*:nonfinite|torchao.*:nonfinite/(mx_|nvfp4/f32/pts_none))",
        "the peers saturate infinity and zero or garble its block; here a block with NaN or infinity is NaN",
        blocks=not_finite,
    ),
    Difference(
        "NaN, infinity, zeros (torchao NVFP4)",
        r"^torchao.*:(nonfinite|zeros)/nvfp4/f32/pts_amax",
        "an amax of NaN, infinity or 0 makes the peer's tensor garbage; here the amax is of finite values, and not 0",
        blocks=everything,
    ),
    Difference(
        "no saturation",
        FOUROVERSIX_NVFP4,
        "the peer's PyTorch path turns |y| ≥ 7 into code 8 (−0); here, and in its GPU path, it saturates at 6",
        blocks=unsaturated_blocks,
        elements=beyond_seven,
    ),
    Difference(
        "scale at a midpoint",
        FOUROVERSIX_NVFP4,
        "the peer multiplies by 2688 / amax, this library by 1 / global scale: one more rounding, seen only in ties",
        blocks=near_a_midpoint,
    ),
    Difference(
        "tied candidates",
        FOUROVERSIX_NVFP4,
        "the peer's error is q·s·amax/1536 − x, here q·s·g − x; and tiles are summed so that the transpose agrees",
        blocks=near_a_tie,
    ),
    Difference(
        "overflow (fouroversix)",
        r"^fouroversix[^:]*:huge/nvfp4/(mse|mae|abs_max)",
        "the peer's q·s·amax overflows in large tensors, and the error with it",
        blocks=lambda case: case.largest > 3e38 / 1536,
    ),
    Difference(
        "−0",
        r"^fouroversix[^:]*:(?!.*stoch)|^qwantize",
        "the peers drop the sign of zeros; here it is kept, as cvt.e2m1x2, torch and torchao keep it",
        elements=negative_zero,
    ),
    Difference(
        "−0 (qwantize's second MXFP4)",
        r"^qwantize.*_torch/.*code_u8",
        "that function also drops the sign of what rounds to zero",
        elements=lambda case: np.signbit(case.x) & (np.abs(scaled(case.x, case.spread(qwantize_scale(case)))) <= 0.25),
    ),
    Difference(
        "zero blocks (fouroversix MXFP4)",
        r"^fouroversix_1.0.5:.*mxfp4/",
        "a defect of 1.0.5, corrected in 1.1.0: a block of zeros gets codes 11",
        elements=lambda case: case.spread(case.largest == 0),
    ),
    Difference(
        "smallest scale (fouroversix MXFP4)",
        FOUROVERSIX_MXFP4,
        "where 2**-127 is enough, the peer takes 2**-126",
        blocks=quotient_is_tiny,
    ),
    Difference(
        "dequantize (fouroversix)",
        r"^fouroversix.*nvfp4.*dequant_f32",
        "q·s·amax/1536 rounds twice, element · scale · global scale once",
        elements=everything,
    ),
    Difference(
        "scale 0 (qwantize)",
        r"^qwantize.*nvfp4_",
        "where the formula's scale is 0 the peer leaves out the search, and its codes are garbage; here it is searched",
        blocks=lambda case: e4m3(case.largest / 6) == 0,
    ),
    Difference(
        "ties (qwantize)",
        r"^qwantize.*code_u8",
        "the peer rounds ties of elements toward zero; here, as in hardware, to even",
        elements=midpoints,
    ),
    Difference(
        "small blocks (qwantize MXFP4)",
        r"^qwantize.*mxfp4_",
        "the peer takes the largest magnitude for at least 1e-30",
        blocks=lambda case: case.largest < 1e-30,
    ),
    Difference(
        "logarithm (qwantize MXFP4)",
        r"^qwantize.*mxfp4_",
        "the peer's float32 log2 misrounds just below powers of two; here the exponent is read off the bits",
        blocks=just_below_a_power_of_two,
    ),
    Difference(
        "overflow (qwantize MXFP4)",
        r"^qwantize.*mxfp4_optimal",
        "squares above 3e38 are infinite, and ties; here a block's errors are scaled before they are squared",
        blocks=lambda case: case.largest > 1e18,
    ),
    Difference(
        "smallest scale (torchao MX)",
        r"^torchao.*/mx_.*/values",
        "under scale code 0, 2**-127, the peer divides by 2**-126: its values are off by a factor of two",
        blocks=torchao_smallest_scale,
    ),
    Difference(
        "logarithm (torchao, torch)",
        r"^torchao.*/mx_fp4/.*rceil|^torch_.*to_mxfp/mxfp4",
        "their ceil(log2(…)) misrounds just above powers of two; here the exponent is read off the bits",
        blocks=lambda case: just_above_a_power_of_two(case.largest / 6),
    ),
    Difference(
        "dequantize (torchao)",
        r"^torchao.*nvfp4.*pts_amax/dequant_f32",
        "the peer multiplies scale and global scale first; here element · scale, which is exact",
        elements=everything,
    ),
    Difference(
        "double rounding (torch)",
        r"^torch_.*to_mxfp/mxfp4/values",
        "torch's test helper rounds to bfloat16 before E2M1",
        elements=double_rounding,
    ),
    Difference(
        "casts to E5M2",
        r"^torch_.*:cast/float8_e5m2_u8",
        "torch's cast overflows to infinity; the encoder saturates, as cvt.satfinite does",
        elements=lambda case: np.abs(case.x) > 57344,
    ),
    Difference(
        "casts to UE8M0",
        r"^torch_.*:(cast/float8_e8m0fnu|cast_e8m0/)",
        "torch's cast drops signs, and what is above 2**127 becomes NaN; the encoder makes negative NaN, and saturates",
        elements=lambda case: (case.x < 0) | (case.x > 2.0**127),
    ),
    Difference(
        "sum of 256",
        r"^torch_.*sum_order/sum256",
        "blocks are summed in eight lanes whatever their size; torch's order changes with the size",
        elements=everything,
    ),
)


def marks(case: Case) -> tuple[np.ndarray, list[Difference]]:
    """What may differ in a golden array, in its own shape's order, flattened; and the differences that mark it."""
    rows, k = case.x.shape
    blocks = np.zeros((rows // case.tile, k // case.block), bool) if case.kind != "scalar" else np.zeros((1, 1), bool)
    elements = np.zeros(case.x.shape, bool)
    found = []
    for difference in DIFFERENCES:
        if not difference.applies(case):
            continue
        of_blocks, of_elements = difference.blocks(case), difference.elements(case)
        if case.kind == "scalar" and of_blocks is not True:
            # what differs in some blocks does not touch a number of the whole tensor
            continue
        counts = np.any(of_blocks) or (case.kind in ("elements", "values") and np.any(of_elements))
        if counts:
            found.append(difference)
        blocks = blocks | of_blocks
        elements = elements | of_elements
    if case.kind == "scalar":
        return blocks.reshape(-1)[:1] | elements.reshape(-1)[:1], found
    if case.kind in ("scales", "blocked"):
        return blocks.repeat(case.tile, 0), found
    return elements | case.spread(blocks), found
