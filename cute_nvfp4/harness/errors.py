"""What can be wrong with what a user hands to the harness, each with the exit code it ends in."""

from __future__ import annotations

from ..errors import CuteNvfp4Error

EXIT_PASS = 0
EXIT_USAGE = 2
EXIT_NO_POPCORN_FD = 111
EXIT_CHECK_FAILED = 112
EXIT_BAD_TEST_FILE = 113


class HarnessError(CuteNvfp4Error):
    """A run that cannot start; ``exit_code`` is what the process ends with."""

    exit_code = EXIT_USAGE


class CallFailed(Exception):
    """A call that is no pass: ``verdict`` (of ``results.VERDICTS``) says in which way, ``details`` has the submission's
    traceback and what it printed; ``unordered`` are hazards between streams that were found before it failed."""

    def __init__(self, message: str, details: str = "", verdict: str = "refused", unordered: str = "") -> None:
        super().__init__(message)
        self.details, self.verdict, self.unordered = details, verdict, unordered


class TaskFileError(HarnessError):
    """A task file, or a list of test cases, that cannot be used."""

    exit_code = EXIT_BAD_TEST_FILE


class SubmissionError(HarnessError):
    """A submission that cannot be loaded: no such file, a syntax error, no ``custom_kernel``."""

    exit_code = EXIT_CHECK_FAILED
