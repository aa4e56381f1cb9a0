"""The forty correctness shapes, their data, the exact answers, and how an output is judged.

Data is "public", drawn as the problems draw it, or "full": every E2M1 code and every finite code of UE4M3 (the
block-scaled MMA reads scales as unsigned), with NaN in the scales of rows that only pad the 128×4 layout.

The reference decodes with tables of its own (those of the harness, which share no code with the library), multiplies
in float64 where that is affordable and else in float32, and rounds nothing. The outputs start as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cute_nvfp4.harness.problems.data import blocked_storage, e2m1_pair_table, e4m3_table

BLOCK = 16
GEMM_SHAPES = (
    (128, 256, 256), (128, 1536, 7168), (128, 3072, 1536), (256, 7168, 256), (256, 7168, 2048),
    (2304, 4608, 7168), (384, 7168, 2304), (512, 512, 7168), (512, 4096, 512), (512, 1536, 7168),
)  # fmt: skip
DUAL_SHAPES = (
    (1536, 512, 7168), (256, 512, 256), (1536, 512, 7168), (3072, 1024, 1536), (7168, 1024, 256),
    (7168, 2304, 2048), (4608, 384, 7168), (7168, 384, 2304), (512, 768, 7168), (4096, 768, 512),
)  # fmt: skip
GROUP_SHAPES = (
    ((96, 128, 256), (128, 256, 512)),
    ((256, 512, 256), (72, 384, 256)),
    ((128, 128, 512), (128, 256, 256)),
    ((80, 384, 256), (128, 256, 512), (256, 128, 256)),
    ((64, 128, 512), (72, 384, 512), (96, 512, 256)),
    ((64, 768, 512), (256, 128, 256), (128, 256, 512)),
    ((128, 256, 768), (128, 512, 256), (64, 512, 768)),
    ((128, 128, 512), (128, 128, 256), (128, 128, 512), (128, 128, 256)),
    ((40, 512, 256), (56, 384, 256), (384, 256, 256), (512, 128, 256)),
    ((512, 256, 512), (384, 256, 768), (256, 256, 512), (128, 256, 768)),
)
GEMV_SHAPES = (
    (128, 256, 1), (128, 1536, 1), (128, 3072, 1), (256, 7168, 1), (256, 7168, 1),
    (2432, 4608, 2), (384, 7168, 2), (512, 512, 2), (512, 4096, 2), (512, 1536, 2),
)  # fmt: skip
SEED = 1111

# 0, ±0.5, ±1, ±1.5 in both nibbles
_PUBLIC_ELEMENTS = 0b10111011
# Largest product of two scales of a block of full-range data: fp16 results then stay finite up to K = 7168
_FULL_BOUND = {"gemm": 16.0, "group": 16.0, "dual": 0.125}
_FLOAT64_UP_TO = 1 << 32  # multiply-adds
# fp32 sums, relative to the sum over blocks of the product of the operands' norms: 16 times the unit roundoff
_SUM_ERROR = 2.0**-20
_NAN_SCALE = 0x7F


@dataclass
class Matrix:
    """(L, rows, K/2) E2M1 bytes with (L, rows, K/16) E4M3 scales, and the scales' blocked bytes."""

    data: torch.Tensor
    scale: torch.Tensor
    blocked: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.blocked = blocked_storage(self.scale)

    @property
    def rows(self) -> int:
        return self.data.shape[1]

    @property
    def k(self) -> int:
        return self.data.shape[2] * 2

    def poison_padding(self) -> None:
        """NaN in the scales of the rows that pad the last atom (those that pad K must be zero: they are used)."""
        pad = -self.rows % 128
        if pad:
            rows = torch.arange(128 - pad, 128)
            self.blocked[:, -1, :, rows % 32, rows // 32] = _NAN_SCALE

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """(L, rows, K): element times scale, exact in float32 already."""
        elements = e2m1_pair_table().to(dtype)[self.data.int()].flatten(-2)
        return (elements.unflatten(-1, (-1, BLOCK)) * e4m3_table().to(dtype)[self.scale.int()].unsqueeze(-1)).flatten(
            -2
        )


@dataclass
class Product:
    """One problem: ``a`` and one or two ``b`` (their products gated), and the output (L, M, N) fp16."""

    a: Matrix
    bs: list[Matrix]
    c: torch.Tensor

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """m, n, k, batch."""
        return self.a.rows, self.bs[0].rows, self.a.k, self.a.data.shape[0]

    def tensors(self, prefix: str = "") -> dict[str, tuple[torch.Tensor, bool]]:
        """Every tensor by name, and whether the kernel may write it."""
        found = {"a": (self.a.data, False), "sfa": (self.a.blocked, False), "c": (self.c, True)}
        for i, b in enumerate(self.bs, 1):
            found |= {f"b{i}": (b.data, False), f"sfb{i}": (b.blocked, False)}
        return {prefix + name: value for name, value in found.items()}


def make(problem: str, shape: tuple[int, ...], kind: str = "public", seed: int = SEED) -> Product:
    """``problem`` is gemm, dual or group (one group); ``shape`` is (m, n, k) or (m, n, k, batch)."""
    m, n, k, batch = shape if len(shape) == 4 else (*shape, 1)
    generator = torch.Generator().manual_seed(seed)
    products = 2 if problem == "dual" else 1
    columns = k // BLOCK
    limits = _full_limits(columns, _FULL_BOUND[problem], generator)
    a = _matrix(problem, kind, (batch, m, k), limits[0], generator)
    bs = [_matrix(problem, kind, (batch, n, k), limits[1], generator) for _ in range(products)]
    return Product(a, bs, torch.full((batch, m, n), torch.nan, dtype=torch.float16))


def _matrix(problem: str, kind: str, shape: tuple, limit: torch.Tensor, generator: torch.Generator) -> Matrix:
    batch, rows, k = shape
    mask = _PUBLIC_ELEMENTS if kind == "public" else 0xFF
    data = torch.randint(0, 256, (batch, rows, k // 2), generator=generator, dtype=torch.uint8) & mask
    where = (batch, rows, k // BLOCK)
    if kind == "full":
        scale = (torch.rand(where, generator=generator) * (limit + 1)).to(torch.uint8)
    elif problem == "dual":
        scale = torch.rand(where, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        low, high = (1, 4) if problem == "group" else (0, 3)
        scale = torch.randint(low, high, where, generator=generator).float().to(torch.float8_e4m3fn).view(torch.uint8)
    matrix = Matrix(data, scale)
    if kind == "full":
        matrix.poison_padding()
    return matrix


def _full_limits(columns: int, bound: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """For each block of K the largest code of A's scales, and that of B's such that no product passes ``bound``."""
    magnitudes = e4m3_table()[:127]
    largest_a = torch.randint(0, 127, (columns,), generator=generator)
    largest_a[0], largest_a[-1] = 126, 0  # so that both matrices have every code
    room = bound / magnitudes[largest_a]
    return largest_a, torch.searchsorted(magnitudes, room, right=True) - 1


def check(product: Product) -> float:
    """Asserts that ``product.c`` is right; the largest error, relative to what is allowed.

    Allowed: one rounding to fp16 (half a unit in the last place), and for the fp32 sum 2⁻²⁰ Σ ‖a‖ ‖b‖ over the
    blocks a, b of 16 elements of the two rows, carried through the gate for two products.
    """
    m, n, k, batch = product.sizes
    dtype = torch.float64 if m * n * k <= _FLOAT64_UP_TO else torch.float32
    worst = 0.0
    for i in range(batch):
        a = product.a.values(dtype)[i]
        exact, error = [], []
        for b in product.bs:
            right = b.values(dtype)[i]
            exact.append(a @ right.T)
            error.append(_SUM_ERROR * (_block_norms(a) @ _block_norms(right).T))
        expected, allowed = (exact[0], error[0]) if len(exact) == 1 else _gated(*exact, *error)
        assert expected.abs().max() < 65504, "the data of this case overflows fp16"
        got = product.c[i].to(dtype)
        assert not got.isnan().any(), f"{int(got.isnan().sum())} of {got.numel()} elements are NaN or were not written"
        excess = (got - expected).abs() / (allowed + expected.abs() * 2.0**-11 + 2.0**-25)
        worst = max(worst, float(excess.max()))
        if worst > 1:
            at = divmod(int(excess.argmax()), n)
            wrong = int((excess > 1).sum())
            raise AssertionError(
                f"{wrong} of {got.numel()} elements are wrong; the worst at {at}: {float(got[at])}, "
                f"expected {float(expected[at])}, which is {worst:.3g} times what is allowed"
            )
    return worst


def _block_norms(values: torch.Tensor) -> torch.Tensor:
    """(rows, K/16): the Euclidean norm of each block."""
    return values.unflatten(-1, (-1, BLOCK)).norm(dim=-1)


def _gated(x, gate, x_error, gate_error):
    """silu(x) · gate, and what errors of x and gate do to it: |silu'| ≤ 1.1; 2⁻²⁰ for exponential and division."""
    silu = x * torch.sigmoid(x)
    error = 1.1 * x_error * (gate.abs() + gate_error) + silu.abs() * gate_error + (silu * gate).abs() * 2.0**-20
    return silu * gate, error
