"""The layers that ``parallel.py`` times, on any device: products of a dense layer, and experts, over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from moe import Layer as MixtureLayer
from moe import Routing
from torch.nn.functional import linear

from cute_nvfp4 import BlockScaledTensor, gated_gemm, gemm, prepare_experts, prepare_weight, quantize
from cute_nvfp4.nn.expert_parallel import Exchange, ExpertParallel, Messages, shard_experts
from cute_nvfp4.ops.moe.experts import ActivationFunction
from cute_nvfp4.planning.packed import PackedPlan, PackedProblem, choose
from cute_nvfp4.prepared_weight import PreparedWeight
from cute_nvfp4.runtime.backend import resolve, sm_count
from cute_nvfp4.weight_shards import shard_columns, shard_rows

GLOBAL_SCALE = 2.0**-10
Product = Callable[..., torch.Tensor]
"""Maps rows to rows; ``out`` says where to put them."""
Add = Callable[[torch.Tensor], torch.Tensor]
"""Maps the rows of a rank to their sum over the ranks."""


class Dense(NamedTuple):
    """The sizes of a model's layer: qkv (q + 2 kv, hidden), o (hidden, q), gate and up (intermediate, hidden), down
    (hidden, intermediate)."""

    model: str
    hidden: int
    q: int
    kv: int
    intermediate: int

    @property
    def elements(self) -> int:
        """Elements of all weights."""
        return self.hidden * (2 * self.q + 2 * self.kv + 3 * self.intermediate)


DENSE = (Dense("Qwen3-32B", 5120, 8192, 1024, 25600), Dense("Llama-3.1-70B", 8192, 8192, 1024, 28672))
MIXTURES = (
    MixtureLayer("Qwen3-30B-A3B", 128, 8, 2048, 768),
    MixtureLayer("Qwen3-235B-A22B", 128, 8, 4096, 1536),
)
SMALL_DENSE = Dense("small", 256, 512, 128, 512)
SMALL_MIXTURE = MixtureLayer("small", 8, 2, 128, 128)


class Weights(NamedTuple):
    """The matrices of a dense layer in NVFP4: whole, or a rank's shard."""

    qkv: BlockScaledTensor
    o: BlockScaledTensor
    gate: BlockScaledTensor
    up: BlockScaledTensor
    down: BlockScaledTensor

    @classmethod
    def drawn(cls, shape: Dense, device: torch.device | str) -> Weights:
        """Draws the same normal values on every rank."""
        generator = torch.Generator(device).manual_seed(41)

        def one(n: int, k: int) -> BlockScaledTensor:
            x = torch.randn(n, k, dtype=torch.bfloat16, device=device, generator=generator)
            return quantize(x * k**-0.5, global_scale=GLOBAL_SCALE)

        h, q, kv, i = shape[1:]
        return cls(one(q + 2 * kv, h), one(h, q), one(i, h), one(i, h), one(h, i))

    def shard(self, shape: Dense, rank: int, ranks: int) -> Weights:
        """A rank's shard: columns of the results of qkv, gate and up; columns of o and down."""
        return Weights(
            shard_rows(self.qkv, rank, ranks, (shape.q, shape.kv, shape.kv)),
            shard_columns(self.o, rank, ranks),
            shard_rows(self.gate, rank, ranks),
            shard_rows(self.up, rank, ranks),
            shard_columns(self.down, rank, ranks),
        )


@dataclass(frozen=True)
class Products:
    """The four products of a layer; ``gated`` gives silu(gate) · up. q: how many columns attention would give. early:
    whether products start while the preceding launch still runs."""

    qkv: Product
    o: Product
    gated: Product
    down: Product
    q: int
    early: bool = False

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        """Rows that stand in for attention's result."""
        return self.qkv(x)[:, : self.q]

    def names(self) -> tuple[str, ...]:
        """The names of the products, in their order."""
        return "qkv", "o", "gated", "down"


