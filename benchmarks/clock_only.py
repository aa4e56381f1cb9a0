"""Runs ``python -m cute_nvfp4 sim …`` without the products of tcgen05: ``python benchmarks/clock_only.py sim …``.

The products take long and change no time where no time depends on a value and nobody reads the results. With ``bare``
before ``sim`` it also skips the replays of ``Timing.gains``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cute_nvfp4.cli.main import app
from cute_nvfp4.sim.observe.timing import Timing
from cute_nvfp4.sim.tcgen05 import product

if __name__ == "__main__":
    product.execute = lambda wave, runs: None
    if sys.argv[1:2] == ["bare"]:
        del sys.argv[1]
        Timing.gains = lambda self: {}
    app(prog_name="cute-nvfp4")
