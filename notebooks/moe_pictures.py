"""Pictures for ``04_gated_and_grouped.ipynb``: bytes, scales of groups, tiles distributed to CTAs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from gemm_timeline import TILE_COLORS

from cute_nvfp4 import GroupedRows, from_blocked

PARTS = {
    "x": "tab:blue",
    "gate and up": "tab:green",
    "between the products, written": "tab:red",
    "between the products, read": "tab:orange",
    "down": "tab:olive",
    "y": "tab:purple",
}
PADDING, UNUSED = "0.85", "0.96"


def stacked(ax: Any, roads: dict[str, dict[str, float]]) -> None:
    """Draws a bar for each road, with a section for each of ``PARTS``, in KiB."""
    for row, parts in enumerate(roads.values()):
        at = 0.0
        for name, color in PARTS.items():
            size = parts.get(name, 0) / 1024
            ax.barh(row, size, left=at, color=color, edgecolor="white", lw=0.6, label=name if row == 0 else None)
            if size > 30:
                ax.text(at + size / 2, row, f"{size:.0f}", ha="center", va="center", color="white", fontsize=8)
            at += size
    ax.set_yticks(range(len(roads)), roads)
    ax.invert_yaxis()
    ax.set(xlabel="KiB from and to DRAM", title="bytes of a SwiGLU layer, by road")
    ax.legend(ncol=6, loc="upper center", bbox_to_anchor=(0.45, -0.24), frameon=False, fontsize=8)


def routing(axes: Any, r: Any) -> None:
    """Draws the weight of every expert for every token (left), and the rows that each expert gets (right)."""
    tokens, groups = r.expert.shape[0], len(r.counts)
    image = torch.zeros(tokens, groups).scatter_(1, r.expert, r.weight).T
    shown = axes[0].imshow(image, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1)
    axes[0].figure.colorbar(shown, ax=axes[0], label="weight")
    axes[0].set(title="experts of each token", xlabel="token", ylabel="expert")
    axes[0].set_yticks(range(groups))
    axes[1].barh(range(groups), r.counts, color=TILE_COLORS[:groups])
    for e, count in enumerate(r.counts):
        axes[1].text(count + 2, e, str(count), va="center", fontsize=8)
    axes[1].axvline(128, color="0.4", ls="--", lw=1)
    axes[1].set(title="rows of each expert; dashed: a tile of 128", xlabel="rows", ylabel="expert")
    axes[1].set_yticks(range(groups))
    axes[1].invert_yaxis()


def scales_of_groups(axes: Any, rowmajor: np.ndarray, rows: GroupedRows) -> np.ndarray:
    """Draws the scales (T, K / block) as computed (left), and in atoms of 128 rows, where each group begins its own
    (right).

    Returns the bytes of the right picture, (128 · atoms, K / block), as they lie in ``rows.scale``.
    """
    edges, columns = rows.offsets.tolist(), rowmajor.shape[1]
    padded = from_blocked(rows.scale, 128 * rows.atoms, columns).view(torch.uint8).numpy().reshape(-1, columns)
    axes[0].imshow(rowmajor, aspect="auto", interpolation="nearest", cmap="Greys", vmin=0, vmax=160)
    axes[1].set_facecolor(PADDING)
    masked = np.ma.masked_equal(padded, 0)
    axes[1].imshow(masked, aspect="auto", interpolation="nearest", cmap="Greys", vmin=0, vmax=160)
    atom = 0
    for e, (start, end) in enumerate(itertools.pairwise(edges)):
        color, size = TILE_COLORS[e], end - start
        _frame(axes[0], start, size, columns, color, f"expert {e}: {size}")
        atoms = -(-size // 128)
        which = f"atoms {atom} to {atom + atoms - 1}" if atoms > 1 else f"atom {atom}"
        _frame(axes[1], 128 * atom, size, columns, color, f"expert {e}: {which}")
        atom += atoms
    axes[1].axhspan(128 * atom - 0.5, len(padded) - 0.5, color=UNUSED, lw=0)
    axes[1].text(columns / 2, 64 * (atom + rows.atoms), "not used", ha="center", va="center", fontsize=8, color="0.4")
    for ax, height in zip(axes, (len(rowmajor), len(padded))):
        ax.set(ylim=(height, 0), ylabel="row of scales", xlabel="block of K")
    for row in range(0, len(padded) + 1, 128):
        axes[1].axhline(row - 0.5, color="0.5", ls=":", lw=1)
    axes[0].set(title="row-major, sorted by expert")
    axes[1].set(title="GroupedRows.scale, by atoms of 128 rows; grey: zeros", yticks=range(0, len(padded) + 1, 128))
    return padded


def _frame(ax: Any, first: int, size: int, columns: int, color: Any, text: str) -> None:
    if not size:
        return
    ax.axhspan(first - 0.5, first + size - 0.5, color=color, alpha=0.45, lw=0)
    ax.text(columns - 0.2, first + size / 2, text, ha="left", va="center", fontsize=7, color=color, clip_on=False)


def dealt(ax: Any, shares: list[list[tuple[int, int, int]]], title: str) -> None:
    """Draws a line for each CTA, and a bar for each tile, as long as its steps of K, in the colour of its group."""
    for worker, mine in enumerate(shares):
        at = 0
        for group, tile, steps in mine:
            color = TILE_COLORS[group % len(TILE_COLORS)]
            ax.barh(worker, steps, left=at, height=0.8, color=color, edgecolor="white", lw=0.8)
            ax.text(at + steps / 2, worker, f"{group}.{tile}", ha="center", va="center", color="white", fontsize=7)
            at += steps
    longest = max(sum(steps for *_, steps in mine) for mine in shares)
    ax.axvline(longest, color="0.4", ls="--", lw=1)
    ax.set(title=title, xlabel="steps of K, one after the other", xlim=(0, longest * 1.01))
    ax.set_yticks(range(len(shares)), [f"CTA {w}" for w in range(len(shares))])
    ax.invert_yaxis()
