"""``python benchmarks/clock_only.py sim …``: ``python -m cute_nvfp4 sim …`` without what takes long and changes no
time: the products of tcgen05, whose values nothing depends on in programs whose results are unused, and the replays of
``Timing.gains``. For tables of many launches; a test says that a launch takes the same time both ways."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cute_nvfp4.cli.main import app
from cute_nvfp4.sim.observe.timing import Timing
from cute_nvfp4.sim.tcgen05 import product

if __name__ == "__main__":
    product.execute = lambda wave, runs: None
    Timing.gains = lambda self: {}
    app(prog_name="cute-nvfp4")
