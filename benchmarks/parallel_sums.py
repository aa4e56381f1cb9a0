"""Times sums over two GPUs by themselves, by size: ``python benchmarks/parallel_sums.py``.

The terms are rows of bfloat16, 8 KiB to 64 MiB. The ways: an all-reduce by NCCL under each of ``SETTINGS``, loads of
the peer's memory in one kernel of torch, stores into it in one kernel of this package (``PeerSums``), and copies by the
copy engines with an addition (``parallel.py``). CUDA graphs, L2 cold, medians of the slower GPU. A table comes last.

Exit codes: 0 done, 1 a result is wrong or a process failed, 2 fewer than two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from common import machine, results_path, write
from parallel_layers import Add, CopiedSums, LoadedSums, all_reduced
from parallel_ranks import Rank, run

from cute_nvfp4.nn import PeerSums

KIB = tuple(2**n for n in range(3, 17))
"""Sizes of a rank's rows."""
SETTINGS = {"NCCL": {}, "NCCL, LL128": {"NCCL_PROTO": "LL128"}, "NCCL, 32 CTAs": {"NCCL_MIN_CTAS": "32"}}
"""Environment variables of the processes, by the name of the setting."""


def sums(r: Rank, options: argparse.Namespace) -> None:
    """Measures one setting, and adds it to the file."""
    path, first = options.output, options.setting == options.settings[0]
    record = json.loads(path.read_text()) if path.exists() and not first else None
    record = record or machine() | {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "us": {}}
    loaded = LoadedSums(max(KIB) * 512, r.device) if first else None
    pushed = PeerSums(max(KIB) * 512, device=r.device) if first else None
    copied = CopiedSums(max(KIB) * 512, r.device) if first else None
    for kib in KIB:
        zeros = torch.zeros(kib * 512, dtype=torch.bfloat16, device=r.device)
        forms: dict[str, Add] = {options.setting: all_reduced}
        if first:
            # CopiedSums needs an even number of calls
            forms |= {"peer loads": loaded, "peer stores": pushed, "copy engine": lambda y: copied(copied(y))}
        for name, add in forms.items():
            found = add(zeros + 1.0 + r.rank)
            if not r.agreed(bool((found == (6.0 if name == "copy engine" else 3.0)).all())):
                raise AssertionError(f"{name}, {kib} KiB: a wrong sum")
        # a product would write its result where the peer loads it from
        given = dict.fromkeys(forms, zeros) | ({"peer loads": loaded.place(kib * 512)} if first else {})
        calls = {name: r.captured(lambda add=add, y=given[name]: add(y)) for name, add in forms.items()}
        times = r.times(calls)
        if first:
            times["copy engine"] = round(times["copy engine"] / 2, 2)
        for name, us in times.items():
            record["us"].setdefault(name, {})[str(kib)] = us
        r.say(f"{kib:6} KiB  " + "  ".join(f"{name} {us:.1f}" for name, us in times.items()))
        if not r.rank:
            write(record, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/parallel_sums_<gpu>.json")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=tuple(SETTINGS), help="NCCL's")
    parser.add_argument("--seconds", type=float, default=60, help="time limit of the processes of a setting")
    options = parser.parse_args()
    options.smoke, options.quick, options.contestants = False, False, ()
    if options.output is None and torch.cuda.is_available():
        options.output = results_path("parallel_sums")
    for name in options.settings:
        options.setting, variables = name, SETTINGS[name]
        os.environ.update(variables)
        code = run(sums, options)
        for variable in variables:
            del os.environ[variable]
        if code:
            return code
    print(table(json.loads(options.output.read_text())), f"record: {options.output}", sep="\n")
    return 0


def table(record: dict) -> str:
    """Microseconds by size, one line each."""
    lines = ["    KiB  " + "  ".join(f"{name:>14}" for name in record["us"])]
    for kib in map(str, KIB):
        lines.append(f"{kib:>7}  " + "  ".join(f"{of[kib]:14.1f}" for of in record["us"].values()))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
