"""Pictures of what ``kernels/gemm`` plans, for notebook 03: scales, clusters, tiles."""

from __future__ import annotations

import itertools
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from gemm_timeline import TILE_COLORS

from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.kernels.gemm.shared_plan import StagePlan
from cute_nvfp4.kernels.gemm.sm100 import loader, memory_plan
from cute_nvfp4.kernels.gemm.sm100.memory_plan import ATOM_COLUMNS, TensorPlan
from cute_nvfp4.kernels.gemm.tile_scheduler import CtaPlace
from cute_nvfp4.scale_layout import ATOM_COLS, ATOM_ROWS


def edges_table(config: GemmConfig) -> list[list[str]]:
    """Rows of (edge, full, empty) with the arithmetic of every count."""
    return [[edge.name, str(edge.full), str(edge.empty)] for edge in memory_plan.pipelines(config)]


def ranks(mask: int) -> list[int]:
    """The CTAs that a multicast mask names."""
    return [r for r in range(16) if mask >> r & 1]


def masks_of(config: GemmConfig) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """By rank in the cluster: the CTAs that get its part of A (and SFA), of B, and of SFB, according to the loader."""
    cm, cn = config.cluster
    out = {}
    for y in range(cn):
        for x in range(cm):
            place = {"x": x, "y": y, "v": x % config.ctas}
            masks = loader.multicast_masks(config, CtaPlace(workers=1, worker=0, part=0, **place))
            out[x + cm * y] = tuple(ranks(int(mask) & 0xFFFF) for mask in masks)
    return out


def multicast(axes: Any, config: GemmConfig) -> None:
    """Draws three panels: which CTAs get the part of A, of B, of SFB that each CTA of a cluster loads (loader's row,
    column)."""
    found = masks_of(config)
    size = len(found)
    for which, (ax, name) in enumerate(zip(axes, ("A and SFA", "B", "SFB"))):
        grid = np.zeros((size, size))
        for rank, masks in found.items():
            grid[rank, masks[which]] = 1
        ax.imshow(grid, cmap="Blues", vmin=0, vmax=1.6)
        for row in range(size):
            mask = sum(1 << r for r in found[row][which])
            ax.text(size - 0.4, row, f"{mask:0{size}b}", va="center", family="monospace", fontsize=8)
        ax.set(title=name, xlabel="gets it", ylabel="loads its part")
        ax.set_xticks(range(size), [f"CTA {r}" for r in range(size)], fontsize=7)
        ax.set_yticks(range(size), [f"CTA {r}" for r in range(size)], fontsize=7)


def segments(config: GemmConfig, tiles: int, steps: int, workers: int) -> list[list[tuple[int, int, int]]]:
    """For each worker its (tile, first step, steps), in order: a Python version of ``core.scheduler``."""
    if config.scheduler == "static":
        return [[(tile, 0, steps) for tile in range(worker, tiles, workers)] for worker in range(workers)]
    each, rest = divmod(tiles * steps, workers)
    ends = [worker * each + min(worker, rest) for worker in range(workers + 1)]
    out = []
    for step, end in itertools.pairwise(ends):
        mine = []
        while step < end:
            tile, first = divmod(step, steps)
            mine.append((tile, first, min(steps - first, end - step)))
            step += mine[-1][2]
        out.append(mine)
    return out


def dealt(ax: Any, shares: list[list[tuple[int, int, int]]], title: str) -> None:
    """Draws a line for each worker and a bar for each tile or part of one; the dashed line is the end of the busiest
    worker."""
    for worker, mine in enumerate(shares):
        at = 0
        for tile, first, count in mine:
            color = TILE_COLORS[tile % len(TILE_COLORS)]
            hatch = "////" if first else ""
            ax.barh(worker, count, left=at, height=0.8, color=color, edgecolor="white", hatch=hatch, lw=0.6)
            ax.text(at + count / 2, worker, str(tile), ha="center", va="center", color="white", fontsize=8)
            at += count
    longest = max(sum(count for *_, count in mine) for mine in shares)
    ax.axvline(longest, color="0.4", ls="--", lw=1)
    ax.set(title=title, xlabel="steps of K, one after the other", xlim=(0, None))
    ax.set_yticks(range(len(shares)), [f"CTA {w}" for w in range(len(shares))])
    ax.invert_yaxis()


