"""The products of a mixture of experts on WGMMA, for rows that are slots. The epilogue adds biases, activates between
the products, and applies router weights.

``RoutedWgmma`` is ``GroupedWgmma`` for rows whose groups offsets give. The first product gathers x (``gathered_x``) and
activates. The second multiplies each row by the weight that the router gave its slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ...ptx.memory import add_16bit_global
from ..factors import Factor
from ..gemm.epilogue import device_scalar
from ..gemm.gates import activate
from ..gemm.operands import TmaCopy
from ..gemm.packed.mainloop import OperandMemory
from ..gemm.sm90.config import GATHER_THREADS, WARPGROUP
from ..gemm.sm90.epilogue import WARP, WarpgroupEpilogue
from ..gemm.sm90.grouped import GroupedWgmma
from ..gemm.sm90.grouped_arguments import RoutedRows
from ..gemm.sm90.groups import GroupScheduler, GroupTile, PackedGroups
from ..gemm.sm90.row_factors import RowFactors
from ..gemm.stage_loader import fill_stages
from ..gemm.tile_scheduler import WorkTile
from .gathered_x import GatheredX

FACTOR_COLUMNS = 128
"""The widest tile that leaves registers to load the epilogue's factors before the mainloop."""


@dataclass(frozen=True)
class RoutedEpilogue(WarpgroupEpilogue):
    """The epilogue of a work tile whose rows are slots. routed: the slots from the tile's first row on, and the bias of
    its group. biases: those of the thread's two rows of the MMA, if it loaded them before the mainloop."""

    routed: RoutedRows | None = None
    biases: tuple[Float32, Float32] | None = None

    def of_tile(self, tile: WorkTile) -> RoutedEpilogue:
        """This epilogue with the factors of the tile's rows, loaded before the mainloop if there are registers."""
        found = self.with_factors(tile) if self.config.tile_n <= FACTOR_COLUMNS else self
        if self.config.routed.biased and self.config.asks_ahead(self.config.tile_n):
            return replace(found, biases=found.group_biases(tile))
        return found

    @cute.jit
    def store(self, acc: cute.Tensor, tile: WorkTile):
        """Stores a work tile."""
        storing = self.with_factors(tile) if self.rows is None else self
        WarpgroupEpilogue.store(storing, acc, tile)

    def with_factors(self, tile: WorkTile) -> RoutedEpilogue:
        """This epilogue with the factors of the tile's rows, if rows have any. It starts to load router weights of
        slots or, in FP8, the factors of tokens and of the weight's rows."""
        cfg, found, of_weight = self.config, [], None
        if not cfg.row_factors:
            return self
        for i in range(-(-cfg.tile_n // WARPGROUP)):
            row = cutlass.min(self.thread + i * WARPGROUP, self.x_rows - 1)
            slot = cute.make_tensor(self.routed.slots + row, cute.make_layout(1))[0]
            if cfg.fp8:
                place = self.scheduler.groups.arguments.one.row_scales.x + slot // self.routed.top
            else:
                place = self.routed.weights + slot
            found.append(device_scalar(place).to(Float32))
        if cfg.fp8:
            scale = self.arguments.row_scales.weight + (self.first_packed_row(tile) + self.thread % WARP // 4)
            of_weight = device_scalar(scale), device_scalar(scale + 8)
        shared = self.shared + cfg.epilogue_bytes + self.group * cfg.factor_pitch
        return replace(self, rows=RowFactors(cfg, of_weight, tuple(found), shared, self.thread))

    @cute.jit
    def store_tile(self, acc: cute.Tensor, tile: WorkTile, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]):
        """Stores weight · activation(alpha · acc + bias) for columns ``begin`` to ``end`` of the tile."""
        cfg = self.config
        if cutlass.const_expr(cfg.fp8):
            self.rows.scale(acc, begin, end)
        self.shift(acc, begin, end)
        self.scale(acc, begin, end)
        if cutlass.const_expr(cfg.routed.biased):
            self.add_group_bias(acc, tile, begin, end)
        self.activate(acc, begin, end)
        if cutlass.const_expr(cfg.routed.weighted):
            self.rows.scale(acc, begin, end)
        self.store_columns(acc, tile, begin, end)

    def target(self, first: cute.Pointer, m: Int32, n: Int32) -> cute.Pointer:
        if not self.config.routed.added:
            return super().target(first, m, n)
        # the row of the token in the output, which has a row for each token
        row = self.routed.slots + cutlass.min(m, self.x_rows - 1)
        token = cute.make_tensor(row, cute.make_layout(1))[0] // self.routed.top
        return super().target(first, token, n)

    def put(self, target: cute.Pointer, vector: list[Uint32]) -> None:
        if self.config.routed.added:
            add_16bit_global(target.toint(), vector, self.config.out)
        else:
            super().put(target, vector)

    def scale(self, acc: cute.Tensor, begin: int, end: int) -> None:
        """Multiplies the sums of each product by its alpha."""
        count = len(self.factors)
        for i in range(begin // 2, end // 2):
            acc[i] = acc[i] * self.factors[i // 2 % count].alpha

    def activate(self, acc: cute.Tensor, begin: int, end: int) -> None:
        """Applies the activation of a single product, if there is one. ``join`` activates two products."""
        if self.config.routed.activation and not self.config.gate:
            for i in range(begin // 2, end // 2):
                acc[i] = activate(self.config.routed.activation, acc[i])

    def join(self, acc: cute.Tensor, begin: int, end: int) -> None:
        """Writes the activation of both products, which are already scaled, over the registers of the first."""
        cfg = self.config
        for i in range(begin // 2, end // 2, 4):
            for j in range(i, i + 2):
                acc[j] = activate(cfg.routed.activation or cfg.gate, acc[j], acc[j + 2], cfg.routed.constants)

    @cute.jit
    def add_group_bias(
        self, acc: cute.Tensor, tile: WorkTile, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]
    ):
        """Adds the bias of each row of the MMA. A thread has two rows, in a gated product one of each matrix."""
        biases = self.group_biases(tile) if self.biases is None else self.biases
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(begin // 8, end // 8):
                for j in cutlass.range_constexpr(2):
                    place = 4 * i + 2 * half + j
                    acc[place] = acc[place] + biases[half]

    @cute.jit
    def group_biases(self, tile: WorkTile):
        """The biases of the thread's two rows of the MMA; 0 beyond the last row."""
        rows = self.arguments.weight.rows
        row, found = self.first_row(tile) + self.thread % WARP // 4, []
        for half in cutlass.range_constexpr(2):
            n, at = self.bias_places(row, half)
            number = Float32(0.0)
            if n < rows:
                number = device_scalar(self.routed.bias + at)
            found.append(number)
        return tuple(found)

    def bias_places(self, row: Int32, half: int) -> tuple[Int32, Int32]:
        """The column of the output that a row of the MMA belongs to, and the index of its bias."""
        if self.config.gate:
            return row, row + half * self.arguments.weight.rows
        return row + 8 * half, row + 8 * half


class RoutedWgmma(GroupedWgmma):
    """The host function and the kernel of one ``GroupedWgmmaConfig`` of routed rows."""

    def wait_for_groups(self) -> None:
        """Waits for the launch before this one, which writes the maps or the rows, before anything is read or written.
        The second product then lets the combination start. The first lets no launch start: the GPU would place CTAs of
        the second product two by two on the SMs that are free by then, and other SMs would stay empty."""
        cute.arch.griddepcontrol_wait()
        if not self.config.gathered:
            cute.arch.griddepcontrol_launch_dependents()

    def loads_x(self, warp: Int32) -> cutlass.Boolean:
        return warp <= GATHER_THREADS // WARP if self.config.gathered else super().loads_x(warp)

    @property
    def loading_registers(self) -> int:
        """Registers of a loading thread. Threads that gather keep more addresses."""
        return 40 if self.config.gathered else 24

    @property
    def registers(self) -> int:
        # the MMA warps give up the registers that gathering threads need beyond 24
        each = (self.loading_registers - 24) // self.config.warpgroups
        return super().registers - (each + 7) // 8 * 8

    def load_x(
        self,
        x: TmaCopy | None,
        groups: PackedGroups,
        operands: OperandMemory,
        scheduler: GroupScheduler,
        workers: Int32,
        thread: Int32,
    ) -> None:
        """Runs the loop of the warps that load x."""
        if self.config.gathered:
            copies = GatheredX(self.order, groups, operands.sX.iterator.toint(), thread - WARP).copies
            fill_stages(copies, operands.ring, scheduler)
        else:
            super().load_x(x, groups, operands, scheduler, workers, thread)

    def epilogue(
        self,
        width: int,
        factors: tuple[Factor, ...],
        tile: GroupTile,
        shared: Int32,
        scheduler: GroupScheduler,
        *own: Any,
    ) -> RoutedEpilogue:
        """The epilogue of a work tile, with its slots and its group's bias."""
        made = super().epilogue(width, factors, tile, shared, scheduler, *own)
        groups, routed = scheduler.groups, scheduler.groups.arguments.routed
        slots = routed.slots + (groups.table.read("row", tile.group) + tile.x_row)
        bias = None
        if self.config.routed.biased:
            bias = routed.bias + Int64(tile.group) * (made.arguments.weight.rows * self.config.products)
        if self.config.routed.added:
            arguments = made.arguments._replace(out=groups.arguments.one.out)
            made = replace(made, arguments=arguments)
        fields = {name: getattr(made, name) for name in made.__dataclass_fields__}
        return RoutedEpilogue(**fields, routed=routed._replace(slots=slots, bias=bias))
