"""Paths of submissions and of a test file, which the tests of the runner and of the command line share."""

from __future__ import annotations

from pathlib import Path

CHEATS = Path(__file__).parents[1] / "cheats"
HONEST = CHEATS / "submissions" / "honest.py"
KERNEL = Path(__file__).parent / "own_kernels" / "gemv_shared.py"
ZEROS = CHEATS / "submissions" / "zeros.py"
TINY = CHEATS / "tiny.yml"
