"""Helpers of ``02_async_machine.ipynb``: they compile and run its kernels, shorten messages, and draw a trace."""

from __future__ import annotations

import functools
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import cells
import numpy as np
import torch

from cute_nvfp4 import simulating
from cute_nvfp4.errors import SimError
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.runtime.compile import CompiledKernel, build
from cute_nvfp4.runtime.launch import SimLauncher
from cute_nvfp4.runtime.signature import Signature
from cute_nvfp4.runtime.template import capture
from cute_nvfp4.scale_layout import to_blocked
from cute_nvfp4.sim import Trace
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.sim.observe.trace import Row

NOTEBOOK = "02_async_machine.ipynb"
ARCH = "sm_100a"
LINES = "--generate-line-info"  # as CUTE_DSL_LINEINFO=1: the PTX has source lines, which messages can name
STAGE_COLORS = ("tab:blue", "tab:green", "tab:purple", "tab:olive")
WAITING, OTHER = "tab:orange", "0.85"


def machine() -> Any:
    """The module of the ring's cell."""
    return cells.module(NOTEBOOK, "async_machine")


def tile() -> Any:
    """The module of the tile's cells."""
    return cells.module(NOTEBOOK, "tensor_tile")


@functools.cache
def compiled(host: Any, arguments: type, arch: str) -> tuple[CompiledKernel, Signature]:
    """Compiles a kernel of the notebook with source lines in its PTX; returns it and its arguments."""
    signature = Signature(arguments)
    kernel = build(host, signature.examples(), name=type(host).__name__, arch=arch, options=LINES)
    return kernel, signature


def launch(
    host: Any, arguments: type, tensors: dict[str, torch.Tensor], *sizes: int, arch: str = ARCH, **options: Any
) -> None:
    """Simulates a kernel, by default without checks. The kernel writes the last of ``tensors`` and reads the others."""
    kernel, signature = compiled(host, arguments, arch)
    values = signature.values(arguments(*(t.data_ptr() for t in tensors.values()), *sizes), 0)
    touched = {name: (t, name == list(tensors)[-1]) for name, t in tensors.items()}
    plan = functools.partial(capture, types=signature.types, values=values, varying=signature.varying)
    with simulating(arch, **{"checks": False} | options):
        run = SimLauncher(kernel, plan(kernel), plan, lambda: touched)
        run([values[i] for i in signature.varying], ())


