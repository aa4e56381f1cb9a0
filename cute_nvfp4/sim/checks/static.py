"""Static rules: faults in the code of a kernel that an execution may never show.

A finding is a "hazard" (the ISA forbids it, or data can be lost) or a "warning" (compiled DSL kernels do it, and
hardware is known to tolerate it). None of the rules finds a hazard in an unmodified public kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from cute_nvfp4.sim.checks.findings import Finding
from cute_nvfp4.sim.checks.kernel import first_on_the_way, first_use, is_tcgen05, tensor_loads
from cute_nvfp4.sim.checks.wgmma_fence import unfenced
from cute_nvfp4.sim.frontend.flow import registers
from cute_nvfp4.sim.frontend.model import Imm, Instruction, clipped
from cute_nvfp4.sim.frontend.opcodes import Op
from cute_nvfp4.sim.machine.kernel import CompiledKernel

WARP = 32
Rule = Callable[[CompiledKernel], Iterator[tuple[str, Instruction, str]]]
"""A function that yields the severity, the instruction and the text of each finding in a kernel."""


@lru_cache(maxsize=64)
def findings(kernel: CompiledKernel, strict: bool = False) -> tuple[Finding, ...]:
    """Returns all findings in one kernel, by rule and place in the code; ``strict`` adds the rules of ``STRICT``."""
    return tuple(
        Finding.at(i, severity, name, kernel.source.name, f"{clipped(kernel.source.name)}: {i.where()}: {text}")
        for name, rule in RULES.items()
        if strict or name not in STRICT
        for severity, i, text in rule(kernel)
    )


def _init_fence(kernel: CompiledKernel) -> Iterator[tuple[str, Instruction, str]]:
    """Finds each mbarrier.init that no fence follows before other CTAs or the asynchronous proxy use the mbarrier (PTX
    ISA, "fence.mbarrier_init", "Async proxy")."""
    for block in kernel.blocks:
        for at, (i, _) in enumerate(block.code):
            if i.base == "mbarrier" and i.mods[:1] == ("init",):
                use = first_on_the_way(kernel, block, at + 1, _is_init_fence, _needs_init)
                if use is not None:
                    how = "without fence.mbarrier_init.release.cluster (or fence.proxy.async)"
                    yield "hazard", i, f"reaches {use.where()} {how}"


def _is_init_fence(i: Instruction, op: Op) -> bool:
    return i.base == "fence" and ("mbarrier_init" in i.mods or ("proxy" in i.mods and "async" in i.mods))


def _needs_init(i: Instruction, op: Op) -> bool:
    relaxed = i.base == "barrier" and {"cluster", "arrive", "relaxed"} <= set(i.mods)
    return relaxed or "mbarrier::complete_tx::bytes" in i.mods or is_tcgen05(i, "commit")


def _freed(kernel: CompiledKernel) -> Iterator[tuple[str, Instruction, str]]:
    """Finds tcgen05.alloc in a kernel without tcgen05.dealloc."""
    code = [i for b in kernel.blocks for i, _ in b.code]
    if not any(is_tcgen05(i, "dealloc") for i in code):
        for i in code:
            if is_tcgen05(i, "alloc"):
                yield "hazard", i, "the kernel has no tcgen05.dealloc"


def _loads_waited_for(kernel: CompiledKernel) -> Iterator[tuple[str, Instruction, str]]:
    """Finds each tcgen05.ld with whose registers something is computed before tcgen05.wait::ld."""
    for block, at, i, results in tensor_loads(kernel):
        use = first_use(kernel, block, at + 1, results, _load_wait)
        if use is not None:
            yield "warning", i, f"its registers are used by {use.where()} before tcgen05.wait::ld"


def _load_wait(i: Instruction) -> bool:
    return is_tcgen05(i, "wait::ld")


def _loads_stored(kernel: CompiledKernel) -> Iterator[tuple[str, Instruction, str]]:
    """Finds each tcgen05.ld whose values are stored before any tcgen05.wait::ld, in a kernel that has such waits.

    A compiler may compute with the registers before the wait, but it cannot move a store there. This is a warning only,
    because public kernels do it, and kernels without any wait exist and run.
    """
    if not any(is_tcgen05(i, "wait::ld") for b in kernel.blocks for i, _ in b.code):
        return
    for block, at, i, results in tensor_loads(kernel):
        store = first_use(kernel, block, at + 1, results, _load_wait, _stores)
        if store is not None:
            yield "warning", i, f"what it loads is stored by {store.where()} without tcgen05.wait::ld"


def _stores(i: Instruction) -> bool:
    return i.base in ("st", "red", "atom", "stmatrix")


def _answers_heard(kernel: CompiledKernel) -> Iterator[tuple[str, Instruction, str]]:
    """Finds each test_wait or try_wait whose answer nothing reads: it waits for nothing."""
    used: set[str] = set()
    waits: list[Instruction] = []
    for block in kernel.blocks:
        for i, op in block.code:
            used.update(n for o in i.operands[len(op.dst) :] for n in registers(o))
            if i.guard is not None:
                used.add(i.guard.name)
            if i.base == "mbarrier" and i.mods[:1] in (("try_wait",), ("test_wait",)):
                waits.append(i)
    for i in waits:
        if not used & set(registers(i.operands[0])):
            yield "warning", i, "nothing reads its answer, so it waits for nothing"


def _thread_counts(kernel: CompiledKernel) -> Iterator[tuple[str, Instruction, str]]:
    """Finds thread counts of bar and barrier that are no whole number of warps (PTX ISA, "barrier{.cta}")."""
    for block in kernel.blocks:
        for i, _ in block.code:
            named = i.base == "bar" or (i.base == "barrier" and "cluster" not in i.mods)
            if named and "warp" not in i.mods:
                at = 2 if "red" in i.mods else 1
                for o in i.operands[at : at + 1]:
                    if isinstance(o, Imm) and o.value % WARP:
                        yield "hazard", i, f"{o.value} threads are no whole number of warps"


RULES: dict[str, Rule] = {
    "mbarrier-init-fence": _init_fence,
    "tensor-memory-freed": _freed,
    "tensor-load-wait": _loads_waited_for,
    "tensor-load-stored": _loads_stored,
    "wait-answer-read": _answers_heard,
    "barrier-thread-count": _thread_counts,
    "wgmma-fence": unfenced,
}
STRICT = frozenset({"tensor-load-wait"})
"""Rules that compiled kernels break and hardware is known to tolerate: compilers compute before the wait."""
