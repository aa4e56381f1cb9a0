"""Random products on sm_90a through the public functions: the same problem, bit for bit, on a GPU and in the simulator.

Data comes from NumPy's generators, which give the same values everywhere. With "exact" data, sums have so few bits that
the result does not depend on the order of summation. Other data is of full range. Some cases use planning's choice, and
others a random plan.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from cute_nvfp4 import BlockScaledTensor, gated_gemm, gemm, prepare_weight, simulating, to_blocked
from cute_nvfp4.formats import MXFP4, NVFP4, Format
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
from cute_nvfp4.kernels.gemm.sm90.schedules import EqualShares, WholeTiles
from cute_nvfp4.planning.packed import PackedPlan
from cute_nvfp4.runtime.launch import CudaLauncher

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
KINDS = ("numbers", "numbers", "nvfp4", "plain", "mxfp4", "gated")
MULTICAST = {"schedule": EqualShares(cluster_rows=2)}
TILINGS = (
    {"tile_n": 16}, {"tile_n": 32, "ctas_per_sm": 2, "schedule": EqualShares(raster="n")},
    {"tile_n": 64, "schedule": WholeTiles()}, {"tile_n": 64, **MULTICAST}, {"tile_n": 128, "warpgroups": 4},
    {"tile_n": 256}, {"tile_n": 128, **MULTICAST, "stages": 3},
)  # fmt: skip
PLACES = 128
"""How many elements a recording keeps of a result that is not exact."""


@dataclass(frozen=True)
class Case:
    """out (m, n) = alpha · x (m, k) · weight (n, k)ᵀ + bias.

    kind: "numbers" (x of ``dtype``), "nvfp4" (x quantized), "plain" (both, neither prepared), "mxfp4" (the weight), or
    "gated" (two weights, joined by the identity). tiling: of WGMMA, on ``workers`` clusters; -1: the plan chosen.
    """

    seed: int
    kind: str
    m: int
    n: int
    k: int
    dtype: str
    out: str
    exact: bool
    bias: bool
    tiling: int
    workers: int

    @property
    def plan(self) -> PackedPlan | None:
        return None if self.tiling < 0 else PackedPlan(WgmmaConfig(**TILINGS[self.tiling]), self.workers)


def random_case(seed: int) -> Case:
    """Draws a case that the simulator computes in at most a few seconds."""
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(KINDS))
    few = rng.random() < 0.4
    m = int(rng.integers(1, 17) if few else rng.integers(17, 140))
    k = 32 * int(rng.integers(1, 33 if few else 17))
    n = int(rng.integers(1, 400 if few else 300))
    half = "float16" if kind in ("nvfp4", "plain") else str(rng.choice(["bfloat16", "float16"]))
    exact = kind == "gated" or bool(rng.random() < 0.6)
    out = str(rng.choice(list(DTYPES))) if exact else "float32"
    bias = kind != "gated" and not few and bool(rng.random() < 0.4)
    drawn = not few and kind in ("numbers", "mxfp4") and rng.random() < 0.6
    tiling = int(rng.integers(len(TILINGS))) if drawn else -1
    return Case(seed, kind, m, n, k, half, out, exact, bias, tiling, int(rng.integers(1, 9)))


class Problem:
    """The operands of a case on ``device``."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self._rng = np.random.default_rng(case.seed + (1 << 32))
        self._hash = hashlib.sha256(repr(case).encode())
        weights = [self._operand(case.n, MXFP4 if case.kind == "mxfp4" else NVFP4) for _ in range(self._weights)]
        if case.kind in ("nvfp4", "plain"):
            self.x: torch.Tensor | BlockScaledTensor = self._operand(case.m, NVFP4)
        else:
            drawn = self._rng.integers(-4, 5, (case.m, case.k)) if case.exact else self._normal(case.m, case.k)
            self.x = self._on_device(drawn.astype(np.float32)).to(DTYPES[case.dtype])
        self.weights = weights
        self.bias = self._on_device(self._rng.integers(-8, 9, case.n).astype(np.float32)) if case.bias else None
        self.alpha = 0.5 if case.exact else 0.75

    @property
    def inputs(self) -> str:
        """A digest of the case and its data."""
        return self._hash.hexdigest()[:16]

    @property
    def _weights(self) -> int:
        return 2 if self.case.kind == "gated" else 1

    def _normal(self, *shape: int) -> np.ndarray:
        # multiples of 2**-6: NumPy guarantees its integers, but not the last bits of its normal values
        return self._rng.integers(-256, 257, shape) / 64

    def _on_device(self, x: np.ndarray) -> torch.Tensor:
        self._hash.update(x.tobytes())
        return torch.from_numpy(x).to(self.device)

    def _operand(self, rows: int, format: Format) -> BlockScaledTensor:
        case, one = self.case, 127 if format is MXFP4 else 0x38
        data = self._rng.integers(0, 256, (rows, case.k // 2), dtype=np.uint8)
        shape = rows, case.k // format.block
        if case.exact:
            scale = one + self._rng.integers(0, 2, shape) * (1 if format is MXFP4 else 8)
        elif format is MXFP4:
            scale = self._rng.integers(117, 138, shape)
        else:
            scale = self._rng.integers(0, 256, shape)
            scale[scale & 0x7F == 0x7F] = one
        scales = to_blocked(self._on_device(scale.astype(np.uint8)))
        factor = self._on_device(np.array(2.0, np.float32)) if format is NVFP4 and self._rng.random() < 0.5 else None
        if case.kind == "gated":
            factor = None
        return BlockScaledTensor(self._on_device(data), scales, factor, format)

    def run(self) -> torch.Tensor:
        """The kernel's result, in float32 or the case's dtype; an element that the kernel does not write is NaN."""
        case, dtype = self.case, DTYPES[self.case.dtype]
        out = torch.full((case.m, case.n), float("nan"), dtype=DTYPES[case.out], device=self.device)
        if case.kind == "gated":
            return gated_gemm(self.x, prepare_weight(*self.weights, dtype=dtype), gate="identity", alpha=0.25, out=out)
        (weight,) = self.weights
        if case.kind != "plain":
            weight = prepare_weight(weight, dtype=dtype)
        return gemm(self.x, weight, alpha=self.alpha, bias=self.bias, out=out, config=case.plan)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """The indices of the elements that a recording keeps."""
        return np.random.default_rng(self.case.seed).integers(0, self.case.m * self.case.n, PLACES)

    def kept(self, out: torch.Tensor) -> np.ndarray:
        return out.flatten()[torch.from_numpy(self.places).to(out.device)].cpu().numpy()

    @functools.cached_property
    def wide(self) -> tuple[torch.Tensor, ...]:
        """x and the weights in float64."""
        x = self.x.double() if isinstance(self.x, torch.Tensor) else self.x.dequantize(torch.float64)
        return x, *(w.dequantize(torch.float64) for w in self.weights)

    @property
    def totals(self) -> torch.Tensor:
        """For every element: the sum of absolute products and the absolute bias."""
        x, weight, *_ = self.wide
        total = x.abs() @ weight.abs().t() * self.alpha
        return total if self.bias is None else total + self.bias.abs()

    def magnitudes(self) -> np.ndarray:
        """``totals`` of the elements that a recording keeps."""
        return self.kept(self.totals)

    def wrong(self, out: torch.Tensor) -> torch.Tensor:
        """Which elements are wrong: not the exact result, rounded once; or, where sums may round, beyond what tensor
        cores may lose: 2⁻²³ of ``totals`` for each MMA of 16 of K. (That is 2⁻²⁰ at 128 of K. Of 1,000 random problems
        two had an element that lost 1.15 times as much, with longer K.)"""
        x, *weights = self.wide
        products = [x @ weight.t() for weight in weights]
        exact = products[0] * self.alpha if len(products) == 1 else products[0] * products[1] / 16
        exact = exact if self.bias is None else exact + self.bias.double()
        right = exact.float().to(DTYPES[self.case.out])
        if self.case.exact:
            return right != out
        lost = max(8, -(-self.case.k // 16)) * 2.0**-23
        return ~((out.double() - exact).abs() <= lost * self.totals + 2.0**-23 * exact.abs())


def bits(out: torch.Tensor) -> str:
    """A digest of a result's bits."""
    words = out.contiguous().cpu().view(torch.uint8 if out.element_size() == 1 else torch.int16)
    return hashlib.sha256(words.numpy().tobytes()).hexdigest()[:16]


def digest(ptx: str) -> str:
    """A digest of PTX. It skips the version's line, in which the DSL's libraries of CUDA 12 and CUDA 13 differ."""
    ptx = re.sub(r"^\.version .*$", ".version 9.4", ptx, count=1, flags=re.MULTILINE)
    return hashlib.sha256(ptx.encode()).hexdigest()[:16]


@contextlib.contextmanager
def kernels_of(device: str) -> Iterator[list[str]]:
    """Within this block, collects the PTX of launches on ``device``, which is sm_90a; the list is filled when the block
    ends."""
    found: list[str] = []
    if device == "cpu":
        with simulating("sm_90a") as runs:
            yield found
        found += [run.ptx for run in runs]
        return
    actual = CudaLauncher.__call__

    def noted(self: CudaLauncher, values: tuple, owners: tuple) -> None:
        found.append(self.kernel.ptx)
        actual(self, values, owners)

    with mock.patch.object(CudaLauncher, "__call__", noted):
        yield found
    torch.cuda.synchronize()
