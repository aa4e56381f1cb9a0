"""What varies between GEMMs, as one object: tile scheduler, operand source, and results.

The roles of a kernel ask a problem where the operands of a work tile are (``origins``, after ``wait`` and ``acquire``),
which tiles there are (``scheduler``), and where the results go and what they are multiplied with (``results``).
``group_source`` has the problems of a grouped GEMM, which also ``fill`` a table in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32

from .arguments import GemmArguments, PartialSums
from .config import GemmConfig
from .epilogue import EpilogueFunction, OneResult, OutputMatrix, Result, product_factors
from .group_source import GroupSource
from .grouped_scheduler import GroupedScheduler
from .operand_source import Origin, Origins
from .tile_scheduler import StaticScheduler, make_scheduler


@dataclass(frozen=True)
class OneProblem:
    """A batch of (m, n) problems of one size: their tensor maps are parameters of the kernel."""

    config: GemmConfig
    arguments: GemmArguments
    m: Int32
    n: Int32

    @property
    def partials(self) -> PartialSums | None:
        """Global memory for stream-K."""
        return self.arguments.partials

    def wait(self) -> None:
        """Before the first load."""

    def acquire(self, batch: Int32, cursor: Int32, workers: Int32) -> None:
        """Before the first load of a work tile."""

    def origins(self, batch: Int32) -> Origins:
        """The origins of A and of B."""
        return Origins(Origin(batch), Origin(batch))

    def scheduler(self) -> StaticScheduler:
        return make_scheduler(self.config, self.m, self.n, self.arguments.k, self.arguments.batch)

    def results(self) -> OneResult:
        """Reads the device scalars."""
        out = self.arguments.out
        matrix = OutputMatrix(out.pointer, self.m, self.n, out.stride, out.batch_stride)
        return OneResult(Result(matrix, product_factors(self.arguments.alpha, self.arguments.factors)))

    def epilogue_function(self) -> EpilogueFunction:
        return EpilogueFunction(self.config, self.arguments.bias)


Problem = OneProblem | GroupSource
Scheduler = StaticScheduler | GroupedScheduler
