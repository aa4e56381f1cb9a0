"""A small builder of SVG, and the pictures and HTML pages that notebooks show."""

from __future__ import annotations

import base64
import html
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PALETTE = (
    "#4477aa", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#ee6677",
    "#997700", "#004488", "#bb5566", "#5aae61", "#9970ab", "#44aa99",
)  # fmt: skip
"""Colours that people with any kind of colour vision can tell apart, after Paul Tol's schemes; none of them is grey."""
INK, SOFT, LINE, PAPER, IDLE, WAIT, BAD = "#222222", "#666666", "#999999", "#ffffff", "#eeeeee", "#cccccc", "#bb2222"
FONT = "Helvetica, Arial, sans-serif"
MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"


def escape(text: object) -> str:
    """Returns ``text`` escaped for SVG and HTML."""
    return html.escape(str(text), quote=True)


def number(value: float) -> str:
    """Returns a coordinate as text with at most two digits after the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def width_of(text: str, size: float = 11) -> float:
    """Returns the approximate width of a text in pixels."""
    return 0.58 * size * len(text)


def ink_on(color: str) -> str:
    """Returns a dark or a white ink, whichever is more readable on ``color`` (#rrggbb)."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else PAPER


def shade(share: float) -> str:
    """Returns a colour between near white (0) and deep blue (1)."""
    ends = ((244, 248, 252), (33, 90, 150))
    return "#" + "".join(f"{round(a + (b - a) * min(max(share, 0.0), 1.0)):02x}" for a, b in zip(*ends))


class Drawing:
    """SVG elements, in the order of drawing; coordinates are pixels from the top left."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def add(self, element: str) -> None:
        self._parts.append(element)

    def rect(self, x: float, y: float, w: float, h: float, fill: str, title: str = "", **style: object) -> None:
        """Adds a box; viewers show ``title`` when the pointer rests on it."""
        self.add(_element("rect", title, x=x, y=y, width=w, height=h, fill=fill, **style))

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = LINE, **style: object) -> None:
        self.add(_element("line", "", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **style))

    def path(self, d: str, stroke: str = INK, **style: object) -> None:
        self.add(_element("path", "", d=d, stroke=stroke, fill="none", **style))

    def text(
        self, x: float, y: float, words: object, size: float = 11, anchor: str = "start", fill: str = INK,
        **style: object,
    ) -> None:  # fmt: skip
        """Adds a text with its baseline at ``y``; ``anchor`` is "start", "middle" or "end"."""
        attributes = _attributes({"x": x, "y": y, "font-size": size, "text-anchor": anchor, "fill": fill} | style)
        self.add(f"<text{attributes}>{escape(words)}</text>")

    def legend(self, x: float, y: float, entries: Mapping[str, str], columns_end: float) -> float:
        """Adds names beside boxes of their colours, in lines from ``x`` to ``columns_end``; returns the y below."""
        at = x
        for name, color in entries.items():
            need = 22 + width_of(name)
            if at + need > columns_end and at > x:
                at, y = x, y + 16
            self.rect(at, y - 9, 10, 10, color)
            self.text(at + 14, y, name, fill=SOFT)
            at += need
        return y + 16

    def svg(self, title: str) -> str:
        """Returns the whole document; ``title`` describes the drawing for readers who do not see it."""
        w, h = number(self.width), number(self.height)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img"'
        paper = f'<rect width="{w}" height="{h}" fill="{PAPER}"/>'
        return f'{head} font-family="{FONT}"><title>{escape(title)}</title>{paper}{"".join(self._parts)}</svg>'


def _attributes(given: Mapping[str, Any]) -> str:
    """Returns attributes as SVG writes them; "_" in a name stands for "-"."""
    return "".join(f' {name.replace("_", "-")}="{escape(number(value))}"' for name, value in given.items())


def _element(tag: str, title: str, **attributes: Any) -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    opened = f"<{tag}{_attributes(attributes)}"
    return f"{opened}>{inside}</{tag}>" if inside else f"{opened}/>"


ZOOM = """(function(){
var box=document.getElementById("%s"),image=box.querySelector("img");
var code=Uint8Array.from(atob(image.src.split(",")[1]),function(c){return c.charCodeAt(0)});
box.innerHTML=new TextDecoder().decode(code);
var plot=box.querySelector("svg svg"),marks=box.querySelectorAll("[data-at]");
var view=plot.viewBox.baseVal,whole=view.width,height=view.height,from=0,shown=whole,held=null;
function draw(){
  shown=Math.min(whole,Math.max(whole/5000,shown));from=Math.max(0,Math.min(whole-shown,from));
  plot.setAttribute("viewBox",from+" 0 "+shown+" "+height);
  marks.forEach(function(m){var v=from+shown*m.dataset.at,d=Math.max(0,2-Math.floor(Math.log10(shown/m.dataset.per)));
    m.textContent=(v/m.dataset.per).toFixed(Math.min(4,d))})}
function share(e){var r=plot.getBoundingClientRect();return (e.clientX-r.left)/r.width}
plot.addEventListener("wheel",function(e){e.preventDefault();var s=share(e),at=from+shown*s;
  shown*=e.deltaY<0?0.8:1.25;shown=Math.min(whole,shown);from=at-shown*s;draw()},{passive:false});
plot.addEventListener("pointerdown",function(e){held=share(e);plot.setPointerCapture(e.pointerId)});
plot.addEventListener("pointermove",function(e){if(held!==null){var s=share(e);from-=(s-held)*shown;held=s;draw()}});
plot.addEventListener("pointerup",function(){held=null});
plot.addEventListener("dblclick",function(){from=0;shown=whole;draw()});
box.dataset.ready="zoom";
})();"""
"""The script that makes a time line zoom; %s is the name of its box. It decodes the SVG from the image, so that a page
has the SVG once; without scripts the image stays. The inner ``svg`` zooms along x. Elements with ``data-at`` (their
share of the width) and ``data-per`` (lengths of the view for 1 on the axis) are labels of the axis."""
_numbers = itertools.count(1)


class Picture:
    """An SVG that notebooks show, and a description in words for readers who do not see it.

    ``svg`` is the text of the SVG and ``words`` the description. ``zooms`` says whether the SVG has an inner ``svg`` in
    which wheel and pointer zoom and move along x where scripts run.
    """

    def __init__(self, drawing: Drawing, words: str, zooms: bool = False) -> None:
        self.svg, self.words, self.zooms = drawing.svg(words), words, zooms

    def __repr__(self) -> str:
        return self.words

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Returns the SVG; for a picture that zooms, HTML that starts as an image of it."""
        if self.zooms:
            return {"text/html": self.html, "text/plain": self.words}
        return {"image/svg+xml": self.svg, "text/plain": self.words}

    @property
    def image(self) -> str:
        """The picture as an HTML image. Pages that remove scripts and inline SVG, as GitHub does, keep images."""
        code = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{escape(self.words)}" src="data:image/svg+xml;base64,{code}">'

    @property
    def html(self) -> str:
        """The picture as HTML for a page or a notebook."""
        if not self.zooms:
            return self.image
        name = f"cute-nvfp4-picture-{next(_numbers)}"
        return f'<div id="{name}">{self.image}</div><script>{ZOOM % name}</script>'

    def write(self, path: str | Path) -> None:
        """Writes an SVG file or, if ``path`` ends in .html, a page."""
        page = f'<!DOCTYPE html><meta charset="utf-8"><title>{escape(self.words)}</title>{self.html}'
        Path(path).write_text(page if str(path).endswith(".html") else self.svg, encoding="utf-8")


class Page:
    """HTML that notebooks show, and the same content in words."""

    def __init__(self, html: str, words: str) -> None:
        self.html, self.words = html, words

    def __repr__(self) -> str:
        return self.words

    def _repr_html_(self) -> str:
        return self.html

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.words}

    def write(self, path: str | Path) -> None:
        """Writes an HTML file."""
        Path(path).write_text(f'<!DOCTYPE html><meta charset="utf-8">{self.html}', encoding="utf-8")


def stacked(*shown: Picture | Page) -> Page:
    """Returns a page of pictures and pages, one below the other."""
    return Page("".join(f"<div>{x.html}</div>" for x in shown), "\n".join(x.words for x in shown))


def table(header: list[str], rows: list[list[object]], form: Callable[[object], str] = str) -> Page:
    """Returns a table whose columns of numbers are aligned to the right; ``form`` converts a cell to text."""
    texts = [[form(cell) for cell in row] for row in rows]
    right = [bool(rows) and all(isinstance(row[j], (int, float)) for row in rows) for j in range(len(header))]
    side = [f' style="text-align:{"right" if r else "left"}"' for r in right]
    head = "".join(f"<th{s}>{escape(h)}</th>" for s, h in zip(side, header))
    body = "".join("<tr>" + "".join(f"<td{s}>{escape(c)}</td>" for s, c in zip(side, row)) + "</tr>" for row in texts)
    widths = [max(len(line[j]) for line in [header, *texts]) for j in range(len(header))]
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right)).rstrip()
        for line in [header, *texts]
    ]
    return Page(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", "\n".join(lines))
