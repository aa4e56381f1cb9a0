"""Records the results of the kernels in ``async_kernels`` on a GPU of compute capability 9.0, bit for bit.

    python tests/gpu/record_async.py --out tests/data/h200_async.npz [--matrix tests/data/h200_wgmma.npz]

It needs the CUDA driver and numpy, and nothing of the package. Every case runs twice, at different addresses. A case
whose two runs differ, or that contradicts the PTX ISA where that defines the result, is reported and not recorded. A
kernel that traps or never ends kills its process: another process then continues with the next case.
"""

from __future__ import annotations

import argparse
import datetime
import pickle
import platform
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from async_kernels import all_cases, matrix_cases
from async_kernels.case import Case
from async_kernels.descriptor import encode, sweep
from async_kernels.device import Device, DriverError
from async_kernels.recording import Writer, describe, masked

PATIENCE = 60.0
"""Seconds without progress after which a process is killed."""


def work(cases: list[Case], first: int, out: Path) -> None:
    """Runs the cases from ``first`` on, and writes a file for each."""
    device = Device()
    for i, case in enumerate(cases[first:], first):
        print(i, flush=True)
        result: dict = {}
        try:
            function = device.kernel(case)
            result["maps"] = [[m.hex(), address] for m, address in device.maps(case, device.place(case))]
            after = masked(case, device.run(case, function))
            again = masked(case, device.run(case, function, 1 << 20))
            result["after"] = after
            unsteady = sum(int((a != b).sum()) for a, b in zip(after, again))
            if unsteady and case.compare != "opaque":
                result["error"] = f"two runs differ in {unsteady} bytes"
        except DriverError as error:
            result["error"] = str(error)
        (out / f"{i}.pickle").write_bytes(pickle.dumps(result))
        # illegal addresses and instructions, traps and similar errors end the context
        if "cuCtxSynchronize" in result.get("error", "") or "cuMemcpy" in result.get("error", ""):
            sys.exit(3)
    print("done", flush=True)


def supervise(kind: str, count: int, out: Path) -> None:
    """Starts workers until every case has run."""
    first = 0
    while first < count:
        command = [sys.executable, __file__, "--worker", kind, "--first", str(first), "--out", str(out)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        last = first
        timer = threading.Timer(PATIENCE, process.kill)
        timer.start()
        for line in process.stdout:
            timer.cancel()
            if line.strip() == "done":
                process.wait()
                return
            last = int(line)
            timer = threading.Timer(PATIENCE, process.kill)
            timer.start()
        timer.cancel()
        code = process.wait()
        if not (out / f"{last}.pickle").exists():
            (out / f"{last}.pickle").write_bytes(pickle.dumps({"error": f"the process ended with {code}"}))
        first = last + 1


def judge(case: Case, after: list[np.ndarray]) -> str:
    """What is wrong with the result by the ISA; empty if nothing is wrong or nothing is defined."""
    if case.expected is None:
        return ""
    wrong = {}
    for i, known in case.expected([b.copy() for b in case.buffers]).items():
        n = int((after[i] != known).sum()) if len(after[i]) == len(known) else -1
        if n:
            first = int(np.flatnonzero(after[i] != known)[0])
            wrong[i] = f"{n} bytes of {len(known)}, first at {first}: {after[i][first]:#x} for {known[first]:#x}"
    return str(wrong) if wrong else ""


def collect(kind: str, path: Path, about: dict, descriptors: list[list]) -> None:
    """Runs and saves one set of cases, and prints their outcomes."""
    cases = matrix_cases() if kind == "matrix" else all_cases()
    with tempfile.TemporaryDirectory() as folder:
        supervise(kind, len(cases), Path(folder))
        results = [pickle.loads((Path(folder) / f"{i}.pickle").read_bytes()) for i in range(len(cases))]
    writer, table, refused = Writer(), {}, []
    for case, result in zip(cases, results):
        row = table.setdefault(case.family, [0, 0, 0, 0])
        row[0] += 1
        if case.compare == "refused" and "cuCtxSynchronize" in result.get("error", ""):
            row[1] += 1
            case.notes["error"] = result["error"]
            writer.add(case, case.buffers, result["maps"])
            continue
        if case.compare == "refused":
            result["error"] = f"not refused: {result.get('error')}"
        if "error" in result:
            row[3] += 1
            refused.append([case.name, result["error"]])
            continue
        row[1] += 1
        problem = judge(case, result["after"])
        row[2] += case.expected is not None and not problem
        if problem:
            print("NOT AS THE ISA SAYS", case.name, problem)
            case.notes["differs"] = problem
        writer.add(case, result["after"], result["maps"])
    writer.save(path, about | {"refused": refused}, descriptors)
    for name, error in refused:
        print("NOT RECORDED", name, error[:300])
    print(f"{'family':12} {'cases':>6} {'recorded':>9} {'= closed form':>14} {'refused':>8}")
    for family, row in table.items():
        print(f"{family:12} {row[0]:6} {row[1]:9} {row[2]:14} {row[3]:8}")
    print(f"{len(writer.entries)} launches, {path.stat().st_size} bytes: {path}")


def record_descriptors(device: Device) -> list[list]:
    """The driver's descriptors for a sweep of parameters, compared with ours."""
    found, wrong = [], 0
    for spec, address in sweep():
        try:
            data, code = device.encode(spec, address), 0
        except DriverError as error:
            data, code = b"", error.code
        found.append(describe(spec, address, code, data))
        if not code and data != encode(spec, address):
            wrong += 1
            ours, words = np.frombuffer(encode(spec, address), np.uint64), np.frombuffer(data, np.uint64)
            different = [f"w{i} {w:#x} not {o:#x}" for i, (w, o) in enumerate(zip(words, ours)) if w != o]
            print("DESCRIPTOR differs", spec, hex(address), *different)
    refused = sum(code != 0 for _, _, code, _ in found)
    print(f"{len(found)} descriptors, {refused} refused, {wrong} not as we encode them")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--matrix", type=Path)
    parser.add_argument("--worker", choices=("all", "matrix"))
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.worker:
        work(matrix_cases() if arguments.worker == "matrix" else all_cases(), arguments.first, arguments.out)
        return
    device = Device()
    about = device.about() | {"python": platform.python_version(), "numpy": np.__version__}
    about["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    smi = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True)
    about["driver"] = smi.stdout.decode().strip()
    print(about)
    collect("all", arguments.out, about, record_descriptors(device))
    if arguments.matrix:
        collect("matrix", arguments.matrix, about, [])


if __name__ == "__main__":
    main()
