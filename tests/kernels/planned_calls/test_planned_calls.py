"""Calls that were planned before: right numbers with other tensors, nothing planned anew, and never a wrong plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import fused_problems, gated_gemm_problems, gemm_problems, gemv_problems, grouped_problems
from support.gated_gemm_problems import Gated
from support.grouped_problems import Grouped

import cute_nvfp4 as nv
from cute_nvfp4 import simulating
from cute_nvfp4.ops.gated_gemm import GATED as GATED_GEMM
from cute_nvfp4.ops.gemm import GEMM as PLAIN_GEMM
from cute_nvfp4.ops.gemv import GEMV as PLAIN_GEMV
from cute_nvfp4.ops.grouped_gemm import GROUPED as GROUPED_GEMM
from cute_nvfp4.ops.grouped_gemm_contiguous import CONTIGUOUS
from cute_nvfp4.ops.prepared_weight.gemm import PREPARED_GEMM
from cute_nvfp4.ops.quantize import QUANTIZE
from cute_nvfp4.ops.rmsnorm_quantize import RMSNORM
from cute_nvfp4.ops.silu_mul_quantize import SILU_MUL
from cute_nvfp4.runtime import launch
from cute_nvfp4.runtime.kernel import Kernel

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from launch import without_driver

PLANS = {
    "gemv": PLAIN_GEMV.calls,
    "gemm": PLAIN_GEMM.calls,
    "packed_gemm": PREPARED_GEMM.calls,
    "gated_gemm": GATED_GEMM.calls,
    "grouped_gemm": GROUPED_GEMM.calls,
    "grouped_gemm_contiguous": CONTIGUOUS.calls,
    "quantize": QUANTIZE.calls,
    "rmsnorm_quantize": RMSNORM.calls,
    "silu_mul_quantize": SILU_MUL.calls,
}
GEMV = gemv_problems.Case(20, 64)
GEMM = gemm_problems.Case(20, 24, 64, batch=0, alpha=1.0)
GATED = Gated(gemm_problems.Case(20, 32, 64, batch=0, alpha=gated_gemm_problems.usual_alpha(64)))
GROUPED = Grouped(((3, 8, 64), (2, 8, 64)))
DEALT = Grouped(((3, 8, 64), (2, 8, 64)), True, after=1)
X = {"shape": (8, 64), "dtype": torch.float32}


@pytest.fixture(params=PLANS)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """An operation, with nothing planned."""
    calls = PLANS[request.param]
    kept = dict(calls)
    calls.clear()
    # nothing else multiplies a prepared weight
    with simulating("sm_90a") if request.param == "packed_gemm" else contextlib.nullcontext():
        yield request.param
    calls.clear()
    calls.update(kept)


# (name, what is another plan): changes to the case; seed: other numbers of the same kind
OTHERS: dict[str, list[dict[str, Any]]] = {
    "gemv": [
        *({"m": 33}, {"k": 128}, {"batch": 2}, {"batch": 0}, {"a_layout": "rowmajor"}, {"dtype": torch.bfloat16}),
        *({"out": "contiguous"}, {"out": "strided"}, {"pitch": 32}, {"alignment": 8}, {"a_global": 0.5}),
    ],
    "gemm": [
        *({"m": 21}, {"n": 32}, {"k": 96}, {"batch": 2}, {"out": "strided"}, {"pitch": 32}, {"workers": 1}),
        *({"batch": 2, "repeat_b": True}, {"a_global": 0.5}, {"out": "sliced"}),
    ],
    "packed_gemm": [
        *({"m": 17}, {"n": 72}, {"k": 384}, {"pitch": 8}, {"out": torch.float32}, {"out_pitch": 4}, {"bias": True}),
        *({"factor": True}, {"alpha": torch.tensor(0.5)}, {"dtype": torch.float16}, {"quantized": True}),
    ],
    "gated_gemm": [{"m": 21}, {"out": "strided"}, {"gate": "relu"}],
    "grouped_gemm": [
        *({"sizes": ((3, 8, 64), (5, 8, 64))}, {"sizes": ((3, 8, 64), (0, 8, 64))}, {"out": "strided"}),
        *({"alphas": "one"}, {"alphas": "each"}),
    ],
    "grouped_gemm_contiguous": [
        *({"sizes": ((3, 8, 64), (2, 8, 64), (1, 8, 64))}, {"after": 2}, {"alphas": "each"}, {"alphas": "one"}),
    ],
    "quantize": [
        *({"shape": (9, 64)}, {"shape": (8, 96)}, {"shape": (2, 8, 64)}, {"dtype": torch.float16}),
        *({"offset": 4}, {"pitch": 4}, {"global_scale": 0.02}, {"global_scale": torch.tensor(0.02)}),
        *(
            {"rounding": "stochastic", "generator": 3},
            {"transpose": True, "shape": (32, 8)},
            {"axis": 0, "shape": (32, 8)},
        ),
    ],
    "rmsnorm_quantize": [
        *({"shape": (9, 64)}, {"shape": (8, 96)}, {"dtype": torch.bfloat16}, {"other": True}, {"weight": False}),
        *({"offset": 4}, {"offset": 1}, {"pitch": 4}, {"eps": 0.5}, {"global_scale": None}, {"format": "mxfp8"}),
        {"scale_layout": "rowmajor"},
    ],
    "silu_mul_quantize": [
        *({"shape": (9, 64)}, {"shape": (8, 96)}, {"dtype": torch.bfloat16}, {"other": False}, {"offset": 1}),
        *({"other": False, "pitch": 1}, {"global_scale": None}, {"rule": "four_six_mse"}),
    ],
}
# numbers that are no part of a plan
NUMBERS: dict[str, list[dict[str, Any]]] = {
    "gemv": [{"alpha": 0.5}],
    "gemm": [{"alpha": 0.5}],
    "packed_gemm": [{"alpha": 0.25}],
    "gated_gemm": [{"alpha": GATED.case.alpha / 2}],
    "grouped_gemm": [],
    "grouped_gemm_contiguous": [{"sizes": ((1, 8, 64), (4, 8, 64))}],
    "quantize": [],
    "rmsnorm_quantize": [{"scale": 0.02}],
    "silu_mul_quantize": [{"scale": 0.02}],
}


def run(name: str, seed: int = 0, **changes: Any) -> None:
    """One call of ``name``, of which every number is right."""
    if name == "gemv":
        problem = gemv_problems.make(replace(GEMV, seed=seed, **changes))
        gemv_problems.check(problem, problem.run())
    elif name == "gemm":
        problem = gemm_problems.make(replace(GEMM, seed=seed, **changes))
        gemm_problems.check(problem, problem.run())
    elif name == "gated_gemm":
        outer = {k: changes.pop(k) for k in ("gate", "form") if k in changes}
        problem = gated_gemm_problems.make(replace(GATED, case=replace(GATED.case, seed=2 * seed, **changes), **outer))
        problem.check(problem.run())
    elif name == "quantize":
        _quantize(seed, **changes)
    elif name == "packed_gemm":
        _packed(seed, **changes)
    elif name in FUSED:
        _fused(name, seed, **changes)
    else:
        problem = grouped_problems.make(replace(GROUPED if name == "grouped_gemm" else DEALT, seed=seed, **changes))
        problem.check(problem.run())


def _matrix(seed: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int, pitch: int) -> torch.Tensor:
    """Normal numbers, ``offset`` elements after the start of their memory, rows ``pitch`` apart."""
    *rows, k = shape
    generator = torch.Generator().manual_seed(seed)
    room = torch.randn(math.prod(rows) * (k + pitch) + offset, generator=generator).to(dtype)
    return room[offset:].view(*rows, k + pitch)[..., :k]


FUSED = ("rmsnorm_quantize", "silu_mul_quantize")


def _fused(
    name: str,
    seed: int,
    offset: int = 0,
    pitch: int = 0,
    other: bool | None = None,
    weight: bool = True,
    scale: float = 0.01,
    **options: Any,
) -> None:
    """other: whether there is a residual, or ``up`` in a tensor of its own."""
    given = {**X, "global_scale": None if options.get("format") else torch.tensor(scale), **options}
    shape, dtype = given.pop("shape"), given.pop("dtype")
    x, second = (_matrix(seed + 10 * i, shape, dtype, offset, pitch) for i in (0, 1))
    if name == "rmsnorm_quantize":
        factor = _matrix(seed + 20, shape[1:], dtype, 0, 0) if weight else None
        fused_problems.check_rmsnorm(x, factor, second if other else None, **given)
    else:
        fused_problems.check_silu_mul(x, None if other is False else second, **given)


def _quantize(seed: int, offset: int = 0, pitch: int = 0, **options: Any) -> None:
    given = {**X, **options}
    x = _matrix(seed, given.pop("shape"), given.pop("dtype"), offset, pitch)
    if given.get("rounding") == "stochastic":
        given["generator"] += seed
    got, want = nv.quantize(x, backend="sim", **given), nv.quantize(x, backend="reference", **given)
    assert got.data.equal(want.data) and got.scale.equal(want.scale)
    if want.global_scale is not None:
        assert float(got.global_scale) == float(want.global_scale)


def _packed(
    seed: int,
    m: int = 3,
    n: int = 64,
    k: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    quantized: bool = False,
    pitch: int = 0,
    out: torch.dtype = torch.bfloat16,
    out_pitch: int = 0,
    bias: bool = False,
    factor: bool = False,
    alpha: Any = 0.5,
) -> None:
    """pitch, out_pitch: elements between rows of x and of out. factor: the weight has a global scale."""
    weight = nv.quantize(
        _matrix(seed, (n, k), torch.float32, 0, 0), global_scale=torch.tensor(0.01), backend="reference"
    )
    weight = replace(weight, global_scale=weight.global_scale if factor else None)
    x = _matrix(seed + 1, (m, k), dtype, 0, pitch)
    x = nv.quantize(x, global_scale=None, backend="reference") if quantized else x
    numbers = torch.arange(n).float() if bias else None
    got = torch.zeros(m, n + out_pitch, dtype=out)[:, :n]
    packed = nv.prepare_weight(weight, dtype=torch.float16 if quantized else dtype, backend="reference")
    nv.gemm(x, packed, alpha=alpha, bias=numbers, out=got)
    wide = x.dequantize(torch.float64) if quantized else x.double()
    want = wide @ weight.dequantize(torch.float64).t() * float(alpha) + (0 if numbers is None else numbers)
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-3 * float(want.abs().max()))


@pytest.fixture
def planned() -> Iterator[list[str]]:
    """The kernels that were planned so far."""
    names: list[str] = []
    launcher = Kernel.launcher

    def counted(self: Kernel, *args: Any, **options: Any) -> Any:
        names.append(self.name)
        return launcher(self, *args, **options)

    with mock.patch.object(Kernel, "launcher", counted):
        yield names


def test_the_same_kind_is_planned_once(name: str, planned: list[str]) -> None:
    run(name)
    first, calls = list(planned), dict(PLANS[name])
    # exact torch, which some numbers are compared with, is kept, too
    assert first and sum(not isinstance(call, functools.partial) for call in calls.values()) == 1
    run(name, seed=1)
    for changes in NUMBERS[name]:
        run(name, seed=2, **changes)
    assert planned == first and dict(PLANS[name]) == calls


def test_another_kind_is_another_plan(name: str, planned: list[str]) -> None:
    """Each is right after the others, and so is the first kind after each."""
    calls = PLANS[name]
    run(name)
    for changes in OTHERS[name]:
        before = len(calls)
        run(name, **changes)
        assert len(calls) > before, changes
    run(name, seed=1)
    count, plans = len(calls), len(planned)
    for i, changes in enumerate(OTHERS[name]):
        if i % 4 == 0:
            run(name, seed=3, **changes)
    assert (len(calls), len(planned)) == (count, plans)


def test_another_architecture_is_another_plan() -> None:
    archs = []
    for arch in ("sm_100a", "sm_90a", "sm_103a", "sm_100a"):
        with simulating(arch) as runs:
            run("gemv")
            run("quantize", global_scale=0.02)
        archs.append([x.kernel.arch for x in runs])
    assert archs == [[arch] * 2 for arch in ("sm_100a", "sm_90a", "sm_103a", "sm_100a")]


def test_exact_torch_is_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = gemv_problems.make(GEMV)
    with simulating() as runs:
        for backend in ("sim", "reference", "auto"):
            nv.gemv(problem.a, problem.b, backend=backend)
    assert len(runs) == 2


def test_a_replaced_kernel_is_left_with_its_block(name: str) -> None:
    """What runs instead runs within the block only; its own host code is planned for."""
    asked: list[str] = []

    def other(kernel: Any) -> Any:
        asked.append(kernel.name)
        return dataclasses.replace(kernel, name=f"other {kernel.name}", host_ir=kernel.host_ir + "\n")

    options = {"global_scale": 0.02} if name == "quantize" else {}
    run(name, **options)
    with simulating(kernel=other) as runs:
        run(name, **options)
        run(name, seed=1, **options)
    assert len(asked) == 1 and {x.kernel.name for x in runs} == {f"other {asked[0]}"}
    with simulating() as runs:
        run(name, **options)
    assert {x.kernel.name for x in runs} == set(asked)


# --- threads

THREADS, TURNS = 3, 60


@contextlib.contextmanager
def recording(note: Callable[[launch.driver.PackedLaunch], Any]) -> Iterator[list[Any]]:
    """Calls are planned as on a GPU, and the driver notes something of each launch; torch's stream is the thread."""
    made: list[Any] = []
    seen: list[Any] = []

    class Kept(launch.driver.PackedLaunch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    def entry(*arguments: Any) -> int:
        (one,) = [x for x in made if x.arguments == arguments]
        # the driver lets others run while it reads
        time.sleep(1e-6)
        seen.append(note(one))
        return 0

    PLAIN_GEMV.calls.clear()
    with (
        without_driver("sm_100a"),
        mock.patch.object(launch.driver, "PackedLaunch", Kept),
        mock.patch.object(launch.driver, "launch_function", lambda: entry),
        mock.patch.object(launch, "raw_stream", lambda device: threading.get_ident()),
    ):
        yield seen
    PLAIN_GEMV.calls.clear()


def in_threads(call: Callable[[int], object]) -> None:
    """Makes calls from several threads, which take turns as often as they can."""
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda i=i: [call(i) for _ in range(TURNS)]) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)


