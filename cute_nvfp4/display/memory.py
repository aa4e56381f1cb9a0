"""Drawings of shared and tensor memory to scale, for configurations of a GEMM or for any parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import OperandError
from .svg import IDLE, INK, PALETTE, SOFT, Drawing, Picture, ink_on, width_of

if TYPE_CHECKING:
    from ..kernels.gemm.config import GemmConfig

PLOT, LEFT, ROW = 860, 150, 38
COLORS = {"A": PALETTE[0], "B": PALETTE[1], "SFA": PALETTE[4], "SFB": PALETTE[3], "output": PALETTE[2]}
COLORS |= {"partial sums": PALETTE[5], "barriers, alignment": "#555555", "padding": "#cccccc", "free": IDLE}
COLORS |= {"accumulator": PALETTE[0], "allocated": "#cccccc", "not allocated": IDLE}


class Part(NamedTuple):
    """A named part of a memory; ``size`` is in the measure of its drawing (KiB or columns)."""

    name: str
    size: float


def bars(rows: Mapping[str, Sequence[tuple[str, float]]], limit: float, measure: str, title: str = "memory") -> Picture:
    """Draws a bar for each row: its parts (name, size) and then what is free, to scale, up to ``limit`` of ``measure``.

    Raises:
        OperandError: the parts of a row exceed ``limit``.
    """
    others = (c for c in PALETTE if c not in COLORS.values())
    colors: dict[str, str] = {}
    words = [f"{title}, of {limit:g} {measure}:"]
    height = 34 + ROW * len(rows)
    d = Drawing(LEFT + PLOT + 24, height + 70)
    d.text(8, 20, title, 13, font_weight="bold")
    for row, (label, parts) in enumerate(rows.items()):
        used = sum(size for _, size in parts)
        if used > limit:
            raise OperandError.of(f"{title} of {label}", got=f"{used:g} {measure}", expected=f"at most {limit:g}")
        y, x = 34 + ROW * row, float(LEFT)
        d.text(LEFT - 8, y + 19, label, 11, "end")
        for name, size in [*parts, ("free", limit - used)]:
            if not size:
                continue
            color = colors.setdefault(name, COLORS.get(name) or next(others, PALETTE[0]))
            w = PLOT * size / limit
            d.rect(x, y, w, ROW - 10, color, f"{name}: {size:g} {measure}", stroke="#ffffff", stroke_width=0.7)
            if width_of(name, 10) < w - 4:
                d.text(x + w / 2, y + 18, name, 10, "middle", ink_on(color))
            x += w
        totals: dict[str, float] = {}
        for name, size in parts:
            totals[name] = totals.get(name, 0) + size
        parts_said = ", ".join(f"{name} {size:g}" for name, size in totals.items() if size)
        words.append(f"  {label}: {parts_said} = {used:g}")
    for k in range(9):
        x = LEFT + PLOT * k / 8
        d.line(x, height - 4, x, height, INK)
        d.text(x, height + 12, f"{limit * k / 8:g}", 10, "middle", SOFT)
    d.text(LEFT + PLOT / 2, height + 28, measure, 11, "middle", SOFT)
    d.legend(LEFT, height + 50, colors, LEFT + PLOT)
    return Picture(d, "\n".join(words))


def shared_memory(configs: Mapping[str, GemmConfig]) -> Picture:
    """Draws the shared memory of a CTA for several configurations of a GEMM."""
    from ..kernels.gemm.limits import shared_plan

    rows, limits = {}, set()
    for label, config in configs.items():
        plan = shared_plan(config)
        parts: list[Part] = []
        for _ in range(plan.stages):
            parts += [Part(name.rstrip("0123456789"), size / 1024) for name, size in plan.stage.parts]
            parts.append(Part("padding", (plan.stage.bytes - plan.stage.loaded) / 1024))
        parts.append(Part("output", plan.staged_output / 1024))
        parts.append(Part("partial sums", plan.partials / 1024))
        parts.append(Part("barriers, alignment", (plan.fixed - plan.staged_output - plan.partials) / 1024))
        rows[label] = parts
        limits.add(config.arch.shared_bytes / 1024)
    return bars(rows, max(limits), "KiB", "shared memory of a CTA")


def tensor_memory(configs: Mapping[str, GemmConfig]) -> Picture:
    """Draws the columns of tensor memory of a CTA for several configurations of a tcgen05 GEMM."""
    from ..kernels.gemm.sm100.memory_plan import TMEM_COLUMNS, TensorPlan

    rows = {}
    for label, config in configs.items():
        plan = TensorPlan(config)
        parts = [Part("accumulator", plan.acc)] * plan.acc_stages
        parts += [Part("SFA", plan.sfa)] * config.counts[0] + [Part("SFB", plan.sfb)] * config.counts[1]
        rows[label] = [*parts, Part("allocated", plan.allocated - plan.used)]
    return bars(rows, TMEM_COLUMNS, "columns", "tensor memory of a CTA")
