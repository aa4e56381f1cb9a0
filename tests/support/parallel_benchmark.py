"""Runs ``benchmarks/parallel.py`` over processes without a GPU, with stand-ins for graphs and clocks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import parallel
from common import Captured
from parallel_layers import SMALL_DENSE, SMALL_MIXTURE

MACHINE = {"gpu": "NVIDIA H0", "date": "2000-01-01", "driver": "0", "versions": {"torch": "0", "cuda": "0"}}


class Rank(parallel.Rank):
    """A rank on the CPU. A graph writes its first result again; every time is a different number."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 1, smoke=True)
        self.smoke = False

    def captured(self, call: Callable[[], torch.Tensor]) -> Captured:
        result = call()
        first = result.clone()
        return Captured(SimpleNamespace(replay=lambda: result.copy_(first)), result, call)

    def times(self, calls: Mapping[str, Captured | None]) -> dict[str, float]:
        return {name: 10.0 + i for i, name in enumerate(calls)}


def grouped_mm(x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torch's grouped product; rows outside all groups are NaN, as uninitialized memory may be."""
    out = torch.full((len(x), weights.shape[-1]), float("nan"), dtype=x.dtype)
    for e, (a, b) in enumerate(pairwise([0, *offs.tolist()])):
        out[a:b] = x[a:b] @ weights[e]
    return out


@torch.inference_mode()
def measured(rank: int, path: Path) -> None:
    """Writes a record of small layers, as a rank of an existing group."""
    options = parallel.parse(["--rows", "2", "5", "--tokens", "3", "--output", str(path)])
    options.models = [SMALL_DENSE.model]
    stand_ins = {
        "machine": lambda: dict(MACHINE),
        "copy_bandwidth": lambda: 1e12,
        "capture": lambda call, mode: Captured(None, call(), call),
        "DENSE": (SMALL_DENSE,),
        "MIXTURES": (SMALL_MIXTURE,),
        "REPLAYS": 2,
    }
    with mock.patch.multiple(parallel, **stand_ins), mock.patch("torch.cuda.nccl.version", lambda: (2, 0, 0)):
        with mock.patch("torch._grouped_mm", grouped_mm):
            parallel.measure(Rank(rank), options)
    dist.barrier()
