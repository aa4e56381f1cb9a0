"""Errors in what a user gives to the harness, each with its exit code."""

from __future__ import annotations

from ..errors import CuteNvfp4Error

EXIT_PASS = 0
EXIT_USAGE = 2
EXIT_NO_POPCORN_FD = 111
EXIT_CHECK_FAILED = 112
EXIT_BAD_TEST_FILE = 113


class HarnessError(CuteNvfp4Error):
    """A run that cannot start. exit_code: the process's exit code."""

    exit_code = EXIT_USAGE


class CallFailed(Exception):
    """A call that does not pass. verdict: one of ``results.VERDICTS``; details: the submission's traceback and its
    output; unordered: hazards between streams that were found before it failed."""

    def __init__(self, message: str, details: str = "", verdict: str = "refused", unordered: str = "") -> None:
        super().__init__(message)
        self.details, self.verdict, self.unordered = details, verdict, unordered


class TaskFileError(HarnessError):
    """An invalid task file, or an invalid list of test cases."""

    exit_code = EXIT_BAD_TEST_FILE


class SubmissionError(HarnessError):
    """A submission that cannot be loaded: no such file, a syntax error, or no ``custom_kernel``."""

    exit_code = EXIT_CHECK_FAILED
