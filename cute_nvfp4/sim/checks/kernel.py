"""Facts about a kernel's code that the checks need before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from cute_nvfp4.sim.frontend.flow import Block, registers, successors
from cute_nvfp4.sim.frontend.in_flight import fragment, is_wgmma
from cute_nvfp4.sim.frontend.model import TYPE_BITS, Imm, Instruction, Kernel
from cute_nvfp4.sim.frontend.opcodes import Op
from cute_nvfp4.sim.machine.kernel import CompiledKernel

Test = Callable[[Instruction, Op], bool]

_KIND_OF = {
    "load": lambda i: is_wgmma(i, "mma_async") and bool(fragment(i)),
    "cp_async": lambda i: i.base == "cp" and "bulk" not in i.mods,
    "init": lambda i: i.base == "mbarrier" and i.mods[:1] == ("init",),
    "tensor": lambda i: is_tcgen05(i, "mma", "cp", "shift", "commit"),
    "tmem_load": lambda i: is_tcgen05(i, "ld"),
    "tmem_store": lambda i: is_tcgen05(i, "st"),
    "bulk_read": lambda i: "bulk" in i.mods,
    "bulk_write": lambda i: "bulk" in i.mods,
    "wgmma": lambda i: i.base == "wgmma",
    "dependency": lambda i: i.base == "griddepcontrol" and "wait" in i.mods,
}
"""The kinds of components besides "thread", and the instructions for which a kernel needs them."""


def kinds(kernel: Kernel) -> tuple[str, ...]:
    """Returns the kinds of components that each warp of the kernel needs, generic ones first."""
    return ("thread", *(kind for kind, test in _KIND_OF.items() if any(test(i) for i in kernel.code)))


def some_lanes_meet(kernel: Kernel) -> bool:
    """Whether lanes of a warp may meet that are not all of it: at a bar.warp.sync whose member mask is another."""
    return any(
        i.base in ("bar", "barrier")
        and "warp" in i.mods
        and not (isinstance(i.operands[0], Imm) and i.operands[0].value & 0xFFFFFFFF == 0xFFFFFFFF)
        for i in kernel.code
    )


def fenced_space(i: Instruction) -> str | None:
    """Returns the state space in which a fence synchronises the generic and the asynchronous proxy.

    That is "shared", "global" or "" for both; None means that the instruction is no such fence.
    """
    words = set(i.mods)
    if i.base not in ("fence", "membar") or "proxy" not in words or not words & {"async", "async::generic"}:
        return None
    shared = {"shared::cta", "shared::cluster"} & words or "async::generic" in words
    return "global" if "global" in words else "shared" if shared else ""


def fenced_spaces(kernel: Kernel) -> set[str]:
    """Returns the :func:`fenced_space` of every such fence of a kernel."""
    return {space for i in kernel.code if (space := fenced_space(i)) is not None}


def grains(kernel: Kernel) -> tuple[int, int]:
    """Returns the bytes of the kernel's narrowest write to shared and to global memory, each at most 16."""
    shared = wide = 16
    for i in kernel.code:
        width = _width(i)
        if width is None:
            continue
        space = next((m.partition("::")[0] for m in i.mods if m.partition("::")[0] in ("shared", "global")), "")
        if space != "global":
            shared = min(shared, width)
        if space != "shared":
            wide = min(wide, width)
    return shared, wide