def run_ring(ring: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """y (2, 32) of ``ring`` for x (R, 32) fp32; NaN where the kernel wrote nothing."""
    y = torch.full((machine().CONSUMERS, machine().COLUMNS), torch.nan)
    launch(ring, machine().RingArguments, {"x": x, "y": y}, len(x), **options)
    return y


def ring_reference(x: torch.Tensor) -> torch.Tensor:
    """The exact y of the ring."""
    m = machine()
    return x.reshape(-1, m.CONSUMERS, m.ROWS // m.CONSUMERS, m.COLUMNS).sum((0, 2))


@functools.cache
def tensor_tile() -> Any:
    return tile().TensorTile()


def run_tile(a: BlockScaledTensor, b: BlockScaledTensor, **options: Any) -> torch.Tensor:
    """C (128, 128) fp32 of two operands with row-major scales."""
    c = torch.full((tile().M, tile().N), torch.nan)
    tensors = {"a": a.data, "sfa": to_blocked(a.scale), "b": b.data, "sfb": to_blocked(b.scale), "c": c}
    launch(tensor_tile(), tile().TileArguments, tensors, **options)
    return c


def outcomes(ring: Any, x: torch.Tensor, schedules: list, **options: Any) -> Counter:
    """How often a ring is right, wrong, or stopped by which hazard, over schedules."""
    found: Counter = Counter()
    for schedule in schedules:
        try:
            y = run_ring(ring, x, schedule=schedule, **options)
            found["right" if torch.equal(y, ring_reference(x)) else "wrong"] += 1
        except SimError as error:
            found[type(error).__name__] += 1
    return found


def caught(call: Callable[[], Any]) -> SimError:
    """The hazard that ``call`` raises; raises AssertionError if it raises none."""
    try:
        call()
    except SimError as error:
        return error
    raise AssertionError("no hazard was reported")


def barrier_name(ring: Any, address: int) -> str:
    """The name of the barrier at a shared address of the ring's kernel: full[s] or empty[s]."""
    first = SHARED_BASE + ring.stages * machine().TILE_BYTES + machine().CONSUMERS * machine().COLUMNS * 4
    kind, stage = divmod((address - first) // 8, ring.stages)
    return f"{('full', 'empty')[kind]}[{stage}]"


def tell(error: SimError, ring: Any) -> None:
    """Prints a hazard, with barriers by name, without the kernel's mangled name and folders."""
    text = str(error).replace(f"{cells.FOLDER}/", "")
    text = re.sub(r"kernel_cutlass_\w+", "ring", text)
    text = re.sub(r"mbarrier at shared address (0x[0-9a-f]+)", lambda m: barrier_name(ring, int(m[1], 16)), text)
    print(type(error).__name__)
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        print(textwrap.fill(line.strip(), 110, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))


def show_lines(error: SimError) -> None:
    """Prints the source lines that a hazard names, in their order."""
    print()
    for name, number in dict.fromkeys(re.findall(r"(\w+\.py):(\d+)", str(error))):
        print(f"  {name}:{number}:  {(cells.FOLDER / name).read_text().splitlines()[int(number) - 1].strip()}")


def loads(rows: list[Row], stages: int) -> list[tuple[int, Row]]:
    """(buffer, bar) of every TMA load, in the order of issue; the loads use the buffers in turn."""
    found = sorted((r for r in rows if r.track.startswith("TMA loads")), key=lambda r: (r.args["issued"], r.begin))
    return [(i % stages, r) for i, r in enumerate(found)]


def statistics(trace: Trace) -> tuple[int, int, int]:
    """(waits of the producer for an empty buffer, waits of a consumer for a full one, most loads in flight)."""
    rows = trace.rows()
    waits = Counter(r.track for r in rows if r.kind == "wait" and "mbarrier" in r.name)
    flying = [r for r in rows if r.track.startswith("TMA loads")]
    most = max(sum(r.begin <= q.begin < r.end for r in flying) for q in flying)
    return waits["warp 0"], waits["warp 1"], most


def draw(ax: Any, trace: Trace, stages: int, title: str) -> None:
    """Draws the timeline of a ring: a track for each warp, and a track for TMA loads with a line for each buffer."""
    rows = trace.rows()
    places = {"warp 0": 3, "warp 1": 1, "warp 2": 0}
    height = 0.8 / stages
    for track, y in places.items():
        mine = [r for r in rows if r.track == track]
        ax.broken_barh([(mine[0].begin, mine[-1].end - mine[0].begin)], (y - 0.4, 0.8), color=OTHER, lw=0)
        for begin, end, color in _bars(mine, "cp.async" if track == "warp 0" else "ld.shared", stages):
            ax.broken_barh([(begin, end - begin)], (y - 0.4, 0.8), color=color, lw=0)
    reads = [r.begin for r in rows if r.track == "warp 1" and r.name.startswith("ld.shared")]
    for (stage, r), read in zip(loads(rows, stages), reads):
        y = 2.4 - height * (stage + 1)
        ax.broken_barh([(r.begin, r.end - r.begin)], (y, 0.9 * height), color=STAGE_COLORS[stage], lw=0)
        ax.plot([r.end, read], [y, 1.4], color=STAGE_COLORS[stage], lw=0.6)
    ax.set(title=title, yticks=[3, 2, 1, 0], yticklabels=["producer", "TMA loads", "consumer 0", "consumer 1"])
    ax.tick_params(left=False)


def legend(figure: Any) -> None:
    """Adds a legend of the colours of ``draw`` under the panels."""
    from matplotlib.patches import Patch

    entries = {f"buffer {i}": color for i, color in enumerate(STAGE_COLORS)}
    entries |= {"waits at a barrier": WAITING, "other code, or not its turn": OTHER}
    handles = [Patch(color=color, label=label) for label, color in entries.items()]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), frameon=False)


def _bars(mine: list[Row], marked: str, stages: int) -> Iterator[tuple[int, int, str]]:
    """(begin, end, colour) of a warp's bars. Operations whose name begins with ``marked`` use the buffers in turn."""
    tile = 0
    for r in mine:
        color = WAITING if r.kind == "wait" else OTHER
        if r.kind == "run" and r.name.startswith(marked) and "shared::cta" not in r.name:
            color, tile = STAGE_COLORS[tile % stages], tile + 1
        yield r.begin, r.end, color


def scales_in_tensor_memory(words: np.ndarray) -> np.ndarray:
    """Converts columns of scale factors, (128 lanes, 4 · MMAs) uint32, to (128 rows, 4 · MMAs) bytes.

    An MMA has four columns. Row m is in lane m % 32 of column m // 32; the four bytes are four blocks along K. Lanes 32
    to 127 repeat the first 32.
    """
    first = words[:32].view(np.uint8).reshape(32, -1, 4, 4)  # (lane, MMA, column, block)
    return first.transpose(2, 0, 1, 3).reshape(128, -1)  # (column · lane, MMA · block)


def swizzled(rows: np.ndarray) -> np.ndarray:
    """(rows, 128) bytes with the 128-byte swizzle applied or undone: 16-byte segment s of row r goes to s ^ (r % 8)."""
    segments = np.arange(8)[None] ^ (np.arange(len(rows)) % 8)[:, None]
    return np.take_along_axis(rows.reshape(-1, 8, 16), segments[..., None], axis=1).reshape(rows.shape)