def exchange(ax: Any, config: GemmConfig) -> None:
    """Draws split_k: the accumulator of each CTA along K, by slices of columns, and where the sums of each slice go."""
    parts = config.split_k
    for part in range(parts):
        for owner in range(parts):
            kept = owner == part
            ax.add_patch(
                plt.Rectangle((owner, -part - 0.4), 0.94, 0.8, fc=TILE_COLORS[owner], alpha=1.0 if kept else 0.35, lw=0)
            )
            text = "own sums\n+ received" if kept else f"to CTA {owner}"
            ax.text(owner + 0.47, -part, text, ha="center", va="center", fontsize=7, color="white" if kept else "k")
    ax.set(xlim=(-0.05, parts), ylim=(-parts + 0.45, 0.55), title="sums over a cluster that splits K")
    ax.set_xticks(
        [i + 0.47 for i in range(parts)],
        [f"columns {i * config.slice_n}–{(i + 1) * config.slice_n - 1}" for i in range(parts)],
        fontsize=7,
    )
    ax.set_yticks([-i for i in range(parts)], [f"CTA {i} along K" for i in range(parts)])


def scales_of_b(axes: Any, config: GemmConfig, matrix: np.ndarray, tensor: np.ndarray, tile: int) -> None:
    """Draws the scales of B (N, K / 16) with the tile's rows framed (left), and their 128 × 4 atoms in tensor memory
    (right).

    matrix, tensor: bytes; tensor is a snapshot (128 lanes, 512 columns) of 32 bits.
    """
    plan, stage = TensorPlan(config), StagePlan(config)
    first, last = tile * config.tile_n, (tile + 1) * config.tile_n
    ax = axes[0]
    ax.imshow(
        matrix, aspect="auto", interpolation="nearest", cmap="viridis", extent=(0, matrix.shape[1], len(matrix), 0)
    )
    for row in range(ATOM_ROWS, len(matrix), ATOM_ROWS):
        ax.axhline(row, color="white", lw=1)
    for column in range(ATOM_COLS, matrix.shape[1], ATOM_COLS):
        ax.axvline(column, color="white", lw=1)
    ax.add_patch(plt.Rectangle((0, first), matrix.shape[1], last - first, fill=False, ec="tab:red", lw=2.5))
    ax.set(
        title=f"scales of B in atoms; tile {tile} of {config.tile_n} columns in red", xlabel="block of K", ylabel="n"
    )
    ax.set_yticks(range(0, len(matrix) + 1, 64))
    ax = axes[1]
    start, count = plan.sfb_column(0), plan.sfb
    words = np.ascontiguousarray(tensor[:32, start : start + count]).view(np.uint8)
    ax.imshow(words, aspect="auto", interpolation="nearest", cmap="viridis", extent=(start, start + count, 32, 0))
    width = ATOM_COLUMNS * stage.atoms_n
    shift = first % ATOM_ROWS // 32
    for i in range(stage.atoms_k):
        left = start + i * width
        for column in range(left, left + width, ATOM_COLUMNS):
            ax.axvline(column, color="white", lw=1)
        box = (left + shift, 0.2), config.tile_n // 32, 31.6
        ax.add_patch(plt.Rectangle(*box, fill=False, ec="tab:red", lw=2.5))
    ax.set(title="the same in tensor memory; red: what the MMAs of this tile read", xlabel="column", ylabel="lane")
    ax.set_xticks(range(start, start + count + 1, ATOM_COLUMNS))


def read_by_tile(config: GemmConfig, tensor: np.ndarray, tile: int) -> np.ndarray:
    """The scales of B that the MMAs of a tile read from a snapshot: (tile_n, blocks of a stage) bytes."""
    stage, out = StagePlan(config), []
    shift = tile * config.tile_n % ATOM_ROWS // 32
    for i in range(stage.atoms_k):
        left = TensorPlan(config).sfb_column(0) + i * ATOM_COLUMNS * stage.atoms_n + shift
        words = np.ascontiguousarray(tensor[:32, left : left + config.tile_n // 32]).view(np.uint8)
        # lane l of column c holds row 32 c + l, a byte for each block
        out.append(words.reshape(32, -1, ATOM_COLS).transpose(1, 0, 2).reshape(config.tile_n, ATOM_COLS))
    return np.concatenate(out, axis=1)
