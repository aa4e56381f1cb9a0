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


class StoppedLaunch(CuteNvfp4Error):
    """A launch of a submission that the simulator stopped, and why."""


class TaskFileError(HarnessError):
    """A task file, or a list of test cases, that cannot be used."""

    exit_code = EXIT_BAD_TEST_FILE


class SubmissionError(HarnessError):
    """A submission that cannot be loaded: no such file, a syntax error, no ``custom_kernel``."""

    exit_code = EXIT_CHECK_FAILED
