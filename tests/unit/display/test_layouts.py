"""Layouts as they are drawn: CuTe's own algebra gives the same offsets, and what cannot be drawn is refused."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import cutlass.cute as cute
import numpy as np
import pytest

from cute_nvfp4 import show
from cute_nvfp4.display.layouts import column_passes
from cute_nvfp4.display.notation import layout_of, parse
from cute_nvfp4.errors import OperandError
from cute_nvfp4.scale_layout import ATOM_SHAPE, ATOM_STRIDE, offset

SVG = "{http://www.w3.org/2000/svg}"
LAYOUTS = {
    "rows": lambda: cute.make_layout((4, 8), stride=(8, 1)),
    "columns": lambda: cute.make_layout((4, 8)),
    "nested": lambda: cute.make_layout(((2, 3), (2, (2, 2))), stride=((1, 20), (2, (4, 10)))),
    "repeated": lambda: cute.make_layout((3, (4, 2)), stride=(5, (0, 1))),
    "atom": lambda: cute.make_layout(ATOM_SHAPE, stride=ATOM_STRIDE),
    "swizzle": lambda: cute.make_composed_layout(
        cute.make_swizzle(3, 2, 3), 0, cute.make_layout((8, 32), stride=(32, 1))
    ),
    "swizzle of a part": lambda: cute.make_composed_layout(
        cute.make_swizzle(2, 1, 3), 64, cute.make_layout((8, (4, 4)), stride=(4, (1, 32)))
    ),
    "three modes": lambda: cute.make_layout((2, 3, 4), stride=(12, 4, 1)),
    "vector": lambda: cute.make_layout(6, stride=3),
}


def cells(svg: str) -> list[str]:
    """The texts of the cells, which are in groups."""
    return [text.text for text in ElementTree.fromstring(svg).findall(f"{SVG}g/{SVG}text")]


def test_offsets_are_those_of_cute() -> None:
    found: dict[str, tuple[str, np.ndarray]] = {}

    @cute.jit
    def trace():
        for name, make in LAYOUTS.items():
            layout = make()
            modes = [cute.size(layout, mode=[i]) for i in range(cute.rank(layout))]
            at = [int(cute.crd2idx(c if len(c) > 1 else c[0], layout)) for c in np.ndindex(*modes)]
            found[name] = str(layout), np.array(at).reshape(modes)

    trace()
    assert found.keys() == LAYOUTS.keys()
    for name, (text, want) in found.items():
        assert np.array_equal(parse(text).offsets(), want), name
        assert str(parse(text)) == text.replace(" ", "").replace("o", " o "), name


def test_a_function_is_traced_and_drawn() -> None:
    picture = show(LAYOUTS["atom"], title="atom")
    assert picture.words == "atom: ((32,4),4):((16,4),1): 128 x 4, offsets 0 to 511"
    assert sorted(map(int, cells(picture.svg))) == list(range(512))
    assert layout_of(LAYOUTS["atom"]).matrix()[77, 2] == offset(77, 2, 128, 4)


def test_every_cell_stands_at_its_coordinate() -> None:
    root = ElementTree.fromstring(show("(3,4):(10,1)").svg)
    at = {t.text: (float(t.get("x")), float(t.get("y"))) for t in root.findall(f"{SVG}g/{SVG}text")}
    assert set(at) == {str(10 * r + c) for r in range(3) for c in range(4)}
    assert all(at[str(10 * r + c)][1] == at[str(10 * r)][1] for r in range(3) for c in range(4))
    assert at["0"][0] < at["1"][0] < at["2"][0] and at["0"][1] < at["10"][1] < at["20"][1]


@pytest.mark.parametrize(
    "text, element_bytes, passes",
    [
        ("(32,32):(32,1)", 4, 32),
        ("(32,32):(33,1)", 4, 1),
        ("(32,32):(1,32)", 4, 1),
        ("S<5,0,5> o 0 o (32,32):(32,1)", 4, 1),
        ("S<3,2,3> o 0 o (32,32):(32,1)", 4, 4),
        ("(32,32):(32,1)", 2, 16),
        ("(32,8):(0,1)", 4, 1),  # all read one word
    ],
)
def test_passes_of_a_column(text: str, element_bytes: float, passes: int) -> None:
    offsets = parse(text).matrix()
    assert column_passes(offsets, element_bytes) == passes
    assert f"{passes} passes for a column of 32" in show(text, element_bytes=element_bytes).words


def test_a_thread_value_layout_names_owners() -> None:
    # the accumulator of mma.sync m16n8: thread t has rows t // 4 and t // 4 + 8, columns 2 (t % 4) and the next
    picture = show("((4,8),(2,2)):((32,1),(16,8))", tile=(16, 8))
    texts = {(f"T{t}V{v}") for t in range(32) for v in range(4)}
    assert set(cells(picture.svg)) == texts and picture.words.endswith("32 threads of 4 values")
    root = ElementTree.fromstring(picture.svg)
    at = {t.text: (float(t.get("x")), float(t.get("y"))) for t in root.findall(f"{SVG}g/{SVG}text")}
    rows, columns = (sorted({xy[i] for xy in at.values()}) for i in (1, 0))
    for t in range(32):
        for v in range(4):
            x, y = at[f"T{t}V{v}"]
            assert (rows.index(y), columns.index(x)) == (t // 4 + 8 * (v // 2), 2 * (t % 4) + v % 2)


def test_places_of_several_threads_and_of_none_are_said() -> None:
    assert show("(4,2):(0,1)", tile=(2, 2)).words.endswith("2 places of no thread; 2 places of several")
    with pytest.raises(OperandError, match=r"places 0 to 7 .* expected places 0 to 3"):
        show("(4,2):(2,1)", tile=(2, 2))


def test_a_large_layout_is_drawn_in_part() -> None:
    picture = show("(512,512):(512,1)")
    drawn = re.search(r"drawn: (\d+) x (\d+) of 512 x 512", picture.words)
    assert len(cells(picture.svg)) == int(drawn[1]) * int(drawn[2]) <= 2048


@pytest.mark.parametrize(
    "text", ["(4,?):(1,4)", "(4,8):(1@0,1@1)", "(4,8)", "(4,8):(1,(2,3))", "4,8:1", "((4:1", "(0,2):(1,1)"]
)
def test_what_is_no_static_layout_is_refused(text: str) -> None:
    with pytest.raises(OperandError, match="expected a static layout such as"):
        show(text)
