"""Runs ranks over gloo, each in a process that is forked from one that has already imported torch."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.forked import _context


def ranks(work: Callable[..., None], *arguments: Any, count: int = 2, seconds: float = 120) -> None:
    """Runs ``work(rank, *arguments)`` in ``count`` processes of one group; raises AssertionError unless all end with 0.

    work: a function of an importable module; the process that forks the ranks imports it once.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "store", count, list(sys.path), work, arguments
        process = _context().Process(target=_all, args=(Path(folder) / "codes", seconds, given))
        process.start()
        process.join(seconds + 30)
        if process.exitcode is None:
            process.kill()
        codes = (Path(folder) / "codes").read_text() if process.exitcode == 0 else f"none, but {process.exitcode}"
    assert codes == str([0] * count), f"exit codes of the ranks: {codes}"


def _all(codes: Path, seconds: float, given: tuple) -> None:
    """Forks the ranks, and writes their exit codes."""
    processes = [multiprocessing.get_context("fork").Process(target=_rank, args=(r, *given)) for r in range(given[1])]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    codes.write_text(str([process.exitcode for process in processes]))
    for process in processes:
        if process.exitcode is None:
            process.kill()


def _rank(
    rank: int, store: Path, count: int, path: list[str], work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Runs in the process of a rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        work(rank, *arguments)
    finally:
        dist.destroy_process_group()