def silu_mul(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up for [gate, up]: one Triton kernel on a GPU, as for the peers in ``gemm.py``."""
    if both.is_cuda:
        from gemm_triton import silu_mul as fused

        return fused(both)
    gate, up = both.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(both.dtype)


def w4a16(weights: Weights, q: int, early: bool = False) -> Products:
    """Products with prepared NVFP4 weights."""
    qkv, o, down = (prepare_weight(w) for w in (weights.qkv, weights.o, weights.down))
    both, plan = prepare_weight(weights.gate, weights.up), early_plan if early else lambda x, weight: None
    products = [
        lambda x, out=None, weight=weight: gemm(x, weight, out=out, config=plan(x, weight)) for weight in (qkv, o, down)
    ]
    gated = lambda x: gated_gemm(x, both, config=plan(x, both))  # noqa: E731
    return Products(products[0], products[1], gated, products[2], q, early)


def early_plan(x: torch.Tensor, weight: PreparedWeight) -> PackedPlan | None:
    """The planner's plan, changed to a kernel that may start while the preceding launch still runs; None for torch."""
    target = resolve("auto", x.device)
    if target.backend == "reference":
        return None
    problem = PackedProblem(m=len(x), n=weight.rows, k=weight.k, gate="silu" if weight.gated else "")
    return choose(problem, target.arch, sm_count(target, x.device)).early()


def bf16(weights: Weights, q: int) -> Products:
    """Products with the same values in bf16, by cuBLAS."""
    qkv, o, gate, up, down = (w.dequantize(torch.bfloat16) for w in weights)
    both = torch.cat((gate, up))

    def product(weight: torch.Tensor) -> Product:
        def run(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            return linear(x, weight) if out is None else torch.mm(x, weight.T, out=out)

        return run

    return Products(product(qkv), product(o), lambda x: silu_mul(linear(x, both)), product(down), q)


CONTESTANTS: dict[str, Callable[[Weights, int], Products]] = {
    "w4a16": w4a16,
    "w4a16 early": partial(w4a16, early=True),
    "bf16": bf16,
}


def whole(p: Products, x: torch.Tensor) -> torch.Tensor:
    """The layer on one GPU; with shards, a rank's part without any exchange."""
    return p.down(p.gated(p.o(p.attended(x))))


def all_reduced(y: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, in place."""
    dist.all_reduce(y)
    return y


def sharded(p: Products, x: torch.Tensor, add: Add = all_reduced) -> torch.Tensor:
    """The layer over the ranks: sums over them after o and after down."""
    return add(p.down(p.gated(add(p.o(p.attended(x))))))


def in_halves(p: Products, x: torch.Tensor, side: torch.cuda.Stream, add: Add = all_reduced) -> torch.Tensor:
    """``sharded`` for two halves of the rows, one after the other: the exchange of one half runs on the stream ``side``
    while the products of the other half run."""
    main, done = torch.cuda.current_stream(), []

    def summed(y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = add(y)
            done.append(torch.cuda.Event())
            done[-1].record(side)
        return y

    rows = [summed(p.o(p.attended(half))) for half in x.chunk(2)]
    found = []
    for half, event in zip(rows, list(done)):
        main.wait_event(event)
        found.append(summed(p.down(p.gated(half))))
    main.wait_stream(side)
    return torch.cat(found)


class LoadedSums:
    """Sums by torch's one-shot all-reduce: each rank loads the other ranks' terms from where their products wrote
    them."""

    def __init__(self, elements: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.buffer, self.group = symmetric.empty(elements, dtype=torch.bfloat16, device=device), dist.group.WORLD
        symmetric.rendezvous(self.buffer, self.group.group_name)

    def place(self, *shape: int) -> torch.Tensor:
        """A view of the buffer, for a product to write its result to."""
        return self.buffer[: torch.Size(shape).numel()].view(shape)

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of y over the ranks, a new tensor; y may be in ``place`` or elsewhere."""
        place, name = self.place(*y.shape), self.group.group_name
        if y.data_ptr() == place.data_ptr():
            return torch.ops.symm_mem.one_shot_all_reduce(place, "sum", name)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(place, y, "sum", name)


class CopiedSums:
    """Sums over two ranks by the copy engines: each rank copies its rows into the other's memory and adds what it
    receives.

    No multiprocessor moves data between the GPUs. Slots take turns, so that one barrier a call is enough; a CUDA graph
    has an even number of calls.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.slots, self.calls = symmetric.empty(2, elements, dtype=torch.bfloat16, device=device), 0
        self.handle = symmetric.rendezvous(self.slots, dist.group.WORLD.group_name)
        self.theirs = self.handle.get_buffer(1 - dist.get_rank(), (2, elements), torch.bfloat16)

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """The sum, in place."""
        slot, self.calls = self.calls % 2, self.calls + 1
        self.theirs[slot, : y.numel()].view(y.shape).copy_(y)
        self.handle.barrier(channel=0)
        return y.add_(self.slots[slot, : y.numel()].view(y.shape))


def by_peer_loads(p: Products, x: torch.Tensor, sums: LoadedSums) -> torch.Tensor:
    """``sharded``, with sums by loads of the peers' memory: products write their results where the peers read."""
    place = sums.place(*x.shape)
    y = sums(p.o(p.attended(x), out=place))
    return sums(p.down(p.gated(y), out=place))


class Mixture(NamedTuple):
    """A mixture of experts on one GPU and over the ranks, in the forms that are timed."""

    layer: MixtureLayer
    experts: Any
    over_ranks: dict[str, ExpertParallel]

    @classmethod
    def drawn(cls, layer: MixtureLayer, device: torch.device | str, rank: int, ranks: int) -> Mixture:
        """Draws the same experts on every rank; a rank multiplies only its own."""
        generator = torch.Generator(device).manual_seed(36)

        def stack(n: int, k: int) -> BlockScaledTensor:
            x = torch.randn(layer.experts * n, k, dtype=torch.bfloat16, device=device, generator=generator)
            x = quantize(x * k**-0.5, global_scale=GLOBAL_SCALE, scale_layout="rowmajor")
            return BlockScaledTensor(*(y.view(layer.experts, n, -1) for y in (x.data, x.scale)), x.global_scale)

        stacks = stack(2 * layer.inner, layer.hidden), stack(layer.hidden, layer.inner)
        experts = prepare_experts(*stacks)
        mine = shard_experts(experts, rank, ranks)
        calibrated = torch.tensor(2.0**-8, device=device)
        forms = {
            "rows in bf16": ExpertParallel(mine),
            "rows in NVFP4": ExpertParallel(mine, rows="nvfp4", global_scale=calibrated),
            "experts in bf16": WideExperts(mine, wide=tuple(_wide(s, rank, ranks) for s in stacks)),
        }
        return cls(layer, experts, forms)


def _wide(stack: BlockScaledTensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's experts of a stack in bf16, (E, K, N), as ``_grouped_mm`` takes them."""
    share = stack.batch // ranks
    mine = range(rank * share, (rank + 1) * share)
    one = [BlockScaledTensor(stack.data[e], stack.scale[e], stack.global_scale) for e in mine]
    return torch.stack([x.dequantize(torch.bfloat16) for x in one]).mT


@dataclass(frozen=True, eq=False)
class WideExperts(ExpertParallel):
    """The exchange of ``ExpertParallel`` with experts in bf16, by torch's operations and ``_grouped_mm``."""

    wide: tuple[torch.Tensor, ...] = ()

    def compute(self, messages: Messages, dtype: torch.dtype, top: int) -> torch.Tensor:
        words, hidden = messages.words, self.experts.hidden
        x = words[:, : hidden // 2].view(dtype)
        ids = words[:, hidden // 2 :][:, :top] - self.first
        weights = words[:, hidden // 2 + top :][:, :top].view(torch.float32)
        count = self.experts.count
        here = (ids >= 0) & (ids < count)
        order = torch.where(here, ids, count).flatten().argsort(stable=True)
        expert = torch.where(here, ids, count).flatten()[order]
        numbers = torch.arange(count, device=x.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, numbers, right=True).to(torch.int32)
        inner = ActivationFunction("silu")(torch._grouped_mm(x[order // top], self.wide[0], offs=ends))
        rows = torch._grouped_mm(inner, self.wide[1], offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        # rows without an expert on this rank hold arbitrary memory
        rows = torch.where(here[..., None], rows[back].view(*ids.shape, -1), 0)
        return (rows * weights[..., None]).sum(1).to(dtype)


def routing(layer: MixtureLayer, tokens: int, rank: int, ranks: int, device: torch.device | str) -> list[Routing]:
    """The rows and choices of all ranks, and those of this rank: ``tokens`` of each."""
    every = Routing.random(layer, tokens * ranks, False, str(device))
    mine = slice(rank * tokens, (rank + 1) * tokens)
    return [every, Routing(*(getattr(every, name)[mine].contiguous() for name in ("x", "ids", "weights")))]


def steps_of(form: ExpertParallel, mine: Routing, exchange: Exchange) -> dict[str, Callable[[], torch.Tensor]]:
    """The steps of an exchange, each alone: their inputs are made in advance."""
    top = mine.ids.shape[1]
    messages = form.dispatch(mine.x, mine.ids, mine.weights, exchange)
    results = form.compute(messages, mine.x.dtype, top)
    return {
        "there": lambda: form.dispatch(mine.x, mine.ids, mine.weights, exchange).words,
        "experts": lambda: form.compute(messages, mine.x.dtype, top),
        "back": lambda: form.combine(results, exchange, len(mine.x)),
    }


def distance(found: torch.Tensor, want: torch.Tensor) -> float:
    """The relative distance |difference| / |wanted|."""
    want = want.double()
    return float((found.double() - want).norm() / want.norm())
