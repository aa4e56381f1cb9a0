"""``run``: executes one launch in the simulator, with its checks, counters, trace and clock."""

from __future__ import annotations

import math
import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace

from cute_nvfp4.errors import SimError
from cute_nvfp4.sim.checks import Checks, static
from cute_nvfp4.sim.checks.dependency import Earlier
from cute_nvfp4.sim.checks.findings import Findings
from cute_nvfp4.sim.checks.unwritten import Unwritten
from cute_nvfp4.sim.clock.machine import Machine
from cute_nvfp4.sim.clock.timing import Clock
from cute_nvfp4.sim.machine.events import Client
from cute_nvfp4.sim.machine.executor import execute
from cute_nvfp4.sim.machine.global_memory import GlobalMemory
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.machine.launched import Run
from cute_nvfp4.sim.machine.schedule import Schedule
from cute_nvfp4.sim.observe.counters import Counters, Instructions
from cute_nvfp4.sim.observe.l2 import L2
from cute_nvfp4.sim.observe.result import Result
from cute_nvfp4.sim.observe.steps import Steps
from cute_nvfp4.sim.observe.trace import Trace
from cute_nvfp4.sim.program import Program

DEFAULT_STEPS = 2_000_000


def run(
    program: Program,
    launch: Launch,
    memory: GlobalMemory,
    *,
    counters: bool = False,
    checks: bool = True,
    trace: Trace | None = None,
    schedule: Schedule | None = None,
    step_limit: int = DEFAULT_STEPS,
    instruction_limit: float = math.inf,
    warps_per_wave: int | None = None,
    sm_count: int = 148,
    allow: Collection[str] = (),
    on_hazard: str = "raise",
    strict: bool = False,
    clock: str | Machine | None = None,
    warm: bool = False,
    others: Sequence[Client] = (),
    earlier: Earlier | None = None,
) -> Result:
    """Executes one launch of a kernel of ``program`` on the tensors of ``memory``, and returns its counts and findings.

    counters: whether to count memory requests, engine operations and waits; ``Result`` always has instruction counts.
    checks: whether to look for races and other hazards that this run need not show (``sim.checks``).
    trace: collects what each warp and engine does, step by step.
    schedule: decides how warps and engines interleave; None is the fast ``Schedule()``.
    step_limit: the most basic blocks that one wave may execute; one more raises ``StepLimit``.
    instruction_limit: the most instructions that one wave may execute, likewise. An instruction counts once for all
        warps that execute it together, so a simulation takes time about in proportion to this count.
    warps_per_wave: the most warps that are resident together, in whole clusters; a cooperative launch is always one
        wave. None: ``machine.residency`` decides.
    sm_count: the number of SMs of the modelled GPU.
    allow: classes of hazards (``checks.findings.CLASSES``) that are reported as warnings.
    on_hazard: "raise" stops at the first hazard that a check finds; "collect" goes on, and ``Result.findings`` has all.
    strict: whether to warn of what the ISA asks for and NVIDIA's kernels leave out (``checks.strict``).
    clock: a machine, or its name, for which ``Result.timing`` models the time (docs/explanation/timing.md).
    warm: whether the clock's L2 holds the tensors at the start.
    others: clients that also receive the events of the launch (``machine.events``).
    earlier: the accesses of earlier launches that may still run (``observe.overlap``).

    Raises a ``SimError`` for the hazard that stops the launch; its ``findings`` has what the checks found before that.
    Raises ``LaunchError`` when the launch does not fit the kernel or the GPU.
    """
    kernel, target = program.kernel(launch.kernel), program.module.target
    found = Findings(kernel.source.name, allow, on_hazard, strict)
    for finding in static.findings(kernel, strict) if checks else ():
        found.add(finding)
    variables, unwritten = program.variables(memory), Unwritten(found, memory)

    def execute_for(clients: Sequence[Client]) -> None:
        state = Run(kernel, target, launch, memory, step_limit, sm_count, schedule or Schedule())
        state.variables, state.clients, state.instruction_limit = variables, clients, instruction_limit
        try:
            execute(state, warps_per_wave)
        finally:
            state.clients = ()  # which refer to waves, as these do to ``state``

    steps, instructions = Steps(), Instructions(kernel)
    counted = Counters(kernel, memory, L2.of(target), steps) if counters else None
    clients: list[Client | None] = [
        steps if counters or trace is not None else None,
        instructions,
        Checks(kernel, memory, found, unwritten, earlier) if checks else None,
        counted,
        trace.client(kernel, launch, steps) if trace is not None else None,
        timed := Clock(program, kernel, launch, memory, clock, warm) if clock is not None else None,
        *others,
    ]
    try:
        execute_for([client for client in clients if client is not None])
    except SimError as error:
        unwritten.stopped()
        error.findings = found.all()
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        clients.clear()  # an error keeps the frames of its traceback, which are not to keep the memory of a wave
    unwritten.settle(lambda client: execute_for([client]))
    result = replace(instructions.result(launch), findings=found.all())
    if timed is not None:
        timed.settle(lambda client: execute_for([client]))
        result = replace(result, timing=timed.timing())
    return counted.complete(result) if counted else result
