"""Data and exact answer of ``nvfp4_gemv``.

This file shares no code with the library it judges: it has its own decode tables and its own blocked scale
layout, written from the problem's definition.

Storage (all contiguous; the protocol's tensors are permuted views of it):
    a              (L, M, K/2)                     two E2M1 to a byte, low nibble = even K index
    b              (L, 128, K/2)                   row 0 is the vector, rows 1..127 are padding
    sfa, sfb       (L, M, K/16), (L, 128, K/16)    E4M3
    *_permuted     (L, rest_m, rest_k, 32, 4, 4)   the same scales, element (i, j) at
                                                   [i // 128, j // 4, i % 32, (i % 128) // 32, j % 4]
    c              (L, M, 1)                       fp16
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from ...problem import Buffer, DataKind, Expected
from ...schema import Case

B_ROWS = 128
BLOCK = 16
# Full-range draws bound the product of a block's two scales, so that fp16 results stay finite up to K = 16384.
SCALE_PRODUCT_BOUND = 32.0
_ROWS_AT_ONCE = 1 << 21  # elements of A decoded to float64 at a time

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_table() -> torch.Tensor:
    """The value of each of the 256 E4M3 codes (bias 7, no infinity, S.1111.111 is NaN), as float64."""
    codes = torch.arange(256)
    exponent, mantissa = ((codes >> 3) & 15).double(), (codes & 7).double()
    normal = torch.exp2(exponent - 7) * (1 + mantissa / 8)
    subnormal = mantissa * 2.0**-9
    value = torch.where(exponent > 0, normal, subnormal)
    value = torch.where((codes & 0x7F) == 0x7F, torch.nan, value)
    return torch.where(codes >= 128, -value, value)


def e2m1_pair_table() -> torch.Tensor:
    """(256, 2) float64: the elements at even (low nibble) and odd (high nibble) K index of each byte."""
    nibble = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    codes = torch.arange(256)
    return torch.stack((nibble[codes & 15], nibble[codes >> 4]), dim=-1)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def blocked_storage(scale: torch.Tensor) -> torch.Tensor:
    """Row-major scales (L, MN, KS) as contiguous (L, rest_m, rest_k, 32, 4, 4), padded with zeros."""
    batch, rows, columns = scale.shape
    rest_m, rest_k = _cdiv(rows, 128), _cdiv(columns, 4)
    padded = scale.new_zeros(batch, rest_m * 128, rest_k * 4)
    padded[:, :rows, :columns] = scale
    # row = 128 rest_m + 32 m1 + m0, column = 4 rest_k + k0
    split = padded.view(batch, rest_m, 4, 32, rest_k, 4)
    return split.permute(0, 1, 4, 3, 2, 5).contiguous()


def _draw_bytes(shape: tuple[int, ...], mask: int, generator: torch.Generator) -> torch.Tensor:
    """Uniform bytes and-ed with ``mask``; drawn eight at a time, which is what makes large cases affordable."""
    count = int(np.prod(shape))
    words = torch.empty(_cdiv(count, 8), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count].view(shape).bitwise_and_(mask)


class GemvProblem:
    """See :class:`cute_nvfp4.harness.problem.Problem`."""

    name = "nvfp4_gemv"
    folder = Path(__file__).parent

    def validate(self, case: Case) -> None:
        if case["k"] % BLOCK:
            raise ValueError(f"k is {case['k']}, must be a multiple of {BLOCK}")

    def buffers(self, case: Case) -> list[Buffer]:
        m, k, batch = case["m"], case["k"], case["l"]
        ks, rest_k = k // BLOCK, _cdiv(k // BLOCK, 4)
        return [
            Buffer("a", (batch, m, k // 2), "uint8"),
            Buffer("b", (batch, B_ROWS, k // 2), "uint8"),
            Buffer("sfa", (batch, m, ks), "uint8"),
            Buffer("sfb", (batch, B_ROWS, ks), "uint8"),
            Buffer("sfa_permuted", (batch, _cdiv(m, 128), rest_k, 32, 4, 4), "uint8"),
            Buffer("sfb_permuted", (batch, 1, rest_k, 32, 4, 4), "uint8"),
            Buffer("c", (batch, m, 1), "float16", output=True),
        ]

    def generate(self, case: Case, seed: int, kind: DataKind) -> dict[str, torch.Tensor]:
        """Draws the inputs with torch's CPU generator.

        ``public``: elements are bytes 0..3, scales the integers 0..2. ``full``: every E2M1 code and every finite
        E4M3 code of both signs; within a block of K, |sfa * sfb| is at most ``SCALE_PRODUCT_BOUND``.
        """
        m, k, batch = case["m"], case["k"], case["l"]
        generator = torch.Generator().manual_seed(seed)
        shape_a, shape_b = (batch, m, k // BLOCK), (batch, B_ROWS, k // BLOCK)
        mask = 3 if kind == "public" else 0xFF
        a = _draw_bytes((batch, m, k // 2), mask, generator)
        b = _draw_bytes((batch, B_ROWS, k // 2), mask, generator)
        if kind == "public":
            sfa, sfb = (
                torch.randint(0, 3, shape, generator=generator, dtype=torch.int8).to(torch.float8_e4m3fn)
                for shape in (shape_a, shape_b)
            )
            sfa, sfb = sfa.view(torch.uint8), sfb.view(torch.uint8)
        else:
            sfb = _draw_scales(torch.full(shape_b, 127), generator)
            sfa = _draw_scales(_partner_limit(sfb[:, :1]).expand(shape_a), generator)
        return {
            "a": a,
            "b": b,
            "sfa": sfa,
            "sfb": sfb,
            "sfa_permuted": blocked_storage(sfa),
            "sfb_permuted": blocked_storage(sfb),
        }

    def views(self, tensors: Mapping[str, torch.Tensor]) -> tuple:
        """(a, b, sfa, sfb, sfa_permuted, sfb_permuted, c) as the protocol shapes them."""
        elements = [tensors[name].view(torch.float4_e2m1fn_x2).permute(1, 2, 0) for name in ("a", "b")]
        scales = [tensors[name].view(torch.float8_e4m3fn).permute(1, 2, 0) for name in ("sfa", "sfb")]
        blocked = [
            tensors[name].view(torch.float8_e4m3fn).permute(3, 4, 1, 5, 2, 0)
            for name in ("sfa_permuted", "sfb_permuted")
        ]
        return (*elements, *scales, *blocked, tensors["c"].permute(1, 2, 0))

    def reference(self, case: Case, tensors: Mapping[str, torch.Tensor]) -> list[Expected]:
        """Products and sums in float64 (exact for these draws) from the row-major scales."""
        device = tensors["a"].device
        pairs, scales = e2m1_pair_table().to(device), e4m3_table().to(device)
        m, k, batch = case["m"], case["k"], case["l"]
        value = torch.empty(m, 1, batch, dtype=torch.float64, device=device)
        magnitude = torch.empty_like(value)
        step = max(1, _ROWS_AT_ONCE // k)
        for index in range(batch):
            vector = pairs[tensors["b"][index, 0].long()].view(-1, BLOCK)
            vector = vector * scales[tensors["sfb"][index, 0].long()].view(-1, 1)
            for first in range(0, m, step):
                rows = slice(first, first + step)
                products = pairs[tensors["a"][index, rows].int()].view(-1, k // BLOCK, BLOCK).mul_(vector)
                scale = scales[tensors["sfa"][index, rows].int()]
                value[rows, 0, index] = (products.sum(-1) * scale).sum(-1)
                magnitude[rows, 0, index] = (products.abs_().sum(-1) * scale.abs_()).sum(-1)
        return [Expected(value.cpu().numpy(), magnitude.cpu().numpy())]

    def output_shapes(self, case: Case) -> list[tuple[tuple[int, ...], str]]:
        return [((case["m"], 1, case["l"]), "float16")]

    def useful_bytes(self, case: Case) -> int:
        """A, its scales, the vector (one row of b), its scales, and c."""
        m, k, batch = case["m"], case["k"], case["l"]
        return batch * ((m + 1) * (k // 2 + k // BLOCK) + 2 * m)

    def flops(self, case: Case) -> int:
        return 2 * case["m"] * case["k"] * case["l"]

    def peer(self, case: Case, device: torch.device) -> tuple[str, Callable[[], object]]:
        m, k, batch = case["m"], case["k"], case["l"]
        a = torch.randn(batch, m, k, dtype=torch.bfloat16, device=device)
        b = torch.randn(batch, k, 1, dtype=torch.bfloat16, device=device)
        out = torch.empty(batch, m, 1, dtype=torch.bfloat16, device=device)
        return "torch bf16 bmm", lambda: torch.bmm(a, b, out=out)


def _partner_limit(codes: torch.Tensor) -> torch.Tensor:
    """For each E4M3 code, how many magnitudes (codes 0..126) keep its product within the bound."""
    table = e4m3_table()
    magnitudes = table[:127]
    largest = SCALE_PRODUCT_BOUND / table[codes.long()].abs()
    return torch.searchsorted(magnitudes, largest, right=True)


def _draw_scales(limit: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """E4M3 codes: magnitude code uniform in [0, limit), sign uniform."""
    uniform = torch.rand(limit.shape, generator=generator)
    magnitude = (uniform * limit).to(torch.uint8)
    sign = torch.randint(0, 2, limit.shape, generator=generator, dtype=torch.uint8) << 7
    return magnitude | sign


PROBLEM = GemvProblem()