def test_threads_do_not_mix_values() -> None:
    """Parameters are kept between calls: what the driver gets is one call's, whoever calls at the same time."""
    problems = [gemv_problems.make(replace(GEMV, seed=i, a_global=0.5)) for i in range(THREADS)]
    outs = [torch.empty(1, 20) for _ in problems]
    wanted = [
        (*(x.data_ptr() for x in (p.a.data, p.a.scale, p.b.data, p.b.scale, out)), p.a.global_scale.data_ptr(), i + 0.5)
        for i, (p, out) in enumerate(zip(problems, outs))
    ]

    whose: dict[int, int] = {}

    def call(i: int) -> None:
        whose[threading.get_ident()] = i
        nv.gemv(problems[i].a, problems[i].b, out=outs[i], alpha=i + 0.5)

    with recording(lambda packed: (id(packed), whose[threading.get_ident()], bytes(packed.buffer.raw))) as seen:
        # planned in a thread, which does not see the simulator of these tests
        first = threading.Thread(target=call, args=(0,))
        first.start()
        first.join()
        in_threads(call)
    assert len(seen) == 1 + THREADS * TURNS and len({which for which, _, _ in seen}) == 1
    assert all(_meant(buffer, wanted) == i for _, i, buffer in seen)


def test_threads_share_a_prepared_call() -> None:
    """Each launches on its own stream, also where nothing but the stream is written."""
    problem = gemv_problems.make(GEMV)
    with recording(lambda packed: packed.config.stream == threading.get_ident()) as seen:
        run = nv.prepare(nv.gemv, problem.a, problem.b)
        in_threads(lambda i: run())
    assert seen == [True] * (THREADS * TURNS)


def _meant(buffer: bytes, wanted: list[tuple]) -> int:
    """Whose call the parameters are of: all of one's values are there."""
    fits = [
        i
        for i, (*addresses, alpha) in enumerate(wanted)
        if all(struct.pack("<Q", x) in buffer for x in addresses) and struct.pack("<f", alpha) in buffer
    ]
    assert len(fits) == 1, "the values of two calls"
    return fits[0]
