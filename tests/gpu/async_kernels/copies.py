"""cp.async: sizes, zero fill, ignored sources, groups; ldmatrix and stmatrix in every form."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import text
from .case import Case, Pointer
from .tile_loads import data


def cases() -> Iterator[Case]:
    yield _sizes()
    yield _groups()
    yield from _ldmatrix()
    yield from _stmatrix()


def _sizes() -> Case:
    """Every form of cp.async by 32 threads, one row of shared memory a form."""
    text.restart_labels()
    memory = data(512, 61)
    body = [text.fill(0, 8192), "bar.sync 0;", "mad.lo.u32 %r1, %t, 16, %base;", text.address(16, "%p1", "%d1")]
    body.append("rem.u32 %r2, %t, 17; min.u32 %r3, %r2, 8; min.u32 %r4, %r2, 4; and.b32 %r5, %t, 2;")
    body.append("setp.ne.u32 %q1, %r5, 0; createpolicy.fractional.L2::evict_last.b64 %d10, 1.0;")
    forms = [
        "ca.shared.global [A], [%d1], 4", "ca.shared.global [A], [%d1], 8", "ca.shared.global [A], [%d1], 16",
        "cg.shared.global [A], [%d1], 16", "ca.shared.global [A], [%d1], 4, %r4", "ca.shared.global [A], [%d1], 8, %r3",
        "cg.shared.global [A], [%d1], 16, %r2", "ca.shared.global [A], [%d1], 16, 0",
        "cg.shared.global [A], [%d1], 16, %q1", "ca.shared.global [A], [%d1], 8, %q1",
        "cg.shared::cta.global.L2::128B [A], [%d1], 16",
        "cg.shared.global.L2::cache_hint [A], [%d1], 16, %d10", "ca.shared.global.L2::64B [A], [%d1], 4",
    ]  # fmt: skip
    for i, form in enumerate(forms):
        body.append(f"cp.async.{form.replace('[A]', f'[%r1+{512 * i}]')};")
    body += ["cp.async.wait_all;", "bar.sync 0;", text.dump(0, 8192)]
    image = np.full((16, 32, 16), text.POISON, np.uint8)
    rows = memory.reshape(32, 16)
    for i, form in enumerate(forms):
        size = int(form.split(", ")[2])
        for t in range(32):
            n = size
            if "%r" in form:
                n = min(t % 17, size)
            elif form.endswith(", 0"):
                n = 0
            elif form.endswith("%q1"):
                n = 0 if t & 2 else size
            image[i, t, :size] = 0
            image[i, t, :n] = rows[t, :n]
    return Case(
        "cp_async sizes",
        text.module("\n  ".join(body), 2),
        [np.zeros(8192, np.uint8), memory],
        [Pointer(0), Pointer(1)],
        block=32,
        smem=8192,
        expected=lambda _: {0: image.reshape(-1)},
    )


def _groups() -> Case:
    """A pipeline of three stages: the group that is waited for is read, while later ones may be under way."""
    text.restart_labels()
    stages, rounds = 3, 8
    memory = data(512 * rounds, 62)
    body = ["mad.lo.u32 %r1, %t, 16, %base;", text.address(16, "%p1", "%d1"), text.address(16, "%p0", "%d2")]
    for k in range(rounds + stages - 1):
        if k < rounds:
            body.append(f"cp.async.cg.shared.global [%r1+{512 * (k % stages)}], [%d1+{512 * k}], 16;")
        body.append("cp.async.commit_group;")
        if k >= stages - 1:
            done = k - stages + 1
            body.append(f"cp.async.wait_group {stages - 1};\n  bar.warp.sync 0xffffffff;")
            # a neighbour's piece
            body.append(f"xor.b32 %r2, %t, 5; mad.lo.u32 %r2, %r2, 16, %base; ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, "
                        f"[%r2+{512 * (done % stages)}];")  # fmt: skip
            body.append(f"st.global.v4.b32 [%d2+{512 * done}], {{%r4, %r5, %r6, %r7}}; bar.warp.sync 0xffffffff;")
    out = memory.reshape(rounds, 32, 16)[:, np.arange(32) ^ 5]
    return Case(
        "cp_async groups",
        text.module("\n  ".join(body), 2),
        [np.zeros(512 * rounds, np.uint8), memory],
        [Pointer(0), Pointer(1)],
        block=32,
        smem=512 * stages,
        expected=lambda _: {0: out.reshape(-1)},
    )


def _matrix_rows(count: int) -> list[str]:
    """%r20 = the row this lane points to: rows of 16 bytes in an order of their own, lanes past the last point at 0."""
    lines = ["mad.lo.u32 %r20, %t, 37, 11; and.b32 %r20, %r20, 31; mad.lo.u32 %r20, %r20, 16, %base;"]
    return [*lines, f"setp.lt.u32 %q1, %t, {8 * count}; selp.u32 %r20, %r20, %base, %q1;"]


def _permuted(memory: np.ndarray, count: int) -> np.ndarray:
    """(count, 8 rows, 8) 16-bit elements of the matrices."""
    order = [(t * 37 + 11) % 32 for t in range(8 * count)]
    return memory.view(np.uint16).reshape(32, 8)[order].reshape(count, 8, 8)


def _ldmatrix() -> Iterator[Case]:
    memory = data(512, 63)
    for count in (1, 2, 4):
        for transposed in (False, True):
            text.restart_labels()
            registers = ", ".join(f"%r{i + 1}" for i in range(count))
            form = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"
            body = [text.bring(0, 512, "%p1"), "bar.sync 0;", *_matrix_rows(count)]
            body += [f"{form} {{{registers}}}, [%r20];", text.address(16)]
            body += [f"st.global.b32 [%d60+{4 * i}], %r{i + 1};" for i in range(count)]
            out = np.zeros((32, 4, 2), np.uint16)
            for i, matrix in enumerate(_permuted(memory, count)):
                matrix = matrix.T if transposed else matrix
                out[:, i] = matrix.reshape(32, 2)
            yield Case(
                f"matrix ldmatrix x{count}{' trans' if transposed else ''}",
                text.module("\n  ".join(body), 2),
                [np.zeros(512, np.uint8), memory],
                [Pointer(0), Pointer(1)],
                block=32,
                smem=512,
                expected=lambda _, out=out: {0: out.view(np.uint8).reshape(-1)},
            )


def _stmatrix() -> Iterator[Case]:
    memory = data(512, 64)
    for count in (1, 2, 4):
        for transposed in (False, True):
            text.restart_labels()
            registers = ", ".join(f"%r{i + 1}" for i in range(count))
            form = f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"
            body = [text.fill(0, 512), "bar.sync 0;", *_matrix_rows(count), text.address(16, "%p1")]
            body.append("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d60];")
            body += [f"{form} [%r20], {{{registers}}};", "bar.sync 0;", text.dump(0, 512)]
            image = np.full((32, 8), text.POISON * 0x0101, np.uint16)
            fragments = memory.view(np.uint16).reshape(32, 4, 2)
            for i in range(count):
                matrix = fragments[:, i].reshape(8, 8)
                order = [(t * 37 + 11) % 32 for t in range(8 * i, 8 * i + 8)]
                image[order] = matrix.T if transposed else matrix
            yield Case(
                f"matrix stmatrix x{count}{' trans' if transposed else ''}",
                text.module("\n  ".join(body), 2),
                [np.zeros(512, np.uint8), memory],
                [Pointer(0), Pointer(1)],
                block=32,
                smem=512,
                expected=lambda _, image=image: {0: image.view(np.uint8).reshape(-1)},
            )
