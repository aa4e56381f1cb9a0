"""What ``cute-nvfp4 sim --json FILE`` writes.

A run of one schedule is an object with these keys, all of them always there:

    schema      1; grows when a key changes its meaning
    script, arguments, arch, schedule, checks, allow, strict    what was run, and how; ``schedule`` is as for
                ``--schedule``
    status      the exit status of the command
    outcome     "ended" | "hazard" | "not modelled" | "internal error" | "program failed"
    failure     null, or {kind, message, launch}: what stopped the first launch that was stopped, or the first hazard
                that --continue went on past, even if the program went on after it; ``kind`` is the
                name of the error's class, ``launch`` null for a hazard in torch's own work
    error       null, or {kind, message}: what ended the program, where that was an exception
    findings    what the checks found, hazards and warnings, over all launches: objects {severity, rule, kernel,
                instruction, line, loc, message, count}, one for a class (rule) at an instruction
    seconds     of the whole program, on this machine
    launches    one object a launch, in order:
        number, kernel, grid, block, cluster, dynamic_smem, cooperative, programmatic, stream
        params          bytes of each parameter
        seconds         on this machine; it says nothing of a GPU
        instructions    warp instructions; 0 where the launch was stopped or not run
        warnings        what the checks found suspicious, a text a class; empty with --no-checks
        timing          null without --time, else the fields of ``cute_nvfp4.sim.Timing`` but waits and code,
                        and its "phases" and "gains": a modelled time
        counters        null without --counters, else every field of ``cute_nvfp4.sim.Result`` but findings and timing:
                        kernel, warps, opcodes, classes, memory, distinct_bytes, engines, waits, mma, l2, lines,
                        executed and thread_instructions as described there, and bank_conflicts

With ``--schedules N`` it is {schema, script, arguments, arch, status, schedules}: ``schedules`` has the object above
for each schedule that was run, in order, and the last is the one that failed, if one did. Of a run that died before it
wrote its report there are only ``schedule`` and ``status``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..sim.observe.timing import Timing
    from ..sim.session import LaunchRecord, Session

SCHEMA = 1


def report(session: Session, run: dict[str, Any], error: BaseException | None) -> dict[str, Any]:
    """The object for one run; ``run`` has the keys that only the command knows."""
    failure = None
    if session.failure is not None:
        record, found = session.failure
        number = record.number if record else None
        failure = {"kind": type(found).__name__, "message": str(found), "launch": number}
    ended = None if error is None else {"kind": type(error).__name__, "message": str(error)}
    launches = [_launch(r, session.options.get("counters", False)) for r in session.launches]
    found = [dataclasses.asdict(f) for f in session.findings()]
    return {"schema": SCHEMA, **run, "failure": failure, "error": ended, "findings": found, "launches": launches}


def _launch(record: LaunchRecord, counted: bool) -> dict[str, Any]:
    entry = {"number": record.number, **dataclasses.asdict(record.launch)}
    entry["params"] = [len(p) for p in record.launch.params]
    del entry["cubin"]
    entry |= {
        "seconds": record.seconds,
        "instructions": record.instructions,
        "warnings": [],
        "counters": None,
        "timing": None,
    }
    if record.result is not None:
        # asdict copies what fields refer to; a timing refers to its launch, whose memory may be gone
        counts = dataclasses.asdict(dataclasses.replace(record.result, findings=(), timing=None))
        del counts["findings"], counts["timing"]
        entry["warnings"] = list(record.result.warnings)
        entry["timing"] = record.result.timing and _timing(record.result.timing)
        if counted:
            entry["counters"] = counts | {"bank_conflicts": record.result.bank_conflicts}
    return entry


def _timing(timing: Timing) -> dict[str, Any]:
    fields = dataclasses.asdict(dataclasses.replace(timing, waits=(), code=(), again=None))
    del fields["waits"], fields["code"], fields["again"]
    return fields | {"phases": [phase._asdict() for phase in timing.phases()], "gains": timing.gains()}
