"""The long run: what is too much for the default suite, in a random order, for as long as there is time.

    python -m tests.long [--minutes N] [--resume LEDGER] [--only FAMILY …] [--archs ARCH …] [--jobs N]
    python -m tests.long --case FAMILY CASE       one case, as a failure's command says it
    python -m tests.long --merge LEDGER …         adds what another machine has run
    python -m tests.long --summary [--write]      what a ledger holds, or that into benchmarks/records/long_run.md

``families`` are kinds of cases, plain data each; ``order`` mixes them; ``ledger`` is what was run; ``worker`` runs a
case in a process of its own, which may hang or die; ``shrink`` looks for the smallest case that fails in the same way.
"""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS.parent)]
