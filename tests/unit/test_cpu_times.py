"""CPU seconds of tests: what is counted, and how it is told."""

from __future__ import annotations

import subprocess
import sys

from support import cpu_times

BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint('ready', flush=True)\ninput()"


def test_processes_count_while_they_run_and_afterwards() -> None:
    before = cpu_times.spent()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        running = cpu_times.spent() - before
        child.communicate(b"\n")
    # the system counts in hundredths
    assert running > 0.25 and cpu_times.spent() - before > running - 0.02


def test_a_report_begins_with_the_dearest() -> None:
    said = cpu_times.report(["0.5\ta.py::one\n", "60\tb.py::two\n", "0.25\ta.py::one\n"]).splitlines()
    assert said[0] == "1.0 CPU minutes in 2 rows"
    assert said[2:4] == ["    60.0 s  b.py", "     0.8 s  a.py"] and said[6].endswith("a.py::one")
