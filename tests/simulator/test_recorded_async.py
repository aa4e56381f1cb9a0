"""The simulator gives what an H200 gave, bit for bit, for everything that sm_90a shares with the asynchronous machine.

``tests/gpu/record_async.py`` made the recordings from the kernels in ``tests/gpu/async_kernels``; a case is replayed
from the PTX, the tensor maps and the memory that the GPU was given. What does not replay is listed with the reason.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cute_nvfp4.errors import SimError
from cute_nvfp4.sim import MbarrierMisuse, Race, Schedule, UnsupportedInstruction
from cute_nvfp4.sim.tma.descriptor import InvalidTensorMap
from cute_nvfp4.sim.tma.descriptor import TensorMap as Decoded

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

from async_kernels.case import Case
from async_kernels.descriptor import KINDS, encode
from async_kernels.recording import Recording, replay
from async_kernels.ulps import far_apart

DATA = Path(__file__).parents[1] / "data"
ASYNC, MATRIX = "h200_async.npz", "h200_wgmma.npz"

#: what differs from the GPU, or is not modelled yet, and why
DIFFERENCES: dict[str, str] = {}


@cache
def load(name: str) -> Recording:
    return Recording(DATA / name)


def numbers(name: str) -> list:
    """One parameter a case, named as it is."""
    found = []
    for i, case in enumerate(load(name).cases):
        why = DIFFERENCES.get(case.name)
        wrong = (AssertionError, UnsupportedInstruction)
        marks = [pytest.mark.xfail(reason=why, strict=True, raises=wrong)] if why else []
        found.append(pytest.param(i, id=case.name.replace(" ", "-"), marks=marks))
    return found


def check(recording: Recording, i: int, **options) -> None:
    """Replays one case and compares every buffer."""
    case = recording.cases[i]
    if case.compare == "refused":
        with pytest.raises(SimError):
            replay(case, recording.maps[i], **options)
        return
    found = replay(case, recording.maps[i], **options)
    if case.compare == "opaque":
        return
    if case.compare == "approximate":
        for number in range(len(case.notes["results"])):
            apart = far_apart(case, found[number], recording.after[i][number])
            assert not apart, f"{case.name}: {apart}"
        return
    wrong = {j: int((a != b).sum()) for j, (a, b) in enumerate(zip(found, recording.after[i]))}
    assert not any(wrong.values()), f"{case.name}: bytes of each buffer that differ from the GPU's: {wrong}"


@pytest.mark.sweep(4)
@pytest.mark.parametrize("i", numbers(ASYNC))
def test_replay(i: int) -> None:
    check(load(ASYNC), i)


def check_matrix(recording: Recording, i: int) -> None:
    """wgmma: sums of floats too are the GPU's to the bit, and the checks have nothing to say."""
    case = replace(recording.cases[i], compare="exact")
    found = replay(case, recording.maps[i], checks=True)
    assert all((a == b).all() for a, b in zip(found, recording.after[i]))


@pytest.mark.parametrize("i", numbers(MATRIX))
def test_replay_matrix(i: int) -> None:
    check_matrix(load(MATRIX), i)


_ENGINES = ("tile_load", "tile_store", "im2col", "map_edit", "bulk", "cluster", "mbarrier", "cp_async", "barrier")


#: a try_wait that may fail is a result of these
_MAY_FAIL = ("mbarrier parities of nine phases", "mbarrier forms")


@pytest.mark.parametrize("policy", ("eager", "random"))
@pytest.mark.parametrize("family", _ENGINES)
def test_other_schedules(family: str, policy: str) -> None:
    """The results do not depend on when engines work and warps run. (A lazy engine outlasts the patience of these
    kernels, which trap after some thousand tries of a wait.)"""
    recording, engines = load(ASYNC), dict.fromkeys(("tma", "store", "copy"), policy)
    schedule = Schedule(seed=1, warps="random" if policy == "random" else "together", **engines)
    left_out = {*DIFFERENCES, *(_MAY_FAIL if policy == "random" else ())}
    names = [i for i, c in enumerate(recording.cases) if c.family == family and c.name not in left_out]
    for i in names[:: 5 if len(names) > 10 else 1]:
        check(recording, i, schedule=schedule)


#: kernels with a hazard
HAZARDS = {
    "cluster barrier.cluster forms": Race,  # a relaxed arrive orders nothing, although it did on the GPU
    "mbarrier raw words": MbarrierMisuse,  # reads the memory of a live barrier
}


def checked_cases() -> list:
    found = []
    for i, case in enumerate(load(ASYNC).cases):
        if case.family in (*_ENGINES, "matrix", "warp", "control") and case.name not in DIFFERENCES:
            found.append(pytest.param(i, id=case.name.replace(" ", "-")))
    return found


