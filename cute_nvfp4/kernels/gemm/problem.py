"""What varies between GEMMs, as one object: the tile scheduler, the source of operands, and the results.

The roles of a kernel ask a problem for its work tiles (``scheduler``), for the operands of a work tile (``origins``,
after ``wait`` and ``acquire``), and for the output and its factor (``results``). The problems of a grouped GEMM are in
``group_source``; they also ``fill`` a table in shared memory.
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
    """A batch of (m, n) problems of one size, whose tensor maps are kernel parameters."""

    config: GemmConfig
    arguments: GemmArguments
    m: Int32
    n: Int32

    @property
    def partials(self) -> PartialSums | None:
        """Global memory for stream-K's partial sums, or None."""
        return self.arguments.partials

    def wait(self) -> None:
        """Does nothing: this kernel depends on no other."""

    def acquire(self, batch: Int32, cursor: Int32, workers: Int32) -> None:
        """Does nothing: the host made the tensor maps."""

    def origins(self, batch: Int32) -> Origins:
        """The origins of A and B."""
        return Origins(Origin(batch), Origin(batch))

    def scheduler(self) -> StaticScheduler:
        return make_scheduler(self.config, self.m, self.n, self.arguments.k, self.arguments.batch)

    def results(self) -> OneResult:
        """The output, and the factor of each product; reads the device scalars."""
        out = self.arguments.out
        matrix = OutputMatrix(out.pointer, self.m, self.n, out.stride, out.batch_stride)
        return OneResult(Result(matrix, product_factors(self.arguments.alpha, self.arguments.factors)))

    def epilogue_function(self) -> EpilogueFunction:
        return EpilogueFunction(self.config, self.arguments.bias)


Problem = OneProblem | GroupSource
Scheduler = StaticScheduler | GroupedScheduler
