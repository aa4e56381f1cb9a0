"""A run of a solution on a definition's workloads, which writes traces."""

from __future__ import annotations

from pathlib import Path

from ..errors import SubmissionError
from ..evaluation import Evaluation, Options
from ..folder.task import FolderProblem
from ..modes import Progress
from ..results import RunResult
from ..submission import Submission
from .records import BenchTrace
from .task import read_definition, read_solution, read_workloads, solution_name
from .traces import hardware_of, refused, traces


class BenchEvaluation(Evaluation):
    """An ``Evaluation`` whose problem is a ``definition`` and whose submission is a solution. written: the file for its
    traces, one a line; None for none. A solution that cannot be loaded also gets traces.

    Raises:
        HarnessError: as ``Evaluation``, ``read_definition`` and ``read_solution`` do.
    """

    def __init__(self, options: Options, definition: Path, workloads: Path | None, written: Path | None) -> None:
        self._definition, self._workloads, self._written = definition, workloads, written
        super().__init__(options)

    def _read_problem(self) -> FolderProblem:
        return read_definition(self._definition, self._workloads)

    def _read_submission(self) -> Submission:
        try:
            return read_solution(self.options.submission, self.problem.name)
        except SubmissionError as error:
            self._refuse(error)
            raise

    def run(self, progress: Progress = lambda result, state: None) -> RunResult:
        """Runs every workload and writes the traces."""
        try:
            run = super().run(progress)
        except SubmissionError as error:
            self._refuse(error)
            raise
        self._write(traces(run, read_workloads(self.problem), self._solution))
        return run

    @property
    def _solution(self) -> str:
        return solution_name(self.options.submission)

    def _refuse(self, error: SubmissionError) -> None:
        hardware = "not run"
        if hasattr(self, "backend"):
            hardware = hardware_of(self.backend, self.arch, self.device)
        self._write(refused(self.problem.name, read_workloads(self.problem), self._solution, hardware, str(error)))

    def _write(self, found: list[BenchTrace]) -> None:
        if self._written is not None:
            self._written.write_text("".join(trace.model_dump_json() + "\n" for trace in found))