@pytest.mark.sweep(4)
@pytest.mark.parametrize("i", checked_cases())
def test_no_hazards(i: int) -> None:
    """The checks have nothing to say of kernels that are right, and do not change what they compute."""
    case, hazard = load(ASYNC).cases[i], HAZARDS.get(load(ASYNC).cases[i].name)
    if hazard is None:
        check(load(ASYNC), i, checks=True)
        return
    with pytest.raises(hazard):
        replay(case, load(ASYNC).maps[i], checks=True)


def test_what_was_recorded() -> None:
    """A real device, every family, and few enough bytes; no recorded case contradicts what the ISA says."""
    for name, least in ((ASYNC, 600), (MATRIX, 30)):
        recording = load(name)
        assert recording.about["device"] == "NVIDIA H200" and recording.about["capability"] == [9, 0]
        assert len(recording.cases) >= least and not recording.about["refused"]
        assert not [case.name for case in recording.cases if "differs" in case.notes]
        assert (DATA / name).stat().st_size < 500_000
    count = Counter(case.family for case in load(ASYNC).cases)
    assert {f: n for f, n in count.items() if f in _ENGINES} == {
        **{"tile_load": 91, "tile_store": 39, "im2col": 10, "map_edit": 61, "bulk": 31, "cluster": 39},
        **{"mbarrier": 10, "cp_async": 2, "barrier": 2},
    }
    assert set(DIFFERENCES) <= {case.name for case in load(ASYNC).cases}


_SWIZZLES = ("none", "32B", "64B", "128B")


def test_descriptors() -> None:
    """The driver's descriptors are read as what they were made of, and made again byte for byte."""
    read = 0
    for spec, address, code, data in load(ASYNC).descriptors:
        if code:
            continue
        assert data == encode(spec, address), f"{spec} at {address:#x}"
        if spec.interleave:
            with pytest.raises(InvalidTensorMap):
                Decoded.decode(data)
            continue
        found = Decoded.decode(data)
        kind = spec.kind.replace("_", ".")
        assert (found.address, found.type, found.dims, found.strides) == (address, kind, spec.dims, spec.strides)
        assert (found.box, found.element_strides, found.swizzle) == (spec.box, spec.steps, _SWIZZLES[spec.swizzle])
        assert found.nan_fill == bool(spec.fill) and found.bits == KINDS[spec.kind][1]
        # L2 promotion and the driver's own notes apart
        words, ours = (np.frombuffer(b, np.uint64)[:8].copy() for b in (data, found.encode()))
        words[1] &= ~np.uint64(3 << 17)
        assert (words == ours).all(), f"{spec} at {address:#x}"
        read += 1
    assert read >= 150


# --- that the comparison compares


def some_case(name: str) -> int:
    return next(i for i, case in enumerate(load(ASYNC).cases) if case.name == name)


@pytest.mark.parametrize("name", ("tile_load places swizzle 3", "cluster remote arrive", "approximate ex2.approx.f32"))
def test_one_wrong_result_is_noticed(name: str) -> None:
    recording, i = load(ASYNC), some_case(name)
    after = [a.copy() for a in recording.after[i]]
    after[0][99] ^= 64
    changed = Recording.__new__(Recording)
    changed.cases, changed.maps, changed.after = [recording.cases[i]], [recording.maps[i]], [after]
    with pytest.raises(AssertionError, match=name.split()[1]):
        check(changed, 0)


@pytest.mark.parametrize(
    "name, old, new",
    (
        ("tile_load places swizzle 3", "{16, 2}", "{24, 2}"),
        ("cluster st.async b32", "add.u32 %r93, %r90, 1", "add.u32 %r93, %r90, 2"),
        ("bulk store groups", "[%d1], [%r1], 720", "[%d1], [%r1], 704"),
        ("matrix ldmatrix x4 trans", ".trans", ""),
    ),
)
def test_another_kernel_is_noticed(name: str, old: str, new: str) -> None:
    recording, i = load(ASYNC), some_case(name)
    case: Case = recording.cases[i]
    assert old in case.ptx
    changed = Recording.__new__(Recording)
    changed.cases = [replace(case, ptx=case.ptx.replace(old, new))]
    changed.maps, changed.after = [recording.maps[i]], [recording.after[i]]
    with pytest.raises(AssertionError, match="differ"):
        check(changed, 0)


def test_another_tensor_map_is_noticed() -> None:
    recording, i = load(ASYNC), some_case("tile_load places swizzle 3")
    raw = bytearray.fromhex(recording.maps[i][0][0])
    # one element less in dimension 0
    raw[32] ^= 1
    changed = Recording.__new__(Recording)
    changed.cases, changed.after = [recording.cases[i]], [recording.after[i]]
    changed.maps = [[[raw.hex(), recording.maps[i][0][1]]]]
    with pytest.raises(AssertionError, match="differ"):
        check(changed, 0)
