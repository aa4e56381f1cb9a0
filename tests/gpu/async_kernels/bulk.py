"""Bulk copies and reductions that need no tensor map, inside one CTA."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import text
from .case import Case, Pointer
from .tile_loads import data
from .tile_stores import combiner, operands

_BAR = 4096


def cases() -> Iterator[Case]:
    yield from _loads()
    yield from _stores()
    yield from _reductions()


def _loads() -> Iterator[Case]:
    """Global to shared memory: three copies on one barrier."""
    memory = data(2048, 21)
    copies = [(0, 16, 16), (64, 1024, 512), (1040, 256, 752)]
    for form, hint in (("shared::cluster", False), ("shared::cta", False), ("shared::cluster", True)):
        text.restart_labels()
        lines = ["createpolicy.fractional.L2::evict_first.b64 %d10, 1.0;"] if hint else []
        total = sum(n for *_, n in copies)
        lines.append(f"mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %d9, {text.at(_BAR)}, {total};")
        for source, to, size in copies:
            lines.append(f"add.u64 %d1, %p1, {source}; add.u32 %r1, %base, {to};")
            if hint:
                lines.append(f"cp.async.bulk.prefetch.L2.global [%d1], {size};")
            cache = (".L2::cache_hint", ", %d10") if hint else ("", "")
            lines.append(
                f"cp.async.bulk.{form}.global.mbarrier::complete_tx::bytes{cache[0]} [%r1], [%d1], {size}, "
                f"{text.at(_BAR)}{cache[1]};"
            )
        body = [text.fill(0, 2048), text.elected([text.init(_BAR), text.INIT_FENCE]), text.PROXY_FENCE, "bar.sync 0;"]
        body += [text.elected(lines), text.wait(_BAR), text.dump(0, 2048)]
        image = np.full(2048, text.POISON, np.uint8)
        for source, to, size in copies:
            image[to : to + size] = memory[source : source + size]
        yield Case(
            f"bulk load {form}{' hint' if hint else ''}",
            text.module("\n  ".join(body), 2),
            [np.zeros(2048, np.uint8), memory],
            [Pointer(0), Pointer(1)],
            block=64,
            smem=_BAR + 16,
            expected=lambda _, image=image: {0: image},
        )


def _stores() -> Iterator[Case]:
    """Shared to global memory in groups, the source used again once it has been read."""
    text.restart_labels()
    memory = data(1024, 22)
    first = [
        "cp.async.bulk.global.shared::cta.bulk_group [%p0], [%base], 256;",
        "cp.async.bulk.commit_group;",
        "add.u64 %d1, %p0, 512; add.u32 %r1, %base, 304;",
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 720;",
        "cp.async.bulk.commit_group;",
        "cp.async.bulk.wait_group.read 0;",
    ]
    second = [
        "add.u64 %d1, %p0, 1536; cp.async.bulk.global.shared::cta.bulk_group [%d1], [%base], 512;",
        "cp.async.bulk.commit_group;",
        "cp.async.bulk.wait_group 0;",
    ]
    body = [text.bring(0, 1024, "%p1"), text.PROXY_FENCE, "bar.sync 0;", text.elected(first), "bar.sync 0;"]
    body += [text.fill(0, 1024, 0x3C), text.PROXY_FENCE, "bar.sync 0;", text.elected(second)]
    after = np.full(2304, 0x77, np.uint8)
    after[:256], after[512:1232], after[1536:2048] = memory[:256], memory[304:1024], 0x3C
    yield Case(
        "bulk store groups",
        text.module("\n  ".join(body), 2),
        [np.full(2304, 0x77, np.uint8), memory],
        [Pointer(0), Pointer(1)],
        block=64,
        smem=1024,
        expected=lambda _: {0: after},
    )


def _reductions() -> Iterator[Case]:
    """Shared memory combined into global memory."""
    forms = {
        "u32": ("add", "min", "max", "inc", "dec", "and", "or", "xor"),
        "s32": ("add", "min", "max"),
        "u64": ("add", "min", "max", "and", "or", "xor"),
        "s64": ("add", "min", "max"),
        "f16": ("add.noftz", "min", "max"),
        "bf16": ("add.noftz", "min", "max"),
        "f32": ("add",),
        "f64": ("add",),
    }
    for kind, operations in forms.items():
        size = 8 if "64" in kind else 2 if "16" in kind else 4
        for operation in operations:
            text.restart_labels()
            written = kind
            if operation in ("and", "or", "xor"):
                written = f"b{8 * size}"
            if (kind, operation) == ("s64", "add"):
                # two's complement: the ISA has the unsigned form only
                continue
            lines = [
                f"add.u64 %d1, %p0, 32; cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{written} "
                "[%d1], [%base], 512;",
                "cp.async.bulk.commit_group;",
                "cp.async.bulk.wait_group 0;",
            ]
            body = [text.bring(0, 512, "%p1"), text.PROXY_FENCE, "bar.sync 0;", text.elected(lines)]
            if kind == "f64":
                old = np.random.default_rng(5).standard_normal(72).view(np.uint8)
                new = np.random.default_rng(6).standard_normal(64).view(np.uint8)
                combine = None
            else:
                old, new = operands(kind, 576 // size, 31), operands(kind, 512 // size, 32)
                combine = combiner(kind, operation)

            def expected(_, old=old, new=new, combine=combine, size=size) -> dict[int, np.ndarray]:
                after = old.copy()
                for i in range(0, 512, size):
                    after[32 + i : 32 + i + size] = combine(old[32 + i : 32 + i + size], new[i : i + size])
                return {0: after}

            yield Case(
                f"bulk reduce {operation} {kind}",
                text.module("\n  ".join(body), 2),
                [old, new],
                [Pointer(0), Pointer(1)],
                block=64,
                smem=512,
                expected=expected if combine else None,
            )
