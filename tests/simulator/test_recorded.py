"""The simulator gives what a GPU gave, bit for bit: launches recorded on the GPU, executed again from their PTX.

``tests/gpu/record_gemv.py`` makes the recordings. One that is listed here and missing is a failure.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.recordings import Recording, replay, tensor_bytes

from cute_nvfp4 import gemv
from cute_nvfp4.operand import BlockScaledTensor

DATA = Path(__file__).parents[1] / "data"
# file names in tests/data
RECORDINGS: tuple[str, ...] = ("h200_gemv.npz",)
HOW = "record it on the GPU: python tests/gpu/record_gemv.py --out tests/data/NAME"

recorded = pytest.mark.parametrize("name", RECORDINGS or [pytest.param("", marks=pytest.mark.skip(f"none yet; {HOW}"))])


@cache
def load(name: str) -> Recording:
    path = DATA / name
    assert path.exists(), f"tests/data/{name} is missing; {HOW}"
    return Recording(path)


def differences(found: np.ndarray, expected: np.ndarray) -> int:
    return int((found != expected).sum())


def check_replay(recording: Recording) -> None:
    """Every launch, from the PTX that the GPU ran."""
    wrong = {e.name: n for e in recording.entries if (n := differences(replay(recording, e), recording.after(e)))}
    assert not wrong, f"bytes of the output that are not what {recording.about['device']} gave: {wrong}"


def check_current_kernel(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """gemv() as it is now, compiled here, on the recorded operands."""
    wrong = {}
    for entry in recording.entries:
        if entry.notes["kind"] != "gemv":
            continue
        monkeypatch.setenv("CUTE_NVFP4_ARCH", entry.arch)
        tensors = dict(zip((t.name for t in entry.tensors), recording.tensors(entry)))
        a, b = (BlockScaledTensor(tensors[x], tensors[f"sf{x}"], tensors.get(f"{x}_global")) for x in ("a", "b"))
        gemv(a, b, alpha=entry.notes["alpha"], out=tensors["c"])
        n = differences(tensor_bytes(tensors["c"]), recording.after(entry))
        if n:
            wrong[entry.name] = n
    how = "if the order of its sums was changed on purpose, " + HOW
    assert not wrong, f"bytes in which gemv() and {recording.about['device']} differ: {wrong}; {how}"


@recorded
def test_recorded_launches(name: str) -> None:
    check_replay(load(name))


@pytest.mark.slow
@recorded
def test_current_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_current_kernel(load(name), monkeypatch)


@recorded
def test_what_was_recorded(name: str) -> None:
    """A real device, enough problems of both output widths, and few enough bytes."""
    recording = load(name)
    assert recording.about["capability"] == [9, 0] and recording.about["sm_count"] > 0
    kinds = [entry.notes["kind"] for entry in recording.entries]
    assert kinds.count("gemv") >= 10 and kinds.count("ptx") >= 10
    assert {e.output.dtype for e in recording.entries if e.notes["kind"] == "gemv"} >= {"float16", "float32"}
    assert (DATA / name).stat().st_size < 300_000


def test_every_recording_is_listed() -> None:
    assert sorted(path.name for path in DATA.glob("h200_gemv*.npz")) == sorted(RECORDINGS)


# --- the machinery, on a recording of the simulator


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
    import record_gemv

    path = tmp_path_factory.mktemp("recording") / "sim.npz"
    record_gemv.record(path, "sim", "sm_90a")
    assert path.stat().st_size < 300_000
    return Recording(path)


def test_a_dry_run_replays(dry_run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    check_replay(dry_run)
    check_current_kernel(dry_run, monkeypatch)


def test_one_wrong_bit_is_noticed(dry_run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = dry_run.entries[0]
    after = dry_run.after(entry)
    after[17] ^= 1
    try:
        message = rf"not what simulator gave: \{{'{re.escape(entry.name)}': 1\}}"
        with pytest.raises(AssertionError, match=message):
            check_replay(dry_run)
        with pytest.raises(AssertionError, match=r"gemv\(\) and simulator differ: .*: 1\}; if the order"):
            check_current_kernel(dry_run, monkeypatch)
    finally:
        after[17] ^= 1


def test_another_ptx_is_noticed(dry_run: Recording) -> None:
    """Replaying executes the PTX it is given: another table of magnitudes, another result."""
    entry = dry_run.entries[0]
    ptx = dry_run.ptx[entry.ptx_sha256]
    changed = ptx.replace(str(0x03020100), str(0x02020100))
    assert changed != ptx
    assert differences(replay(dry_run, entry, ptx), dry_run.after(entry)) == 0
    assert differences(replay(dry_run, entry, changed), dry_run.after(entry)) > 128
