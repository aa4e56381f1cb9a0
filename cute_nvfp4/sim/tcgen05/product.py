"""The arithmetic of tcgen05.mma: D = A B + D for runs of instructions on the same accumulators.

Products of elements are computed in f32, or in f64 where UE8M0 scales are extreme. They are exact within the range of
the type and summed in it, in an order that is as unspecified as that of the hardware. Integer results are exact,
because the sums of a run stay below 2 ** 24, the limit of exact f32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.wave import Wave
from cute_nvfp4.sim.tcgen05 import elements, operands
from cute_nvfp4.sim.tcgen05.layouts import Part

_SAFE = 27, 227
"""Least and greatest UE8M0 code with which every scaled element is exact in f32."""
_ELEMENTS_AT_ONCE = 1 << 19
"""Number of decoded elements of one batch, large enough that the calls cost little compared with the product."""


class Multiply(Protocol):
    """The attributes of a queued instruction (``mma.Mma``) that this module reads."""

    instruction: Instruction
    spec: Any
    a: np.ndarray
    b: np.ndarray
    d: np.ndarray
    enable: np.ndarray
    sfa: np.ndarray | None
    sfb: np.ndarray | None
    sf_ids: tuple[int, int]
    scale_d: int
    a_low: int
    b_low: int

    def group(self, wave: Wave) -> np.ndarray: ...

    def parts(self) -> tuple[Part, ...]: ...

    def disabled_lanes(self, j: int) -> np.ndarray | None: ...


@dataclass(frozen=True)
class Run:
    """A run: ``steps`` instructions on the same accumulators, each with k rows (issuing threads)."""

    first: Multiply  # the first instruction
    ctas: np.ndarray  # (k, g) CTAs of each row's CTA group
    a: np.ndarray  # (k,) start addresses of the first step, or first columns of A in tensor memory
    b: np.ndarray  # (k,) start addresses of the first step
    d: np.ndarray  # (k,) first columns of D
    enable: np.ndarray  # (k,) whether the first step adds D; further steps always do
    columns_a: np.ndarray  # (k, steps) first columns of A, where A is in tensor memory
    sfa: np.ndarray  # (k, steps) first columns of the scale factors of A, where there are any
    sfb: np.ndarray  # (k, steps) the same for B
    far_a: tuple[int, ...]  # distance in bytes of each step's start address from ``a``
    far_b: tuple[int, ...]  # the same for ``b``
    ids_a: tuple[int, ...]  # scale factor id of A in each step
    ids_b: tuple[int, ...]  # the same for B

    @staticmethod
    def of(wave: Wave, run: list[Multiply]) -> Run:
        first = run[0]
        columns = np.stack([m.a for m in run], axis=1)
        scaled = bool(first.spec.idesc.block)
        return Run(
            first, first.group(wave), first.a, first.b, first.d, first.enable, columns,
            np.stack([m.sfa for m in run], axis=1) if scaled else columns,
            np.stack([m.sfb for m in run], axis=1) if scaled else columns,
            tuple(int(m.a[0] - first.a[0]) for m in run), tuple(int(m.b[0] - first.b[0]) for m in run),
            tuple(m.sf_ids[0] for m in run), tuple(m.sf_ids[1] for m in run),
        )  # fmt: skip

    def rows(self, s: slice) -> Run:
        """Returns the run with the rows ``s`` only."""
        names = ("ctas", "a", "b", "d", "enable", "columns_a", "sfa", "sfb")
        return replace(self, **{n: getattr(self, n)[s] for n in names})

    @property
    def rows_at_once(self) -> int:
        """Number of rows in one batch."""
        d = self.first.spec.idesc
        return max(1, _ELEMENTS_AT_ONCE // ((d.m + d.n) * d.k * len(self.far_b)))


def execute(wave: Wave, runs: list[list[Multiply]]) -> None:
    """Executes the instructions that ``mma`` has sorted into ``runs``, each run as one product. When all runs have the
    same CTAs, each operand that they share is read from shared memory once."""
    todo = [Run.of(wave, r) for r in runs]
    first = todo[0].ctas
    together = all(r.ctas.shape == first.shape and (r.ctas == first).all() for r in todo[1:])
    for batch in [todo] if together else [[r] for r in todo]:
        step = min(r.rows_at_once for r in batch)
        for start in range(0, len(batch[0].ctas), step):
            cache: dict | None = {} if len(batch) > 1 else None
            for r in batch:
                _product(wave, r if step >= len(r.ctas) else r.rows(slice(start, start + step)), cache)


def _product(wave: Wave, r: Run, cache: dict | None) -> None:
    spec, parts = r.first.spec, r.first.parts()
    b = _cached(cache, ("b", spec.b, r.far_b, r.b.tobytes(), _reading(spec, "b")), _matrix_b, wave, r)
    if spec.a is None:
        a = _tensor_a(wave, r, parts)
    else:
        key = ("a", spec.a, r.far_a, r.a.tobytes(), _reading(spec, "a"))
        a = [_cached(cache, key, _matrix_a, wave, r)] * len(parts)
    if spec.idesc.block:
        _block_scaled(wave, r, parts, a, b)
    elif all(x is a[0] for x in a):
        _whole(wave, r, parts, a[0], b)
    else:
        for part, x in zip(parts, a):
            _store(wave, r, part, np.matmul(x, b[:, None, part.n].swapaxes(-1, -2)))
    if spec.ashift:
        _shift_rows(wave, r)


def _whole(wave: Wave, r: Run, parts: tuple[Part, ...], a: np.ndarray, b: np.ndarray) -> None:
    """Computes one product for all parts from ``a`` (k, g, rows, K) and ``b`` (k, N, K)."""
    k, g, rows, depth = a.shape
    d = np.matmul(a.reshape(k, g * rows, depth), b.swapaxes(-1, -2)).reshape(k, g, rows, -1)
    for part in parts:
        _store(wave, r, part, d[:, :, part.rows, part.n])


def _reading(spec, name: str) -> tuple:
    """Returns everything but the addresses that determines how operand ``name`` is read."""
    d = spec.idesc
    how = (d.a, d.a_mn_major, d.negate_a, d.m) if name == "a" else (d.b, d.b_mn_major, d.negate_b, d.n)
    return (*how, d.k, spec.cta_group)


def _cached(cache: dict | None, key: tuple, read, *args):
    if cache is None:
        return read(*args)
    if key not in cache:
        cache[key] = read(*args)
    return cache[key]


def _matrix_b(wave: Wave, r: Run) -> np.ndarray:
    """Returns B as f32 (k, N, K) from shared memory; each CTA of the group holds N / g of the columns."""
    spec, low = r.first.spec, r.first.b_low
    d = spec.idesc
    rows = d.n // spec.cta_group
    chunks = operands.operand_chunks(spec.b, d.b_mn_major, low, r.far_b, rows, operand_bits(d.b), d.chunks)
    where = r.first.instruction.where
    raw = operands.gather(wave.shared2d, r.ctas, r.b - low, chunks, wave.shared_bytes, where)
    return _signed(operands.matrix(raw, d.b, d.b_mn_major), d.negate_b)


def _matrix_a(wave: Wave, r: Run) -> np.ndarray:
    """Returns A as f32 (k, g, rows, K) from shared memory."""
    spec, low = r.first.spec, r.first.a_low
    d, rows = spec.idesc, spec.idesc.m // spec.cta_group
    chunks = operands.operand_chunks(spec.a, d.a_mn_major, low, r.far_a, rows, operand_bits(d.a), d.chunks)
    where = r.first.instruction.where
    raw = operands.gather(wave.shared2d, r.ctas, r.a - low, chunks, wave.shared_bytes, where)
    a = _signed(operands.matrix(raw, d.a, d.a_mn_major), d.negate_a)
    return a.reshape(len(r.a), spec.cta_group, rows, -1)


def _tensor_a(wave: Wave, r: Run, parts: tuple[Part, ...]) -> list[np.ndarray]:
    """Returns A as f32 (k, g, rows, K) from tensor memory for each part of D. Each part reads the copy of A in its own
    lanes; when all copies agree, the list holds one array several times."""
    d = r.first.spec.idesc
    lanes = _signed(operands.tensor_matrix(wave.tmem, r.ctas, r.columns_a, d.a), d.negate_a)
    picked = [lanes[:, :, p.lanes if isinstance(p.lanes, slice) else list(p.lanes)] for p in parts]
    same = all(np.array_equal(p, picked[0], equal_nan=True) for p in picked[1:])
    return [picked[0]] * len(parts) if same else picked


def operand_bits(t: str) -> int:
    """Returns the element size in bits as the operand tables count it: every type of fewer than 16 bits counts as 8."""
    return {"f16": 16, "bf16": 16, "tf32": 32}.get(t, 8)


def _signed(x: np.ndarray, negate: bool) -> np.ndarray:
    return -x if negate else x


def _block_scaled(wave: Wave, r: Run, parts: tuple[Part, ...], a: list[np.ndarray], b: np.ndarray) -> None:
    """Computes (A scale_A) (B scale_B) + D. Every quarter of the data path reads its own copies of the scales. When the
    copies agree, as they should, one product suffices; otherwise each quarter has its own product."""
    d = r.first.spec.idesc
    table, count = elements.scale_table(d.scale), d.scales
    sfa = [operands.sfa_codes(wave.tmem, r.ctas, r.sfa, p, r.ids_a, count) for p in parts]
    sfb = [operands.sfb_codes(wave.tmem, r.ctas, r.sfb, p, r.ids_b, count) for p in parts]
    if d.scale == "ue8m0" and (_extreme(sfa) or _extreme(sfb)):
        wide = {id(x): x.astype("f8") for x in a}
        table, a, b = table.astype("f8"), [wide[id(x)] for x in a], b.astype("f8")
    copies = all((s == s[:, :1, :1]).all() for s in sfb) and all((s == sfa[0]).all() for s in sfa[1:])
    if copies and all(x is a[0] for x in a):
        factors = table.take(np.concatenate([s[:, 0, 0] for s in sfb], axis=1) if len(sfb) > 1 else sfb[0][:, 0, 0])
        left = operands.scaled(a[0], table.take(sfa[0]))
        _whole(wave, r, parts, left, operands.scaled(b, factors))
        return
    for part, x, fa, fb in zip(parts, a, sfa, sfb):
        left = operands.scaled(x, table.take(fa))
        for q in range(fb.shape[2]):
            rows = slice(32 * q, 32 * q + 32)
            factors = table.take(fb[:, :, q])
            right = operands.scaled(np.broadcast_to(b[:, None, part.n], (*factors.shape[:3], b.shape[-1])), factors)
            quarter = Part(rows, part.n, slice(part.lanes.start + 32 * q, part.lanes.start + 32 * q + 32))
            _store(wave, r, quarter, np.matmul(left[:, :, rows], right.swapaxes(-1, -2)))


def _extreme(codes: list[np.ndarray]) -> bool:
    low, high = _SAFE
    return any(bool(((c < low) | (c > high)).any()) for c in codes)


def _store(wave: Wave, r: Run, part: Part, product: np.ndarray) -> None:
    """Accumulates ``product`` (k, g, rows, n) into the lanes and columns of ``part``."""
    first, width = r.first, product.shape[-1]
    lanes = part.lanes if isinstance(part.lanes, slice) else np.array(part.lanes)
    accumulate = {"f32": _add_f32, "f16": _add_f16, "s32": _add_s32}[first.spec.idesc.d]
    for row, (group, column, enable) in enumerate(zip(r.ctas.tolist(), r.d.tolist(), r.enable.tolist())):
        for j, cta in enumerate(group):
            at = wave.tmem[cta]
            target = at[lanes, column : column + width]
            result = accumulate(target, product[row, j], enable, first)
            off = first.disabled_lanes(j)
            if off is not None:
                keep = off[lanes]
                result = np.where(keep[:, None], target, result)
            at[lanes, column : column + width] = result


def _plus(product: np.ndarray, old: np.ndarray, first: Multiply) -> np.ndarray:
    return product + (old * np.float32(2.0**-first.scale_d) if first.scale_d else old)


def _add_f32(old: np.ndarray, product: np.ndarray, enable: bool, first: Multiply) -> np.ndarray:
    total = _plus(product, old.view("f4"), first) if enable else product
    return np.ascontiguousarray(total.astype("f4", copy=False)).view("u4")


def _add_f16(old: np.ndarray, product: np.ndarray, enable: bool, first: Multiply) -> np.ndarray:
    """Adds to f16 accumulators, which are the low halves of their words; each instruction rounds its sum once."""
    total = _plus(product, old.astype("u2").view("f2").astype("f4"), first) if enable else product
    return total.astype("f2").view("u2").astype("u4")


def _add_s32(old: np.ndarray, product: np.ndarray, enable: bool, first: Multiply) -> np.ndarray:
    total = product.astype("i8")
    if enable:
        total = total + old.view("i4")
    if first.spec.idesc.saturate:
        total = total.clip(-(1 << 31), (1 << 31) - 1)
    return total.astype("i4").view("u4")


def _shift_rows(wave: Wave, r: Run) -> None:
    """Does the shift of ``.ashift``: lane i + 1 of A moves to lane i within each quarter, once A has been read."""
    for group, column in zip(r.ctas.tolist(), r.a.tolist()):
        for cta in group:
            shift_down(wave.tmem[cta], slice(0, 128), column)


def shift_down(tmem: np.ndarray, lanes: slice, column: int) -> None:
    """Moves 32 bytes at ``column`` from lane i + 1 to lane i, within each quarter of ``lanes``; ``tmem`` (128, 512)
    holds the words of one CTA."""
    for start in range(lanes.start, lanes.stop, 32):
        columns = slice(column, column + 8)
        tmem[start : start + 31, columns] = tmem[start + 1 : start + 32, columns].copy()
