"""The object that ``cute-nvfp4 sim --json FILE`` writes; ``json_schema.simulation`` and ``schedules`` describe it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..sim.observe.timing import Timing
    from ..sim.session import LaunchRecord, Session

SCHEMA = 1


def report(session: Session, run: dict[str, Any], error: BaseException | None) -> dict[str, Any]:
    """The object for one run. run: the keys that only the command knows."""
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
        # asdict copies what fields refer to, and a timing refers to its launch, whose memory may be freed
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
