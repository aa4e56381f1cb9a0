"""The times of ``cute-nvfp4 sim --time`` as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .sim_outcome import launch_line

if TYPE_CHECKING:
    from ..sim.session import Session

MOST_REASONS = 4
MOST_GAINS, LEAST_GAIN = 3, 0.01


def time_line(session: Session) -> dict[str, Any]:
    """The modelled timelines of all launches, in the format of Perfetto and chrome://tracing."""
    events = []
    for number, record in enumerate(
        r for r in session.launches if r.result is not None and r.result.timing is not None
    ):
        events += record.result.timing.events(number, f"launch {number}")
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"clock": "modelled microseconds"}}


def time_lines(session: Session) -> Iterator[str]:
    """Lines for each launch: its modelled time, what bounds it, and what its warps wait for."""
    timed = [record for record in session.launches if record.result is not None and record.result.timing is not None]
    total = 0.0
    for record in timed:
        timing = record.result.timing
        total += timing.microseconds
        yield f"{launch_line(record)}: {timing.microseconds:.2f} us modelled on {timing.machine.upper()}"
        launch = f"a launch {timing.launch_us:.2f} us of both ({timing.launch_from})"
        yield f"  roofline {timing.roofline_us:.2f} us, {launch}"
        worst = sorted(timing.lost.items(), key=lambda item: -item[1])[:MOST_REASONS]
        yield "  warps wait for " + ", ".join(f"{name} {share:.0%}" for name, share in worst)
        parts = (f"{p.begin:.1f} to {p.end:.1f} us {p.bound_by} {p.share:.0%}" for p in timing.phases())
        yield "  bound by: " + ", ".join(parts)
        yield "  busy: " + ", ".join(f"{name} {share:.0%}" for name, share in timing.busy.items())
        gains = [(what, saved) for what, saved in list(timing.gains().items())[:MOST_GAINS] if saved >= LEAST_GAIN]
        if gains:
            yield "  would save: " + ", ".join(f"{what} {saved:.2f} us" for what, saved in gains)
        for note in timing.notes:
            yield f"  note: {note}"
    if len(timed) > 1:
        yield f"{len(timed)} launches, one after the other: {total:.2f} us modelled"
