"""Tensor maps changed by the kernel: tensormap.replace, tensormap.cp_fenceproxy, and loads through the result."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import text
from .case import Case, Placed, Pointer, TensorMap
from .tile_loads import data
from .tile_model import load, tile_bytes

FAKE = 0x0012_3456_7890_ABC0
_MAP = 2048


def replace(field: str, value: str | int, ordinal: int | None = None, where: str = f"%base+{_MAP}") -> str:
    """One tensormap.replace on the copy in shared memory."""
    wide = field in ("global_address", "global_stride")
    order = f", {ordinal}" if ordinal is not None else ""
    if isinstance(value, int) and wide:
        return f"mov.b64 %d20, {value}; tensormap.replace.tile.{field}.shared::cta.b1024.b64 [{where}]{order}, %d20;"
    kind = "b64" if wide else "b32"
    return f"tensormap.replace.tile.{field}.shared::cta.b1024.{kind} [{where}]{order}, {value};"


def edited(edits: list[str]) -> str:
    """Thread 0 edits the map that was brought to shared memory."""
    return text.elected(edits)


def bytes_case(name: str, edits: list[str], spec: TensorMap) -> Case:
    """The bytes of a map after the edits. Its address becomes a made-up one, the same on every machine."""
    text.restart_labels()
    edits = [replace("global_address", FAKE), *edits]
    body = [text.bring(_MAP, 128, "%p1"), "bar.sync 0;", edited(edits), "bar.sync 0;", text.dump(_MAP, 128)]
    return Case(
        f"map_edit bytes {name}",
        text.module("\n  ".join(body), 2),
        [np.zeros(128, np.uint8), np.zeros(128, np.uint8), data(4096, 11)],
        [Pointer(0), Pointer(1)],
        block=32,
        smem=_MAP + 128,
        placed=[Placed(spec, 1)],
    )


def load_case(
    name: str, before: TensorMap, after: TensorMap, edits: list[str], in_shared: bool = True, size: int = 4096
) -> Case:
    """A load through a map in global memory, edited in shared memory (copied back behind a proxy fence) or in place."""
    text.restart_labels()
    memory = data(size, 12)
    rank, bar, span = len(after.dims), 4096, 2048
    tiles = [((8,) + (1,) * (rank - 1), 0), ((-8,) + (-1,) * (rank - 1), 1024)]
    loads = [f"mbarrier.arrive.expect_tx.shared::cta.b64 _, {text.at(bar)}, {len(tiles) * tile_bytes(after)};"]
    for coordinates, to in tiles:
        loads.append(
            f"add.u32 %r1, %base, {to}; cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile"
            f".mbarrier::complete_tx::bytes [%r1], [%p1, {{{', '.join(map(str, coordinates))}}}], {text.at(bar)};"
        )
    body = [text.fill(0, span), text.elected([text.init(bar), text.INIT_FENCE])]
    if in_shared:
        body += [text.bring(_MAP, 128, "%p1"), text.PROXY_FENCE, "bar.sync 0;", edited(edits), "bar.sync 0;"]
        copy = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
        first = f"add.u32 %r1, %base, {_MAP}; {copy} [%p1], [%r1], 128;"
        body += ["setp.lt.u32 %q30, %t, 32;", text.only("%q30", first)]
    else:
        body += [text.PROXY_FENCE, text.elected(edits), "fence.proxy.tensormap::generic.release.gpu;"]
    body += ["bar.sync 0;", "fence.proxy.tensormap::generic.acquire.gpu [%p1], 128;", "bar.sync 0;"]
    body += [text.elected(loads), text.wait(bar), text.dump(0, span)]

    def expected(_: list[np.ndarray]) -> dict[int, np.ndarray]:
        image = np.full(span, text.POISON, np.uint8)
        for coordinates, to in tiles:
            load(after, memory, coordinates, image, to)
        return {0: image}

    return Case(
        f"map_edit load {name}",
        text.module("\n  ".join(body), 3),
        [np.zeros(span, np.uint8), np.zeros(128, np.uint8), memory],
        [Pointer(0), Pointer(1), Pointer(2)],
        block=64,
        smem=bar + 16,
        placed=[Placed(before, 1)],
        expected=expected,
        # the edited map holds an address
        notes={"addresses": [1]},
    )


def cases() -> Iterator[Case]:
    spec = TensorMap("u16", (24, 5, 4, 3, 3), (48, 240, 960, 2880), (16, 2, 2, 2, 2), buffer=2)
    for i in range(5):
        yield bytes_case(f"global_dim {i}", [replace("global_dim", 1000 + i, i)], spec)
        yield bytes_case(f"box_dim {i}", [replace("box_dim", 8 * (i + 1), i)], spec)
        yield bytes_case(f"element_stride {i}", [replace("element_stride", i + 2, i)], spec)
        if i < 4:
            yield bytes_case(f"global_stride {i}", [replace("global_stride", 16 * (0x54321 + i), i)], spec)
    for rank in range(5):
        yield bytes_case(f"rank {rank}", [replace("rank", rank)], spec)
    for kind in range(13):
        yield bytes_case(f"elemtype {kind}", [replace("elemtype", kind)], spec)
    for mode in range(3):
        yield bytes_case(f"interleave_layout {mode}", [replace("interleave_layout", mode)], spec)
    for mode in range(4):
        yield bytes_case(f"swizzle_mode {mode}", [replace("swizzle_mode", mode)], spec)
    for mode in range(2):
        yield bytes_case(f"fill_mode {mode}", [replace("fill_mode", mode)], spec)
    yield bytes_case("global_stride large", [replace("global_stride", (1 << 35) + 48, 1)], spec)
    yield bytes_case("nothing", [], spec)
    yield from _loads()


def _loads() -> Iterator[Case]:
    plain = TensorMap("f16", (40, 12), (80,), (32, 8), swizzle=2, buffer=2)

    def change(**fields) -> TensorMap:
        return TensorMap(**{**plain.__dict__, **fields})

    yield load_case(
        "address",
        plain,
        change(offset=480),
        ["add.u64 %d1, %p2, 480;", replace("global_address", "%d1")],
    )
    yield load_case(
        "dimensions and stride",
        plain,
        change(dims=(30, 5), strides=(112,)),
        [replace("global_dim", 30, 0), replace("global_dim", 5, 1), replace("global_stride", 112, 0)],
    )
    yield load_case("box", plain, change(box=(16, 5)), [replace("box_dim", 16, 0), replace("box_dim", 5, 1)])
    yield load_case("step", plain, change(steps=(1, 2)), [replace("element_stride", 2, 1)])
    yield load_case("swizzle", plain, change(swizzle=3), [replace("swizzle_mode", 3)])
    yield load_case("fill", plain, change(fill=1), [replace("fill_mode", 1)])
    yield load_case("type", plain, change(kind="u32", box=(16, 8), dims=(20, 12)), [
        replace("elemtype", 2), replace("box_dim", 16, 0), replace("global_dim", 20, 0)
    ])  # fmt: skip
    grow = [
        replace("rank", 2),
        *(replace("global_dim", n, i) for i, n in ((1, 4), (2, 3))),
        replace("global_stride", 320, 1),
        *(replace("box_dim", 2, i) for i in (1, 2)),
        replace("element_stride", 1, 2),
    ]
    larger = change(dims=(40, 4, 3), strides=(80, 320), box=(32, 2, 2), steps=(1, 1, 1))
    yield bytes_case("rank grows", grow, plain)
    yield load_case("rank grows", plain, larger, grow)
    shrink = [replace("rank", 1), replace("global_dim", 12, 1), replace("box_dim", 8, 1)]
    yield bytes_case("rank shrinks", shrink, larger)
    yield load_case("rank shrinks", larger, plain, shrink)
    small = change(dims=(40, 12, 1), strides=(80, 960), box=(32, 2, 1), steps=(1, 1, 1))
    yield load_case("dimensions of a third", small, larger, grow[1:])
    place = "tensormap.replace.tile.global_address.global.b1024.b64 [%p1], %d1;"
    yield load_case("address in place", plain, change(offset=480), ["add.u64 %d1, %p2, 480;", place], in_shared=False)
