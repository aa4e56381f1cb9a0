"""The long run: all that is too much for the default suite, in a random order, for as long as there is time.

    python -m tests.long [--minutes N] [--resume LEDGER] [--only FAMILY …] [--archs ARCH …] [--jobs N]
    python -m tests.long --case FAMILY CASE       runs one case, as the command of a failure says it
    python -m tests.long --merge LEDGER …         adds the records of another machine
    python -m tests.long --summary [--write]      summarizes a ledger, or writes it into benchmarks/records/long_run.md

``families`` are kinds of cases, each case plain data; ``order`` mixes them; ``ledger`` records what ran; ``worker``
runs a case in a separate process, which may hang or die; ``shrink`` finds the smallest case that fails in the same way.
"""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS.parent)]
