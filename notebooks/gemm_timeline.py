"""The pipeline of a GEMM as lifetimes of its buffers, for ``03_gemm.ipynb``: from a simulator's trace, or from a model.

Both give the same :class:`Pipeline`, and one function draws it. A trace is in logical steps of the simulator, which
have an order and no duration; the model is in microseconds, from published figures (``planning.rates``), not measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.kernels.gemm.shared_plan import StagePlan
from cute_nvfp4.kernels.gemm.sm100.memory_plan import Tcgen05SharedPlan, TensorPlan
from cute_nvfp4.kernels.gemm.sm100.warp_roles import roles
from cute_nvfp4.planning import rates
from cute_nvfp4.sim.observe.trace import Row, Trace

TILE_COLORS = (
    "tab:blue",
    "tab:green",
    "tab:purple",
    "tab:olive",
    "tab:cyan",
    "tab:brown",
    "tab:pink",
    "tab:red",
    "navy",
)
WAITING = "tab:orange"
IN_FLIGHT, FULL, READ = 0.25, 0.55, 1.0
"""Opacity of a buffer by state: filling, waiting for its reader, being read."""
Span = tuple[float, float]


@dataclass
class Step:
    """A stage of operands: requested, complete, then read by the MMAs from ``begin`` to ``end``."""

    tile: int
    stage: int
    asked: float
    arrived: float
    begin: float
    end: float


@dataclass
class Tile:
    """An accumulator: summed from ``begin`` to ``full``, read by the epilogue from ``read`` on, ``free`` again."""

    tile: int
    acc: int
    begin: float
    full: float
    read: float
    free: float


@dataclass
class Pipeline:
    """A pipeline's timeline. waits: by role, for a barrier or for stores; stores: TMA stores in flight; unit: of all
    times."""

    stages: int
    acc_stages: int
    steps: list[Step]
    tiles: list[Tile]
    unit: str
    waits: dict[str, list[Span]] = field(default_factory=dict)
    stores: list[Span] = field(default_factory=list)

    @property
    def end(self) -> float:
        return max([s.end for s in self.steps] + [t.free for t in self.tiles])

    @property
    def most_in_flight(self) -> int:
        """The largest number of stages that were requested and not yet complete."""
        return max(sum(q.asked <= s.asked < q.arrived for q in self.steps) for s in self.steps)

    @property
    def overlapped(self) -> int:
        """How many steps of K were multiplied while the epilogue held the accumulator of another tile."""
        return sum(
            any(t.tile != s.tile and t.read < s.end and s.begin < t.free for t in self.tiles) for s in self.steps
        )


def segment_steps(trace: Trace, config: GemmConfig, cta: str) -> list[int]:
    """Steps of K of each tile, or part of one, that a CTA multiplied, in order. A commit without an MMA since the
    preceding commit belongs to the accumulator."""
    counts, steps, mmas = [], 0, 0
    for r in _engine([r for r in trace.rows() if r.cta == cta], "tensor core"):
        if "mma" in r.name:
            mmas += 1
        elif "commit" in r.name and mmas:
            steps, mmas = steps + mmas // (config.blocks_k * config.products), 0
        elif "commit" in r.name:
            counts.append(steps)
            steps = 0
    return counts + ([steps] if steps else [])


def shares(trace: Trace, config: GemmConfig) -> dict[str, list[int]]:
    """``segment_steps`` of every traced CTA, by the CTA's name."""
    return {cta: segment_steps(trace, config, cta) for cta in dict.fromkeys(r.cta for r in trace.rows())}


def from_trace(trace: Trace, config: GemmConfig, cta: str | None = None) -> Pipeline:
    """The pipeline of one CTA (by default the first), up to the end or to where the simulator stopped it."""
    of, cta = roles(config), cta or trace.rows()[0].cta
    rows = [r for r in trace.rows() if r.cta == cta]
    end = max(r.end for r in rows)
    stages, accs = Tcgen05SharedPlan(config).stages, TensorPlan(config).acc_stages
    counts = segment_steps(trace, config, cta)
    # in a stopped run, a loader may be ahead of the last MMA
    tile_of = [t for t, count in enumerate(counts) for _ in range(count)] + [max(len(counts) - 1, 0)] * stages
    tensor = _engine(rows, "tensor core")
    commits = [r for r in tensor if "commit" in r.name]
    last = [sum(counts[: t + 1]) + t for t in range(len(counts))]  # the accumulators' commits
    of_stage = [r.end for i, r in enumerate(commits) if i not in last]
    of_tile = [commits[i].end for i in last if i < len(commits)]
    mmas = _groups([r for r in tensor if "mma" in r.name], config.blocks_k * config.products)
    steps = []
    for i, copies in enumerate(_groups(_engine(rows, "TMA loads"), len(StagePlan(config).parts))):
        begin = mmas[i][0].begin if i < len(mmas) else end
        done = of_stage[i] if i < len(of_stage) else end
        steps.append(Step(tile_of[i], i % stages, copies[0].begin, max(r.end for r in copies), begin, done))
    reads = [r.begin for r in rows if r.track == "warp 0" and r.kind == "run" and "tcgen05.ld" in r.name]
    frees = [_arrivals(rows, warp) for warp in range(of.epilogue)]
    tiles = []
    for t, full in enumerate(of_tile):
        read = next((x for x in reads if x >= full), end)
        free = max(mine[t].end if t < len(mine) else end for mine in frees)
        tiles.append(Tile(t, t % accs, steps[sum(counts[:t])].begin, full, read, free))
    for t in range(len(tiles), len(counts)):  # tiles that a stopped run left unfinished
        tiles.append(Tile(t, t % accs, steps[sum(counts[:t])].begin, end, end, end))
    warps = {"load": of.load_warp, "MMA": of.mma_warp, "epilogue": 0}
    waits = {role: _waits(rows, warp) for role, warp in warps.items()}
    stores = [(r.begin, r.end) for r in _engine(rows, "TMA stores")]
    return Pipeline(stages, accs, steps, tiles, "logical steps (order, not time)", waits, stores)


