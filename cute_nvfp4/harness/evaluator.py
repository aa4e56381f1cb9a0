"""The public evaluator's command line: ``python -m cute_nvfp4.harness.evaluator MODE TEST_FILE``.

Reads one case from each line (``m: 128; k: 256; l: 1; seed: 1111``) and runs ``submission.py`` of the current folder,
whose ``#!POPCORN leaderboard`` line names the problem. Results go to ``POPCORN_FD`` only. Exit codes: 0 pass, 2 unknown
mode, 111 no ``POPCORN_FD``, 112 a check failed, 113 bad test file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import (
    EXIT_CHECK_FAILED,
    EXIT_NO_POPCORN_FD,
    EXIT_PASS,
    EXIT_USAGE,
    HarnessError,
    SubmissionError,
    TaskFileError,
)
from .evaluation import Evaluation, Options
from .problem import MODES, get_problem
from .protocol import open_channel, report, report_refusal
from .schema import Case, load_task, parse_spec
from .submission import directives, read_submission


def read_cases(path: Path, problem: str) -> list[Case]:
    """The cases of a test file.

    Raises:
        TaskFileError: the file is missing or empty, or a line is not a case of ``problem``.
    """
    task = load_task(get_problem(problem).folder / "task.yml")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"test file {path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not numbered:
        raise TaskFileError(f"test file {path} holds no cases")
    return [
        parse_spec(line, task.parameters, f"{path}, line {number}", grouped=task.grouped) for number, line in numbered
    ]


def main(arguments: Sequence[str]) -> int:
    """Runs the protocol and returns the exit code."""
    try:
        if open_channel() is None:
            print("POPCORN_FD is not set: it names the file descriptor that results are written to", file=sys.stderr)
            return EXIT_NO_POPCORN_FD
        if len(arguments) != 2 or arguments[0] not in MODES:
            print(f"usage: evaluator MODE TEST_FILE, MODE one of {', '.join(MODES)}", file=sys.stderr)
            return EXIT_USAGE
        mode, tests = arguments[0], Path(arguments[1])
        submission = Path("submission.py")
        problem = directives(read_submission(submission)).get("leaderboard")
        if problem is None:
            raise HarnessError("submission.py names no problem; its first comment needs '#!POPCORN leaderboard NAME'")
        cases = read_cases(tests, problem)
        run = Evaluation(Options(problem, mode=mode, submission=submission), cases).run()
    except HarnessError as error:
        if isinstance(error, SubmissionError):
            report_refusal(error)
        print(error, file=sys.stderr)
        return error.exit_code
    report(run)
    return EXIT_PASS if run.passed else EXIT_CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
