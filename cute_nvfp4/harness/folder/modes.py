"""The modes for a folder's problem, whose necessary reads are unknown and which has no library call to compare with."""

from __future__ import annotations

from ..modes import Modes
from ..results import CaseResult
from ..runner import Outcome


class FolderModes(Modes):
    """``Modes`` in which a launch that reads anything may have made the answer."""

    def _look_at_work(self, result: CaseResult, outcome: Outcome) -> None:
        work = outcome.work
        if work is None:
            return
        what = ""
        if not outcome.launches:
            what = "no kernel was launched"
        elif not work.read:
            what = "the launches read nothing"
        result.nothing = result.nothing or what
        if work.by_host:
            result.unscored = f"{work.by_host}: torch's or the host's work has no modelled time"

    def _time_peer(self, result: CaseResult) -> None:
        """Does nothing: there is no peer."""