def _width(i: Instruction) -> int | None:
    """Returns the bytes that a lane writes; None for instructions that write nothing or whole chunks of 16 bytes."""
    if i.base in ("st", "atom", "red"):
        t = next((m for m in reversed(i.mods) if m in TYPE_BITS), "b8")
        count = next((int(m[1:]) for m in i.mods if m in ("v2", "v4", "v8")), 1)
        count = 1 if i.base != "st" else count
        return min(16, count * TYPE_BITS[t] // 8)
    if i.base == "cp" and "bulk" not in i.mods and len(i.operands) > 2:
        return i.operands[2].value if isinstance(i.operands[2], Imm) else 4
    if is_tcgen05(i, "alloc"):
        return 4
    if i.base == "tensormap" and i.mods[:1] == ("replace",):
        return 8
    return None


@lru_cache(maxsize=64)
def self_completing(kernel: CompiledKernel) -> frozenset[int]:
    """Returns the identities of tcgen05.ld instructions whose results the kernel computes with before any
    tcgen05.wait::ld and before the thread signals others.

    Compiled DSL kernels rely on the hardware, which waits for a register that is still to be loaded. Such a load is
    over when something is computed with its results; the checks take it to be over at once. A ``mov`` is no such use,
    because ptxas makes no instruction of the packing that compilers put before the wait.
    """

    def ends(i: Instruction) -> bool:
        return is_tcgen05(i, "wait::ld") or _tells(i)

    loads = tensor_loads(kernel)
    return frozenset(id(i) for block, at, i, values in loads if first_use(kernel, block, at + 1, values, ends))


def _tells(i: Instruction) -> bool:
    """Whether an instruction is an arrival or a release."""
    if i.base in ("bar", "barrier"):
        return "warp" not in i.mods and "wait" not in i.mods
    words = {"release", "acq_rel", "sc"}
    return (i.base == "mbarrier" and i.mods[0].startswith("arrive")) or (
        i.base in ("st", "red", "atom") and not words.isdisjoint(i.mods)
    )


def first_use(
    kernel: CompiledKernel,
    block: Block,
    at: int,
    values: frozenset[str],
    ends: Callable[[Instruction], bool],
    uses: Callable[[Instruction], bool] = lambda i: i.base != "mov",
) -> Instruction | None:
    """Returns an instruction that ``uses`` the registers ``values`` on some path from place ``at`` of ``block``, or
    None. An instruction that ``ends`` the search stops a path. The results of other instructions that read the
    registers count as ``values`` too."""
    known: dict[int, frozenset[str]] = {}
    todo = [(block.index, at, values)]
    while todo:
        index, start, now = todo.pop()
        for i, op in kernel.blocks[index].code[start:]:
            if ends(i):
                break
            split = len(op.dst)
            results = frozenset(n for o in i.operands[:split] for n in registers(o))
            guarded = i.guard is not None
            if now.isdisjoint(n for o in i.operands[split:] for n in registers(o)) and not (
                guarded and i.guard.name in now
            ):
                now = now if guarded else now - results
            elif uses(i):
                return i
            else:
                now |= results
        else:
            for s in successors(kernel.blocks[index]):
                live = now & kernel.blocks[s].live_in
                if not live <= known.get(s, frozenset()):
                    known[s] = known.get(s, frozenset()) | live
                    todo.append((s, 0, known[s]))
    return None


def tensor_loads(kernel: CompiledKernel) -> Iterator[tuple[Block, int, Instruction, frozenset[str]]]:
    """Yields the block, the place in it, the instruction and the loaded registers of every tcgen05.ld."""
    for block in kernel.blocks:
        for at, (i, op) in enumerate(block.code):
            if is_tcgen05(i, "ld"):
                yield block, at, i, frozenset(n for o in i.operands[: len(op.dst)] for n in registers(o))


def first_on_the_way(kernel: CompiledKernel, block: Block, at: int, ends: Test, target: Test) -> Instruction | None:
    """Returns a ``target`` on some path from place ``at`` of ``block`` before which no ``ends`` comes, or None."""
    seen: set[int] = set()
    todo = [(block.index, at)]
    while todo:
        index, start = todo.pop()
        for i, op in kernel.blocks[index].code[start:]:
            if ends(i, op):
                break
            if target(i, op):
                return i
        else:
            for s in successors(kernel.blocks[index]):
                if s not in seen:
                    seen.add(s)
                    todo.append((s, 0))
    return None


def is_tcgen05(i: Instruction, *operations: str) -> bool:
    """Whether the instruction is one of these operations of tcgen05."""
    return i.base == "tcgen05" and i.mods[0] in operations
