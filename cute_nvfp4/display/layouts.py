"""Drawings of CuTe layouts, with offsets coloured by their order or by their bank, and of thread-value layouts."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import OperandError
from .notation import StaticLayout, layout_of
from .svg import INK, PALETTE, SOFT, Drawing, Picture, ink_on, shade

MOST_CELLS, MOST_ROWS, MOST_COLUMNS = 2048, 128, 64
BANKS, BANK_BYTES, SEGMENT_BYTES = 32, 4, 16
LEFT, TOP = 44, 62
PANEL, MOST_WIDTH = 32, 1200


def layout(given: Any, element_bytes: float = 0, tile: tuple[int, int] | None = None, title: str = "") -> Picture:
    """Draws a layout: rows are its first mode, columns all others, and each cell shows its offset.

    given: a layout as CuTe writes it, an object of CuTe, or a function that makes one (it is traced).
    element_bytes: the size of an element (0.5 for four bits). With it, cells are coloured by the bank of shared memory
        in which their element begins, and the words say in how many passes a warp reads a column.
    tile: (M, N) of a thread-value layout, which maps (thread, value) to places in the tile counted along M first.
        Cells then show thread and value.

    Raises:
        OperandError: the layout is not static, or a thread-value layout does not fit the tile.
    """
    made = layout_of(given)
    if tile is not None:
        return _thread_value(made, tile, title)
    offsets = made.matrix()
    rows, columns = offsets.shape
    words = f"{title + ': ' if title else ''}{made}: {rows} x {columns}, offsets {offsets.min()} to {offsets.max()}"
    if element_bytes:
        bank = (offsets * element_bytes).astype(np.int64) // BANK_BYTES % BANKS
        words += f"; {column_passes(offsets, element_bytes)} passes for a column of {rows}"
        colors = np.array([_bank_color(b) for b in range(BANKS)])[bank]
        key = "colour: bank of shared memory"
    else:
        whole = max(1, int(offsets.max() - offsets.min()))
        colors = np.array([shade(0.85 * i / 63) for i in range(64)])[(offsets - offsets.min()) * 63 // whole]
        key = "darker: further from the start"
    return _grid(made, offsets.astype(str), colors, words, title, key)


def column_passes(offsets: np.ndarray, element_bytes: float) -> int:
    """Returns the most passes in which a warp of 32 lanes reads elements of one column of ``offsets`` (rows, columns):
    the number of distinct four-byte words in the busiest bank."""
    most = 0
    for column in offsets.T:
        for first in range(0, len(column), 32):
            read = np.unique((column[first : first + 32] * element_bytes).astype(np.int64) // BANK_BYTES)
            most = max(most, int(np.bincount(read % BANKS).max()))
    return most


def _thread_value(made: StaticLayout, tile: tuple[int, int], title: str) -> Picture:
    places = made.matrix()
    threads, values = places.shape
    m, n = tile
    if places.min() < 0 or places.max() >= m * n:
        got = f"places {places.min()} to {places.max()} of {made}"
        raise OperandError.of("thread-value layout", got=got, expected=f"places 0 to {m * n - 1} of a {m} x {n} tile")
    cells = np.full(m * n, "", object)
    owner = np.full(m * n, -1)
    for thread in range(threads):
        for value in range(values):
            place = int(places[thread, value])
            cells[place] = f"{cells[place]} T{thread}V{value}".strip()
            owner[place] = thread
    shared = sum(" " in cell for cell in cells)
    words = f"{title + ': ' if title else ''}{made} on {m} x {n}: {threads} threads of {values} values"
    words += f"; {(owner < 0).sum()} places of no thread" if (owner < 0).any() else ""
    words += f"; {shared} places of several" if shared else ""
    palette = np.array([*(_tint(c) for c in PALETTE), "#f2f2f2"])
    colors = palette[np.where(owner < 0, len(PALETTE), owner % len(PALETTE))]
    form = (cells.reshape(m, n, order="F"), colors.reshape(m, n, order="F"))
    return _grid(made, *form, words, title, "T: thread, V: its value; colour: thread")


def _grid(made: StaticLayout, cells: np.ndarray, colors: np.ndarray, words: str, title: str, key: str) -> Picture:
    """Draws cells and coordinates: a tall layout in panels side by side, and only the first part of a large one."""
    rows, columns = cells.shape
    shown_c = min(columns, MOST_COLUMNS)
    shown_r = min(rows, MOST_ROWS, max(1, MOST_CELLS // shown_c))
    part, colors = cells[:shown_r, :shown_c], colors[:shown_r, :shown_c]
    w = min(64, max(24, 9 + 6.2 * max(len(str(c).partition(" ")[0]) for c in part.ravel())))
    wide = LEFT + w * shown_c
    tall = PANEL if shown_r > PANEL and wide * -(-shown_r // PANEL) <= MOST_WIDTH else shown_r
    panels = -(-shown_r // tall)
    h = 20 if tall <= 40 else 14
    d = Drawing(max(wide * panels + 12, 440), TOP + h * tall + 12)

    def place(r: int, c: float) -> tuple[float, float]:
        """Returns the upper left corner of a cell."""
        return LEFT + wide * (r // tall) + w * c, TOP + h * (r % tall)

    d.text(8, 18, f"{title + ': ' if title else ''}{made}", 13, font_weight="bold")
    left_out = "" if part.size == cells.size else f"; drawn: {shown_r} x {shown_c} of {rows} x {columns}"
    d.text(8, 36, f"{key}{left_out}", fill=SOFT)
    for color in dict.fromkeys(colors.ravel()):
        corners = (place(r, c) for r, c in np.argwhere(colors == color).tolist())
        boxes = "".join(f"M{x:g} {y:g}h{w:g}v{h}h-{w:g}z" for x, y in corners)
        d.add(f'<path d="{boxes}" fill="{color}" stroke="#ffffff" stroke-width="0.7"/>')
    size = 10 if h == 20 else 9
    inks = np.vectorize(ink_on)(colors)
    for ink in np.unique(inks):  # texts of one colour share a group, so that they need not repeat it
        texts = []
        for r, c in np.argwhere(inks == ink).tolist():
            x, y = place(r, c + 0.5)
            texts.append(f'<text x="{x:g}" y="{y + 0.7 * h:g}">{_short(part[r, c])}</text>')
        d.add(f'<g font-size="{size}" text-anchor="middle" fill="{ink}">{"".join(texts)}</g>')
    for r in range(shown_r):
        x, y = place(r, 0)
        d.text(x - 6, y + 0.7 * h, r, size, "end", SOFT)
    for c in range(shown_c):
        for panel in range(panels):
            d.text(place(tall * panel, c + 0.5)[0], TOP - 6, c, size, "middle", SOFT)
    if panels == 1:
        _tile_lines(d, made, cells.shape, w, h, shown_r, shown_c)
    return Picture(d, words + left_out)


def _short(cell: object) -> str:
    """Returns the first word of a cell, with "…" if there are more."""
    first, more, _ = str(cell).partition(" ")
    return first + ("…" if more else "")


def _tile_lines(d: Drawing, made: StaticLayout, shape: tuple[int, int], w: float, h: float, rows: int, columns: int):
    """Draws lines where the innermost mode of the rows, and of the columns, starts again."""
    modes = [shape for shape, _ in made.modes]
    if len(modes) != 2 or shape != (int(np.prod(_flat(modes[0]))), int(np.prod(_flat(modes[1])))):
        return
    (by_row, by_column), (inner_r, inner_c) = shape, (_flat(m)[0] for m in modes)
    for r in range(inner_r, min(rows + 1, by_row), inner_r) if inner_r > 1 else ():
        d.line(LEFT, TOP + h * r, LEFT + w * columns, TOP + h * r, INK, stroke_width=1.2)
    for c in range(inner_c, min(columns + 1, by_column), inner_c) if inner_c > 1 else ():
        d.line(LEFT + w * c, TOP, LEFT + w * c, TOP + h * rows, INK, stroke_width=1.2)


def _flat(tree: Any) -> list[int]:
    return [tree] if isinstance(tree, int) else [x for branch in tree for x in _flat(branch)]


def _tint(color: str) -> str:
    """Returns a paler ``color``, on which black text is readable."""
    return "#" + "".join(f"{(int(color[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))


def _bank_color(bank: int) -> str:
    """Returns the colour of one of 32 banks: four banks share a hue and get darker."""
    base = PALETTE[bank // 4]
    depth = 0.45 + 0.16 * (bank % 4)
    return "#" + "".join(f"{round(255 - (255 - int(base[i : i + 2], 16)) * depth):02x}" for i in (1, 3, 5))
