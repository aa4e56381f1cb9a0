"""Processes over gloo, forked from one that has imported torch: a rank each."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.forked import _context


def ranks(work: Callable[..., None], *arguments: Any, count: int = 2, seconds: float = 120) -> None:
    """Runs ``work(rank, *arguments)`` in ``count`` processes of one group; raises unless all of them end well.

    work: a function of a module that can be imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "store", count, list(sys.path), work, arguments
        context = _context()
        processes = [context.Process(target=_rank, args=(rank, *given)) for rank in range(count)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(seconds)
        for process in processes:
            if process.exitcode is None:
                process.kill()
    codes = [process.exitcode for process in processes]
    assert not any(codes), f"exit codes of the ranks: {codes}"


def _rank(
    rank: int, store: Path, count: int, path: list[str], work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """What the process of a rank does."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        work(rank, *arguments)
    finally:
        dist.destroy_process_group()
