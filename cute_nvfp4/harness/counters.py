"""The simulator's counters for the launches of a call."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from ..sim.profile.page import Profile

if TYPE_CHECKING:
    from ..runtime.inspection import KernelReport
    from ..sim import Result
    from ..sim.session import LaunchRecord

Extent = tuple[int, int, int]


class Launch(BaseModel):
    """One launch of a kernel in the simulated GPU; ``seconds`` are this machine's and say nothing about a GPU.

    ``modelled_us`` is the clock's time (docs/explanation/timing.md), which is never measured; None if not requested.
    ``counters`` (see ``summary``) are empty if the launch was stopped. ``registers`` of a thread and ``spills``
    (instructions that access local memory) are the machine code's, ``profile`` is the launch's details page
    (docs/how-to/profiling.md); all three are None if not requested.
    """

    model_config = ConfigDict(extra="forbid")

    kernel: str
    grid: Extent
    block: Extent
    cluster: Extent
    dynamic_smem: int = 0
    seconds: float = 0.0
    warnings: list[str] = []
    counters: dict[str, int] = {}
    modelled_us: float | None = None
    roofline_us: float | None = None
    bound_by: str = ""
    profile: Profile | None = None
    registers: int | None = None
    spills: int | None = None

    @classmethod
    def of(cls, record: LaunchRecord, *, inspect: bool = False, profile: Profile | None = None) -> Launch:
        launch, result = record.launch, record.result
        timing = None if result is None else result.timing
        found = _inspected(launch.cubin).get(launch.kernel) if inspect and launch.cubin else None
        return cls(
            kernel=launch.kernel,
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            dynamic_smem=launch.dynamic_smem,
            seconds=record.seconds,
            warnings=[] if result is None else list(result.warnings),
            counters={} if result is None else summary(result),
            modelled_us=timing and timing.microseconds,
            roofline_us=timing and timing.roofline_us,
            bound_by=timing.bound_by if timing else "",
            profile=profile,
            registers=found and found.registers,
            spills=found and found.spill_loads + found.spill_stores,
        )


@cache
def _inspected(cubin: bytes) -> dict[str, KernelReport]:
    from ..runtime.inspection import inspect_cubin

    return {kernel.name: kernel for kernel in inspect_cubin(cubin, "").kernels}


def summary(result: Result) -> dict[str, int]:
    """Sums over the instructions of a launch; kinds without instructions are left out.

    ``instructions`` are issued by warps. ``load``, ``store``, ``atomic`` are threads' accesses to global memory:
    ``…_requests`` of warps, ``…_sectors`` of 32 bytes, ``…_bytes`` of active lanes. ``shared_passes`` are the passes
    of the banks, ``shared_ideal_passes`` the passes without conflicts. ``async_…`` are TMA and bulk copies, ``mma_…``
    MMA instructions. ``distinct_…_bytes`` are sectors touched at least once, ``dram_read_bytes`` the modelled L2's
    reads.
    """
    found = {"warps": result.warps, "instructions": result.instructions}

    def add(name: str, value: int) -> None:
        found[name] = found.get(name, 0) + int(value)

    for access in result.memory:
        if access.space == "global":
            for name in ("requests", "sectors", "bytes"):
                add(f"{access.kind}_{name}", getattr(access, name))
        elif access.space == "shared":
            for name in ("requests", "passes", "ideal_passes"):
                add(f"shared_{name}", getattr(access, name))
    for engine in result.engines:
        if engine.engine in ("tma", "store", "copy"):
            add("async_operations", engine.operations)
            add("async_load_bytes", engine.global_read)
            add("async_store_bytes", engine.global_written)
    for kind in result.mma:
        add("mma_operations", kind.operations)
        add("mma_multiply_adds", kind.multiply_adds)
    for kind, value in result.distinct_bytes.items():
        add(f"distinct_{kind}_bytes", value)
    if result.l2 is not None:
        add("dram_read_bytes", result.l2.read_bytes)
    return found


def totals(launches: Iterable[Launch]) -> dict[str, int]:
    """The number of launches and the sums of their counters; empty without launches."""
    found: dict[str, int] = {}
    for launch in launches:
        for name, value in ({"launches": 1} | launch.counters).items():
            found[name] = found.get(name, 0) + value
    return found
