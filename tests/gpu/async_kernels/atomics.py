"""Atomics and reductions on global and shared memory, single and vector."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import text
from .apply import SIZES, values
from .case import Case, Pointer

_FORMS = {
    "u32": ("add", "min", "max", "inc", "dec"),
    "s32": ("add", "min", "max"),
    "u64": ("add", "min", "max"),
    "s64": ("min", "max"),
    "b32": ("and", "or", "xor", "exch", "cas"),
    "b64": ("and", "or", "xor", "exch", "cas"),
    "b16": ("cas",),
    "f32": ("add",),
    "f64": ("add",),
    "f16": ("add.noftz",),
    "bf16": ("add.noftz",),
    "f16x2": ("add.noftz",),
    "bf16x2": ("add.noftz",),
}
_THREADS = 128


def cases() -> Iterator[Case]:
    for space in ("global", "shared"):
        for kind, operations in _FORMS.items():
            for operation in operations:
                yield _own(space, kind, operation)
    yield from _contended()
    yield from _vectors()


def _own(space: str, kind: str, operation: str) -> Case:
    """Each thread at its own place: what it got back, and what is there afterwards; then red on the result."""
    text.restart_labels()
    size, width = SIZES[kind]
    memory = values(kind, _THREADS, 81)
    operand, other = values(kind, _THREADS, 82), values(kind, _THREADS, 83)
    if operation == "cas":
        operand.reshape(-1, size)[::2] = memory.reshape(-1, size)[::2]
    if operation in ("inc", "dec"):
        operand.view(np.uint32)[::3] = memory.view(np.uint32)[::3]
        memory.view(np.uint32)[::5] = 0
    total = _THREADS * size
    body = [f".reg .b{width} %a, %b, %x;"]
    for i in range(4):
        body.append(text.address(size, f"%p{i}", f"%d{i}"))
    body.append(f"ld.global.b{8 * size} %a, [%d2]; ld.global.b{8 * size} %b, [%d3];")
    where = "[%d1]"
    if space == "shared":
        body += [text.bring(0, total, "%p1"), "bar.sync 0;", f"mad.lo.u32 %r1, %t, {size}, %base;"]
        where = "[%r1]"
    operands = "%a, %b" if operation == "cas" else "%a"
    body.append(f"atom.{space}.{operation}.{kind} %x, {where}, {operands}; st.global.b{8 * size} [%d0], %x;")
    if operation not in ("exch", "cas"):
        body.append(f"red.{space}.{operation}.{kind} {where}, %b;")
    if space == "shared":
        body += ["bar.sync 0;", text.dump(0, total, "%p1")]
    return Case(
        f"atomic {space} {operation}.{kind}",
        text.module("\n  ".join(body), 4),
        [np.zeros(total, np.uint8), memory, operand, other],
        [Pointer(i) for i in range(4)],
        block=_THREADS,
        smem=total if space == "shared" else 0,
    )


def _contended() -> Iterator[Case]:
    """All threads of four CTAs on a few words, where the order cannot show."""
    for operation, kind in (
        ("add", "u32"),
        ("add", "u64"),
        ("min", "s32"),
        ("max", "u32"),
        ("xor", "b32"),
        ("or", "b64"),
    ):
        text.restart_labels()
        size = SIZES[kind][0]
        operand = values(kind, 512, 84)
        body = [f".reg .b{8 * size} %a;", text.global_index(), text.address(size, "%p1", "%d1", "%r299")]
        body.append(f"ld.global.b{8 * size} %a, [%d1]; and.b32 %r1, %t, 3; mad.wide.u32 %d2, %r1, {size}, %p0;")
        for form in ("red.global", "red.relaxed.gpu.global", "atom.acq_rel.gpu.global"):
            result = (
                f"%d{3} , " if form.startswith("atom") and size == 8 else "%r3, " if form.startswith("atom") else ""
            )
            body.append(f"{form}.{operation}.{kind} {result}[%d2], %a;")
        yield Case(
            f"atomic contended {operation}.{kind}",
            text.module("\n  ".join(body), 2),
            [np.zeros(4 * size, np.uint8), operand],
            [Pointer(0), Pointer(1)],
            grid=4,
            block=128,
        )


def _vectors() -> Iterator[Case]:
    """Vectors of floats: .v2 and .v4 of f32, .v2 to .v8 of 16-bit types, and packed ones."""
    for kind, widths in (
        ("f32", (2, 4)),
        ("f16", (2, 4, 8)),
        ("bf16", (2, 4, 8)),
        ("f16x2", (2, 4)),
        ("bf16x2", (2, 4)),
    ):
        size, width = SIZES[kind]
        for count in widths:
            operations = ("add",) if kind == "f32" else ("add.noftz", "min.noftz", "max.noftz")
            for operation in operations:
                text.restart_labels()
                total = 64 * count * size
                memory, operand = values(kind, 64 * count, 85), values(kind, 64 * count, 86)
                body = [f".reg .b{width} %a<{count}>, %x<{count}>;"]
                for i in range(3):
                    body.append(text.address(count * size, f"%p{i}", f"%d{i}"))
                for i in range(count):
                    body.append(f"ld.global.b{8 * size} %a{i}, [%d2+{i * size}];")
                a, x = (f"{{{', '.join(f'%{r}{i}' for i in range(count))}}}" for r in "ax")
                base, *rest = operation.split(".")
                suffix = ".".join([f"v{count}", kind])
                form = f"global.{base}{''.join('.' + r for r in rest)}.{suffix}"
                body.append(f"atom.{form} {x}, [%d1], {a};")
                for i in range(count):
                    body.append(f"st.global.b{8 * size} [%d0+{i * size}], %x{i};")
                body.append(f"red.{form} [%d1], {a};")
                yield Case(
                    f"atomic vector {operation}.{suffix}",
                    text.module("\n  ".join(body), 3),
                    [np.zeros(total, np.uint8), memory, operand],
                    [Pointer(0), Pointer(1), Pointer(2)],
                    block=64,
                )
