"""Sums over GPUs by stores into one another's memory: the kernel's compiled PTX on memory of several ranks.

One rank's kernel runs after the other in the simulator, so what the later ranks send the first is written before; or
both run in one launch, and wait for each other.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.driver import CUstream
from support.mutants import LAST, at, drop, instead, outcome

from cute_nvfp4 import simulating
from cute_nvfp4.errors import OperandError
from cute_nvfp4.kernels.peers.config import SLOTS, PeerSumArguments, PeerSumConfig, can_implement
from cute_nvfp4.kernels.peers.sum import PeerSum
from cute_nvfp4.ops.peer_sum import KERNEL, PeerMemory, empty_memory, peer_sum
from cute_nvfp4.runtime.backend import resolve
from cute_nvfp4.runtime.kernel import Kernel
from cute_nvfp4.runtime.signature import INT32, Scalar
from cute_nvfp4.sim import adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels("sm_90a", "sm_100a", "sm_120a"), pytest.mark.sim_only("memory of several GPUs")]

ELEMENTS, CTAS = 3 * 1024 * 8 + 64, 2
"""More vectors than threads, and no whole number of turns."""


class Ranks:
    """Memory of all ranks, and sums over them, one after the other."""

    def __init__(self, ranks: int = 2, dtype: torch.dtype = torch.bfloat16, early: bool = False) -> None:
        self.ranks, self.dtype, self.calls = ranks, dtype, 0
        received = tuple(empty_memory(ELEMENTS, ranks, lambda *s: torch.zeros(*s, dtype=dtype)) for _ in range(ranks))
        states = [torch.zeros(CTAS, 2, dtype=torch.int32) for _ in range(ranks)]
        self.memory = [PeerMemory(received, rank, states[rank], early) for rank in range(ranks)]

    def rows(self, count: int) -> list[torch.Tensor]:
        """Rows of each rank: full range, infinities, NaN, and the word that means nothing has come."""
        generator = torch.Generator().manual_seed(self.calls)
        made = torch.randint(-(2**15), 2**15, (self.ranks, count), dtype=torch.int16, generator=generator)
        made[:, 2:4] = -1
        return list(made.view(self.dtype))

    def right(self, counts: tuple[int, ...]) -> bool:
        """Whether calls with so many elements give every rank the sums, and leave memory as the next calls need it."""
        good = True
        for count in counts:
            rows, slot = self.rows(count), self.calls % SLOTS
            for sender in range(1, self.ranks):
                sent = rows[sender].view(torch.int32)
                # as the kernel sends it: not the word that means nothing has come
                sent = torch.where(sent == -1, 0x7FFF7FFF, sent).view(self.dtype)
                for receiver in range(sender):
                    self.memory[0].received[receiver][slot, sender, :count] = sent
            found = [peer_sum(y, memory) for y, memory in zip(rows, self.memory)]
            total = rows[0].float()
            for y in rows[1:]:
                total = total + y.float()
            good &= all(torch.equal(x.nan_to_num(), total.to(self.dtype).nan_to_num()) for x in found)
            good &= all(torch.equal(x.isnan(), total.to(self.dtype).isnan()) for x in found)
            self.calls += 1
        return good and self.emptied(count)

    def emptied(self, count: int) -> bool:
        """Whether nothing is left of the calls but the last one's rows, of ``count`` elements."""
        last = (self.calls - 1) % SLOTS
        for rank, memory in enumerate(self.memory):
            words = memory.received[rank].view(torch.int32) == -1
            others = [r for r in range(self.ranks) if r != rank]
            if words[last, others, : count // 2].any() or not words[last, others, count // 2 :].all():
                return False
            if not words[[s for s in range(SLOTS) if s != last]].all():
                return False
        return True


COUNTS = (ELEMENTS, 8, 512, ELEMENTS - 8, 64, 8, ELEMENTS)


@pytest.mark.parametrize(
    "ranks, dtype, early", [(2, torch.bfloat16, False), (2, torch.float16, True), (3, torch.bfloat16, True)]
)
def test_every_rank_has_the_sum(ranks: int, dtype: torch.dtype, early: bool) -> None:
    """Slots take turns, with other sizes in each call."""
    with simulating("sm_90a", checks=True):
        assert Ranks(ranks, dtype, early).right(COUNTS)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_other_architectures(arch: str) -> None:
    with simulating(arch, checks=True):
        assert Ranks().right((64, 512))


def test_traced() -> None:
    """A compiled function has it as one operator."""
    ranks = Ranks()
    (first, second), memory = ranks.rows(64), ranks.memory[0]
    memory.received[0][0, 1, :64] = second.nan_to_num()

    def added(y: torch.Tensor) -> torch.Tensor:
        return peer_sum(y + 0, memory) * 1

    with simulating("sm_90a"):
        found = torch.compile(added, fullgraph=True, backend="aot_eager")(first.nan_to_num())
    assert torch.equal(found, (first.nan_to_num().float() + second.nan_to_num().float()).bfloat16())


MUTANTS = (
    ("rows are not sent", at("st.relaxed.sys", drop())),
    ("received memory is not emptied", at("st.global.v4", drop(), LAST)),
    ("the word for nothing is sent", at("selp.b32", instead("mov.b32 {0}, {2};"), slice(1, 2))),
    ("the slots do not take turns", at("st.global.v2", drop())),
)


@pytest.mark.parametrize("name, change", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name: str, change) -> None:
    assert outcome(change, lambda: Ranks().right((512, 64, 512, 64)), "sm_90a") not in ("", None)


def test_a_rank_waits_for_ever_where_nothing_comes() -> None:
    """In the simulator that is an error."""
    y, ranks = torch.ones(64, dtype=torch.bfloat16), Ranks()
    assert outcome(None, lambda: peer_sum(y, ranks.memory[0]) is not None, "sm_90a") == "Deadlock"


# --- two ranks in one launch


class TogetherArguments(NamedTuple):
    one: PeerSumArguments = PeerSumArguments()
    other: PeerSumArguments = PeerSumArguments()
    ctas: Scalar = INT32


class Together:
    """The kernels of two ranks in one launch: CTAs along y are of the second."""

    def __init__(self, config: PeerSumConfig) -> None:
        self.config = config
        self.parts = [PeerSum(PeerSumConfig(rank=rank, threads=config.threads, arch=config.arch)) for rank in range(2)]

    @cute.jit
    def __call__(self, arguments: TogetherArguments, stream: CUstream):
        passed = TogetherArguments(arguments.one._replace(ctas=None), arguments.other._replace(ctas=None), None)
        self.kernel(passed).launch(grid=(arguments.ctas, 2, 1), block=(self.config.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, arguments: TogetherArguments):
        thread, _, _ = cute.arch.thread_idx()
        cta, rank, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        if rank == 0:
            self.parts[0].add(arguments.one, thread, cta, ctas)
        else:
            self.parts[1].add(arguments.other, thread, cta, ctas)


TOGETHER = Kernel("peer_sums_together", TogetherArguments, Together, can_implement)


@pytest.mark.parametrize("schedule", adversarial(3), ids=str)
def test_two_ranks_at_once(schedule) -> None:
    """Under any order of CTAs and warps, and without a race."""
    ranks, config = Ranks(), PeerSumConfig(threads=64, arch=ARCHITECTURES["sm_90a"])
    with simulating("sm_90a", checks=True, schedule=schedule):
        for count in (1024, 64, 1024, 2048):
            rows = ranks.rows(count)
            outs = [torch.full_like(rows[0], float("nan")) for _ in range(2)]
            run_together(ranks, config, rows, outs)
            want = (rows[0].float() + rows[1].float()).bfloat16()
            for out in outs:
                assert torch.equal(out.nan_to_num(), want.nan_to_num()) and torch.equal(out.isnan(), want.isnan())
            ranks.calls += 1
        assert ranks.emptied(2048)


def run_together(ranks: Ranks, config: PeerSumConfig, rows: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
    """One launch of both ranks."""
    received = ranks.memory[0].received
    each = [
        PeerSumArguments(
            y=y.data_ptr(),
            out=out.data_ptr(),
            received=tuple(x.data_ptr() for x in received),
            state=memory.state.data_ptr(),
            part_bytes=received[0].stride(1) * 2,
            vectors=y.numel() // 8,
            ctas=CTAS,
        )
        for y, out, memory in zip(rows, outs, ranks.memory)
    ]
    touched = {f"received {r}": (x, True) for r, x in enumerate(received)}
    for r in range(2):
        touched |= {f"y {r}": (rows[r], False), f"out {r}": (outs[r], True), f"s {r}": (ranks.memory[r].state, True)}
    target, device = resolve("auto", "cpu"), torch.device("cpu")
    TOGETHER.run(config, target, device, TogetherArguments(*each, CTAS), lambda: touched)


def test_limits_are_named() -> None:
    for options, words in (({"ranks": 9}, "2 to 8"), ({"rank": 2}, "2 and 2"), ({"dtype": "float32"}, "float16")):
        with pytest.raises(OperandError, match=words):
            KERNEL.compile(PeerSumConfig(**options))
