"""The pipelines of a kernel as a graph: an edge joins the role that fills a buffer with the role that empties it.

Each edge has a ring of buffers and two mbarriers for each: *full*, on which the consumer waits, and *empty*, on which
the producer waits. How many arrivals complete a phase is derived here from the configuration, term by term, and nowhere
else; the kernel initialises its barriers from this graph, and a test counts the arrivals of simulated runs against it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import explain
from .config import CTA_ROWS, GemmConfig
from .sm100.warp_roles import ROLES

MAX_ARRIVALS = (1 << 20) - 1
"""Largest count, and largest number of bytes under way, of an mbarrier (PTX ISA, "mbarrier")."""


@dataclass(frozen=True)
class Arrivals:
    """What completes one phase of a barrier: arrivals, as named terms, and bytes that asynchronous copies bring."""

    terms: tuple[tuple[str, int], ...]
    tx_bytes: int = 0

    @property
    def count(self) -> int:
        return sum(n for _, n in self.terms)

    def __str__(self) -> str:
        text = " + ".join(f"{n} ({what})" for what, n in self.terms)
        return f"{text} = {self.count}" + (f", {self.tx_bytes} bytes" if self.tx_bytes else "")


@dataclass(frozen=True)
class Edge:
    """``stages`` buffers between two roles. ``stages`` 0: as many as the operands have."""

    name: str
    producer: str
    consumer: str
    stages: int
    full: Arrivals
    empty: Arrivals


def pipeline_graph(config: GemmConfig) -> tuple[Edge, ...]:
    """The edges of the kernel of ``config``.

    operands: loads → MMA. *full* lies in the CTA that issues the MMAs (the even one of a pair): its loader announces
    the bytes of every CTA of the MMA. *empty* lies in every CTA: the loader fills a stage with data for all CTAs that
    read it by multicast, so all MMAs of its row and of its column of the cluster must have done with it.

    accumulators: MMA → epilogue. *full* lies in every CTA, one commit each; *empty* in the CTA that issues the MMAs,
    where every epilogue warp of the MMA's CTAs arrives.

    partials (split_k): epilogue → epilogue of another CTA along K, by st.async.
    """
    from .sm100.memory_plan import StagePlan, TensorPlan

    m, n = config.cluster[0] // config.ctas, config.cluster[1]
    empty = [("MMAs that read this CTA's part of A, along N", n)]
    if m > 1:
        empty += [("MMAs that read its part of B, along M, but its own", m - 1)]
    warps = config.ctas * ROLES.epilogue
    edges = [
        Edge(
            "operands",
            "load",
            "mma",
            0,
            Arrivals((("the loader, which announces the bytes", 1),), config.ctas * StagePlan(config).loaded),
            Arrivals(tuple(empty)),
        ),
        Edge(
            "accumulators",
            "mma",
            "epilogue",
            TensorPlan(config).acc_stages,
            Arrivals((("the commit after a tile's last MMA", 1),)),
            Arrivals(((f"epilogue warps of {config.ctas} CTA(s)", warps),)),
        ),
    ]
    if config.split_k > 1:
        others = config.split_k - 1
        received = others * config.products * CTA_ROWS * config.slice_n * 4
        edges.append(
            Edge(
                "partials",
                "epilogue",
                "epilogue",
                1,
                Arrivals((("the thread that announces the bytes", 1),), received),
                Arrivals(((f"epilogue warps of {others} other CTA(s) along K", others * ROLES.epilogue),)),
            )
        )
    for edge in edges:
        _check(edge)
    return tuple(edges)


def _check(edge: Edge) -> None:
    for what, arrivals in (("full", edge.full), ("empty", edge.empty)):
        if not 1 <= arrivals.count <= MAX_ARRIVALS or arrivals.tx_bytes > MAX_ARRIVALS:
            raise ValueError(
                explain(f"{what} barrier of {edge.name}", got=str(arrivals), expected=f"1 to {MAX_ARRIVALS} of each")
            )


def edge_of(config: GemmConfig, name: str) -> Edge:
    """The edge called ``name``."""
    return next(edge for edge in pipeline_graph(config) if edge.name == name)


def barrier_words(config: GemmConfig, stages: int) -> int:
    """mbarriers of all edges, 8 bytes each, with ``stages`` stages of operands."""
    return sum(2 * (edge.stages or stages) for edge in pipeline_graph(config))


def barrier_offsets(config: GemmConfig, stages: int) -> dict[str, tuple[int, int]]:
    """Index of the first *full* and the first *empty* barrier of each edge."""
    offsets, next_word = {}, 0
    for edge in pipeline_graph(config):
        depth = edge.stages or stages
        offsets[edge.name] = next_word, next_word + depth
        next_word += 2 * depth
    return offsets
