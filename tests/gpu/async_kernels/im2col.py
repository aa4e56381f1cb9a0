"""Loads in im2col mode: pixels of a bounding box, with offsets; nothing but the device says what is right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import text
from .case import Case, Pointer, TensorMap
from .tile_loads import data
from .tile_model import tile_bytes

_SPAN = 2048


def cases() -> Iterator[Case]:
    three = ((16, 20, 3), (32, 640), (-1,), (-1,))
    four = ((16, 6, 5, 2), (32, 192, 960), (-1, -1), (-1, -1))
    five = ((16, 4, 3, 3, 2), (32, 128, 384, 1152), (-1, -1, -1), (-1, -1, -1))
    for name, (dims, strides, lower, upper), options, coordinates, offsets in (
        ("3d", three, {}, (0, 3, 1), (1,)),
        ("3d from the corner", three, {}, (8, -1, 0), (0,)),
        ("3d past the last image", three, {"pixels": 50}, (0, 10, 2), (2,)),
        ("3d step 2", three, {"steps": (1, 2, 1)}, (0, -1, 0), (1,)),
        ("3d swizzle", three, {"box": (16,), "swizzle": 1}, (0, 3, 1), (1,)),
        ("4d", four, {}, (8, 0, 0, 0), (1, 1)),
        ("4d from the corner", four, {}, (0, -1, -1, 0), (0, 2)),
        ("4d steps", four, {"steps": (1, 2, 2, 1)}, (8, -1, -1, 0), (2, 1)),
        ("4d NaN", four, {"kind": "bf16", "fill": 1}, (0, -1, -1, 0), (0, 0)),
        ("5d", five, {}, (0, -1, 0, -1, 0), (1, 2, 0)),
    ):
        fields = {"kind": "u16", "box": (8,), "pixels": 24} | options
        spec = TensorMap(dims=dims, strides=strides, lower=lower, upper=upper, buffer=1, **fields)
        yield case(name, spec, coordinates, offsets)


def case(name: str, spec: TensorMap, coordinates: tuple[int, ...], offsets: tuple[int, ...]) -> Case:
    text.restart_labels()
    memory = data(2560, 15)
    where, moved = ", ".join(map(str, coordinates)), ", ".join(f"%h{i}" for i in range(len(offsets)))
    lines = [f"mov.u16 %h{i}, {offset};" for i, offset in enumerate(offsets)]
    lines.append(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, {text.at(_SPAN)}, {tile_bytes(spec)};")
    lines.append(
        f"cp.async.bulk.tensor.{len(spec.dims)}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        f"[%base], [%m0, {{{where}}}], {text.at(_SPAN)}, {{{moved}}};"
    )
    body = [text.fill(0, _SPAN), text.elected([text.init(_SPAN), text.INIT_FENCE]), text.PROXY_FENCE, "bar.sync 0;"]
    body += [text.elected(lines), text.wait(_SPAN), text.dump(0, _SPAN)]
    return Case(
        f"im2col {name}",
        text.module("\n  ".join(body), 1, 1),
        [np.zeros(_SPAN, np.uint8), memory],
        [Pointer(0), spec],
        block=64,
        smem=_SPAN + 16,
    )
