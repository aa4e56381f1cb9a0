"""The pipelines of a kernel as a graph: an edge joins the role that fills a buffer with the role that empties it.

Each edge has a ring of buffers, and two mbarriers for each buffer: the consumer waits on *full*, the producer on
*empty*. This module derives the arrivals that complete a phase from the configuration, term by term, and no other does.
The kernel initialises its barriers from the graph, and a test counts the arrivals of simulated runs against it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import explain
from .config import CTA_ROWS, GemmConfig

MAX_ARRIVALS = (1 << 20) - 1
"""Largest arrive count, and largest number of pending bytes, of an mbarrier (PTX ISA, "mbarrier")."""


@dataclass(frozen=True)
class Arrivals:
    """What completes one phase of a barrier: arrivals as named terms, and bytes that asynchronous copies bring."""

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
    """``stages`` buffers between two roles. empty: None where each buffer is filled once, and no producer waits."""

    name: str
    producer: str
    consumer: str
    stages: int
    full: Arrivals
    empty: Arrivals | None

    @property
    def barriers(self) -> int:
        """mbarriers of all stages."""
        return self.stages * (1 if self.empty is None else 2)

    @property
    def arrivals(self) -> dict[str, Arrivals]:
        """What completes a phase of each kind of barrier, "full" and "empty"."""
        return {"full": self.full} | ({} if self.empty is None else {"empty": self.empty})


@dataclass(frozen=True)
class Rings:
    """The buffers, as an architecture's plan of memory sizes them.

    stages: of operands; stage_bytes: bytes that arrive in one CTA for a stage; acc_stages: of accumulators;
    epilogue_warps: warps of one CTA.
    """

    stages: int
    stage_bytes: int
    acc_stages: int
    epilogue_warps: int


def pipeline_graph(config: GemmConfig, rings: Rings) -> tuple[Edge, ...]:
    """The edges of the kernel of ``config``.

    operands: loads → MMA. *full* lies in the CTA that issues the MMAs (the even one of a pair); its loader announces
    the bytes of all CTAs of the MMA. *empty* lies in every CTA: by multicast, a loader fills a stage for all CTAs that
    read it, so that all MMAs of its row and of its column of the cluster must have finished with the stage.

    accumulators: MMA → epilogue. *full* lies in every CTA and counts one commit; *empty* lies in the CTA that issues
    the MMAs, where every epilogue warp of the MMA's CTAs arrives.

    partials (split_k): epilogue → epilogue of another CTA along K, by st.async.
    """
    m, n = config.cluster[0] // config.ctas, config.cluster[1]
    empty = [("MMAs that read this CTA's part of A, along N", n)]
    if m > 1:
        empty += [("MMAs that read its part of B, along M, but its own", m - 1)]
    warps = config.ctas * rings.epilogue_warps
    edges = [
        Edge(
            "operands",
            "load",
            "mma",
            rings.stages,
            Arrivals((("the loader, which announces the bytes", 1),), config.ctas * rings.stage_bytes),
            Arrivals(tuple(empty)),
        ),
        Edge(
            "accumulators",
            "mma",
            "epilogue",
            rings.acc_stages,
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
                Arrivals(((f"epilogue warps of {others} other CTA(s) along K", others * rings.epilogue_warps),)),
            )
        )
    return checked(edges)


def checked(edges: list[Edge]) -> tuple[Edge, ...]:
    """The graph of ``edges``. Raises ValueError for an arrive count that an mbarrier cannot hold."""
    for edge in edges:
        _check(edge)
    return tuple(edges)


def _check(edge: Edge) -> None:
    for what, arrivals in edge.arrivals.items():
        if not 1 <= arrivals.count <= MAX_ARRIVALS or arrivals.tx_bytes > MAX_ARRIVALS:
            expected = f"1 to {MAX_ARRIVALS} of each"
            raise ValueError(explain(f"{what} barrier of {edge.name}", got=str(arrivals), expected=expected))


def barrier_words(graph: tuple[Edge, ...]) -> int:
    """The number of mbarriers of all edges, of 8 bytes each."""
    return sum(edge.barriers for edge in graph)


def first_barriers(graph: tuple[Edge, ...]) -> dict[str, int]:
    """The index of each edge's first barrier; an edge has its *full* barriers, then its *empty* ones."""
    return {edge.name: barrier_words(graph[:i]) for i, edge in enumerate(graph)}