def _engine(rows: list[Row], engine: str) -> list[Row]:
    """Operations of an engine in the order of issue."""
    return sorted((r for r in rows if r.track.startswith(engine)), key=lambda r: (r.args["issued"], r.begin))


def _groups(rows: list[Row], size: int) -> list[list[Row]]:
    return [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]


def _arrivals(rows: list[Row], warp: int) -> list[Row]:
    return [r for r in rows if r.track == f"warp {warp}" and r.kind == "run" and "mbarrier.arrive" in r.name]


def _waits(rows: list[Row], warp: int) -> list[Span]:
    return [(r.begin, r.end) for r in rows if r.track == f"warp {warp}" and r.kind == "wait"]


def from_model(config: GemmConfig, counts: list[int]) -> Pipeline:
    """The pipeline by arithmetic. A stage is requested when its buffer is free, arrives after a latency and its
    transfer, and is multiplied when the tensor core and an accumulator are free. Durations are from ``planning.rates``:
    a model."""
    shared, tensor = Tcgen05SharedPlan(config), TensorPlan(config)
    stages, accs = shared.stages, tensor.acc_stages
    transfer = shared.stage.loaded / rates.SM_BYTES_S * 1e6
    cycles = config.products * config.blocks_k * rates.MMA_CYCLES[config.ctas, config.tile_n]
    mma = cycles / rates.CLOCK_GHZ * 1e-3
    epilogue = config.products * config.tile_n / 32 * rates.PUBLISHED_EPI_TILE_US
    steps: list[Step] = []
    tiles: list[Tile] = []
    for t, count in enumerate(counts):
        for i in range(count):
            asked = steps[-stages].end if len(steps) >= stages else 0.0
            arrived = max(asked + rates.PUBLISHED_STAGE_LATENCY_US, steps[-1].arrived if steps else 0.0) + transfer
            begin = max(arrived, steps[-1].end if steps else 0.0)
            if i == 0 and t >= accs:
                begin = max(begin, tiles[t - accs].free)
            steps.append(Step(t, len(steps) % stages, asked, arrived, begin, begin + mma))
        full, begin = steps[-1].end, steps[-count].begin
        read = max(full, tiles[-1].free if tiles else 0.0)
        tiles.append(Tile(t, t % accs, begin, full, read, read + epilogue))
    return Pipeline(stages, accs, steps, tiles, "µs (model)")


def draw(ax: Any, p: Pipeline, title: str, end: float = sys.maxsize) -> None:
    """Draws a line for each buffer: pale while it is filled, stronger while it waits, full while it is read."""
    for s in p.steps:
        color, y = TILE_COLORS[s.tile % len(TILE_COLORS)], 1 + s.stage
        _bar(ax, s.asked, s.arrived, y, color, IN_FLIGHT)
        _bar(ax, s.arrived, s.begin, y, color, FULL)
        _bar(ax, s.begin, s.end, y, color, READ)
        _bar(ax, s.begin, s.end, 1 + p.stages, color, READ)
    labels = [(1 + i, f"stage {i}") for i in range(p.stages)] + [(1 + p.stages, "tensor core")]
    base = 2 + p.stages
    for t in p.tiles:
        color, y = TILE_COLORS[t.tile % len(TILE_COLORS)], base + t.acc
        _bar(ax, t.begin, t.full, y, color, IN_FLIGHT)
        _bar(ax, t.full, t.read, y, color, FULL)
        _bar(ax, t.read, t.free, y, color, READ)
    labels += [(base + i, f"accumulator {i}") for i in range(p.acc_stages)]
    base += p.acc_stages
    if p.stores:
        for begin, finish in p.stores:
            _bar(ax, begin, finish, base, "0.3", READ)
        labels.append((base, "TMA stores"))
        base += 1
    for role, spans in p.waits.items():
        for begin, finish in spans:
            _bar(ax, begin, finish, base, WAITING, 0.8)
        labels.append((base, f"{role} warp{'s' if role == 'epilogue' else ''} waits"))
        base += 1
    ax.set(title=title, xlabel=p.unit, ylim=(base - 0.4, 0.4), xlim=(0, min(end, p.end)))
    ax.set_yticks([y for y, _ in labels], [text for _, text in labels])
    ax.tick_params(left=False)


def _bar(ax: Any, begin: float, end: float, y: float, color: str, alpha: float) -> None:
    ax.broken_barh([(begin, end - begin)], (y - 0.4, 0.8), facecolors=color, alpha=alpha, lw=0)


def legend(figure: Any, tiles: int) -> None:
    """Adds a legend of the colours under the panels."""
    from matplotlib.patches import Patch

    handles = [Patch(color=TILE_COLORS[t], label=f"tile {t}") for t in range(tiles)]
    for alpha, label in ((IN_FLIGHT, "being filled"), (FULL, "full, waits for its reader"), (READ, "being read")):
        handles.append(Patch(color="k", alpha=alpha, label=label))
    handles.append(Patch(color=WAITING, label="waits"))
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), frameon=False, fontsize=8)
