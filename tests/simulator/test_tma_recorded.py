"""Tensor copies, reductions and tensormap.replace of an NVIDIA H200, replayed: the same bytes, and a hazard where the
GPU faulted."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import tma_lab as lab
from ptx_lab import launch_kernel, module

from cute_nvfp4.errors import SimError
from cute_nvfp4.sim.tma import Im2col, TensorMap

_FILE = Path(__file__).parents[1] / "data" / "h200_tma.npz"
_TYPES = "u8 u16 u32 s32 u64 s64 f16 f32 f64 bf16 f32.ftz tf32 tf32.ftz".split()
_RECORD = np.load(_FILE)
_CASES = json.loads(bytes(_RECORD["cases"]))["cases"]
_LONG = 65536


def _groups() -> dict[str, list[int]]:
    out = defaultdict(list)
    for n, case in enumerate(_CASES):
        kind = case["kind"] + (" fault" if case["fault"] else "")
        if kind == "load":
            kind += " im2col" if "im2col" in case else f" {_TYPES[case['type']]}"
        out[kind].append(n)
    return dict(out)


def _map(case: dict, address: int = 0) -> TensorMap:
    rank, im = len(case["dims"]), case.get("im2col")
    return TensorMap(
        address=address + case.get("base", 0),
        type=_TYPES[case["type"]],
        dims=tuple(case["dims"]),
        strides=tuple(case["strides"]),
        box=(im["channels"],) if im else tuple(case["box"]),
        element_strides=tuple(case.get("estr", [1] * rank)),
        swizzle=("none", "32B", "64B", "128B")[case.get("swz", 0)],
        nan_fill=bool(case.get("oob", 0)),
        im2col=Im2col(tuple(im["lower"]), tuple(im["upper"]), im["channels"], im["pixels"]) if im else None,
    )


def _noise(count: int, seed: int) -> np.ndarray:
    return lab.aligned(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8).tobytes())


def _load(case: dict) -> np.ndarray:
    data = _noise(_LONG, 1)
    if "values" in case:
        data[:] = np.resize(np.array(case["values"], np.uint32).view(np.uint8), _LONG)
    return lab.load(_map(case), data, case["coords"], case.get("offs", ()), place=case.get("off", 0), tx=case["tx"])


def _store(n: int, case: dict) -> tuple[np.ndarray, np.ndarray | None]:
    """(memory after the store, what the GPU left or None)."""
    if f"{n}.before" in _RECORD:
        data, shared = lab.aligned(_RECORD[f"{n}.before"].tobytes()), lab.aligned(_RECORD[f"{n}.src"].tobytes())
        want = _RECORD[f"{n}.out"]
    else:
        data, shared = _noise(case.get("gbytes", 16384), 2), _noise(case.get("total", 8192), 3)
        want = data ^ _RECORD[f"{n}.change"] if f"{n}.change" in _RECORD else None
    mode, operation = case.get("mode", "tile"), case.get("op", "")
    lab.store(_map(case), data, shared, case["coords"], case.get("off", 0), operation, mode)
    return data, want


def _bulk_reduce(n: int, case: dict) -> np.ndarray:
    data, shared = lab.aligned(_RECORD[f"{n}.before"].tobytes()), lab.aligned(_RECORD[f"{n}.src"].tobytes())
    body = f"""
    {lab._FILL.format(source="%p1", value="ld.global.b32 %r8, [%rd6];")}
    fence.proxy.async; bar.sync 0; @%q1 bra E;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.{case["op"]} [%p0], [%r4], %s1;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    E:
    """
    scalars = [bytes(4), len(data).to_bytes(4, "little")]
    launch_kernel(module(body, 2, lab._DECLARE % len(data), scalars=2), [data, shared], scalars, block=(128, 1, 1))
    return data


def _replace(n: int, case: dict) -> np.ndarray:
    found = lab.aligned(_map(case).encode())
    body = f"""
    mov.u32 %r3, %tid.x; mov.u32 %r4, sm; shl.b32 %r6, %r3, 2; cvt.u64.u32 %rd6, %r6; add.s64 %rd7, %rd6, %p0;
    ld.global.b32 %r8, [%rd7]; add.u32 %r7, %r4, %r6; st.shared.b32 [%r7], %r8; bar.warp.sync -1;
    mov.u32 %r9, 0x1234; mov.u64 %rd9, 0x123456789AB0; setp.ne.u32 %q1, %r3, 0; @%q1 bra X;
    tensormap.replace.{case["ins"]};
    X: bar.warp.sync -1; ld.shared.b32 %r8, [%r7]; st.global.b32 [%rd7], %r8;
    """
    launch_kernel(module(body, 1, ".shared .align 128 .b8 sm[128];"), [found])
    return found.view("u8")[:8]


_GROUPS = _groups()


@pytest.mark.parametrize("group", _GROUPS)
def test_replay(group):
    wrong = []
    for n in _GROUPS[group]:
        case = _CASES[n]
        if case["fault"]:
            with pytest.raises(SimError) as caught:
                _load(case) if case["kind"] == "load" else _store(n, case)
            if case["fault"] == "misaligned address":
                assert "not a multiple" in str(caught.value)
            continue
        words = np.frombuffer(_map(case).encode(), np.uint64)[:8] if "dims" in case else None
        if words is not None:
            recorded = _RECORD[f"{n}.map"].copy()
            recorded[1] &= ~np.uint64(3 << 17)
            assert words.tolist() == recorded.tolist(), case
        if case["kind"] == "load":
            got, want = _load(case), _RECORD[f"{n}.out"]
        elif case["kind"] == "store":
            got, want = _store(n, case)
        elif case["kind"] == "bulkred":
            got, want = _bulk_reduce(n, case), _RECORD[f"{n}.out"]
        elif case["kind"] == "replace":
            got, want = _replace(n, case), _RECORD[f"{n}.out"]
        else:
            continue
        if not np.array_equal(got, want):
            at = np.flatnonzero(got != want)
            wrong.append((n, {k: v for k, v in case.items() if k != "values"}, len(at), int(at[0])))
    assert not wrong


def test_what_is_recorded():
    """The recording covers what it is meant to."""
    assert len(_CASES) >= 440 and {"encode", "load fault", "store fault", "bulkred", "replace"} <= set(_GROUPS)


def test_the_recorder_records_these_cases():
    sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
    from tma_cases import all_cases

    cases = [case | ({"pairs": 1} if "pairs" in case else {}) for case in all_cases()]
    assert cases == [{k: v for k, v in case.items() if k != "fault"} for case in _CASES]
