"""What grouped_gemm() and grouped_gemm_contiguous() refuse, and how they say so; which kernel they choose."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import gemm_problems
from support.grouped_problems import Grouped, make

import cute_nvfp4
from cute_nvfp4.errors import OperandError, OperandTypeError, TargetError
from cute_nvfp4.grouped_rows import GroupedRows
from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.kernels.gemm.grouped_config import GroupedConfig, can_implement_grouped
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.grouped_gemm import grouped_gemm
from cute_nvfp4.ops.grouped_gemm_contiguous import grouped_gemm_contiguous
from cute_nvfp4.ops.grouped_launch import compile_grouped_gemm
from cute_nvfp4.planning import clocked
from cute_nvfp4.planning.gemm_problem import Plan
from cute_nvfp4.planning.grouped import GroupedProblem, choose_grouped
from cute_nvfp4.target import ARCHITECTURES

ARCH = ARCHITECTURES["sm_100a"]


def pair(m: int = 8, n: int = 8, k: int = 64, **options: object) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    problem = gemm_problems.make(gemm_problems.Case(m, n, k, **{"batch": 0, **options}))
    return problem.a, problem.b


GOOD = pair()
OUT = torch.empty(64, 8)


def refused(problems: object, words: str, error: type = OperandError, **options: object) -> None:
    with pytest.raises(error, match=re.escape(words)):
        grouped_gemm(problems, **options)


@pytest.mark.parametrize(
    "bad,words,error",
    [
        ((pair(k=64)[0], pair(k=96)[1]), "group 1: K of a and b: got 64 and 96", OperandError),
        (GOOD[0], "group 1: problem: got BlockScaledTensor, expected a pair", OperandTypeError),
        ((GOOD[0].data, GOOD[1]), "group 1: a: got Tensor", OperandTypeError),
        ((None, None), "group 1: operands: got None and None", OperandError),
        (pair(a_format="mxfp4", b_format="mxfp4"), "group 1: format of a: got mxfp4, expected nvfp4", OperandError),
        ((None, pair(b_format="mxfp8", a_format="mxfp8")[1]), "group 1: format of b: got mxfp8", OperandError),
        (pair(k=48), "group 1: K of a: got 48, expected a multiple of 32", OperandError),
        (pair(batch=2), "group 1: batch of a: got 2", OperandError),
    ],
)
def test_a_group_that_cannot_be_is_named(bad: object, words: str, error: type) -> None:
    refused([GOOD, bad, GOOD], words, error)


def test_row_major_and_negative_scales_are_named() -> None:
    a, b = pair()
    refused([GOOD, (replace(a, scale=a.rowmajor_scale()[0]), b)], "group 1: scales of a: got rowmajor")
    a.scale[0] |= 0x80
    refused([GOOD, GOOD, (a, b)], "group 2: scales of a: got ")


def test_no_groups() -> None:
    refused([], "problems: got none")


@pytest.mark.parametrize(
    "out,words,error",
    [
        (OUT, "out: got Tensor, expected a list of 2 tensors", OperandError),
        ([OUT[:8]], "out: got list of 1, expected a list of 2", OperandError),
        ([OUT[:8], OUT[:9]], "group 1: shape of out", OperandError),
        ([OUT[:8], OUT[:8]], "group 1: memory of out: got", OperandError),
        ([OUT[:8], OUT[4:12]], "group 1: memory of out: got", OperandError),
        ([OUT[:8], OUT[8:16].half()], "group 1: out_dtype", OperandTypeError),
        ([OUT[:8], OUT[8:16].t()], "group 1: stride of out along N", OperandError),
        ([OUT[:8], OUT[8:16].double()], "group 1: dtype of out", OperandTypeError),
    ],
)
def test_outputs(out: object, words: str, error: type) -> None:
    refused([GOOD, GOOD], words, error, out=out)


def test_output_in_an_operand() -> None:
    a, b = pair(k=512)
    out = a.data.view(torch.float32).view(-1)[:64].view(8, 8)
    refused([(a, b)], "memory of ", out=[out])
    refused([GOOD, (a, b)], "memory of ", out=[out, OUT[:8]])


@pytest.mark.parametrize(
    "options,words,error",
    [
        ({"alpha": torch.ones(3)}, "alpha: got shape (3,), expected one element, or 2", OperandError),
        ({"alpha": torch.ones(2).double()}, "alpha: got torch.float64", OperandTypeError),
        ({"alpha": "1"}, "alpha: got str", OperandTypeError),
        ({"out_dtype": torch.int32}, "out_dtype: got torch.int32", OperandTypeError),
        ({"config": GemmConfig()}, "config: got GemmConfig, expected a Plan", OperandTypeError),
        ({"config": [1]}, "config: got list, expected a Plan", OperandTypeError),
        ({"config": Plan(GemmConfig(scheduler="stream_k"), False, 1)}, "expected static", OperandError),
        ({"config": Plan(GemmConfig(split_k=2), False, 1)}, "split_k: got 2, expected at most 1", OperandError),
        ({"config": Plan(GemmConfig(), False, 0)}, "workers: got 0", OperandError),
        ({"config": Plan(GemmConfig(tile_n=96), False, 1)}, "tile_n: got 96", OperandError),
        ({"backend": "cuda"}, "device of the operands", TargetError),
        ({"backend": "gpu"}, "backend: got 'gpu'", TargetError),
    ],
)
def test_options(options: dict, words: str, error: type) -> None:
    refused([GOOD, GOOD], words, error, **options)


def test_too_many_groups() -> None:
    refused([GOOD] * 1025, "groups that have rows: got 1025, expected at most 1024")


# --- groups without rows


def test_groups_without_rows() -> None:
    """Results have their shapes; nothing is launched for them, nor if there are no others."""
    a, b = pair(5, 7, 64)
    results = grouped_gemm([(None, b), (a, None)], out_dtype=torch.bfloat16)
    assert [x.shape for x in results] == [(0, 7), (5, 0)] and results[0].dtype is torch.bfloat16
    results = grouped_gemm([(None, b), (a, b), (a, None)], alpha=torch.tensor([7.0, 0.5, 9.0]), out_dtype=torch.float32)
    (alone,) = grouped_gemm([(a, b)], alpha=0.5, out_dtype=torch.float32)
    assert results[1].equal(alone) and [x.shape for x in results] == [(0, 7), (5, 7), (5, 0)]


# --- the contiguous form

DEALT = make(Grouped(((3, 8, 64), (2, 8, 64)), True, after=1))


def rows(**changed: object) -> GroupedRows:
    r = DEALT.rows
    return GroupedRows(**{"data": r.data, "scale": r.scale, "offsets": r.offsets, **changed})


@pytest.mark.parametrize(
    "changed,words,error",
    [
        ({"offsets": [0, 4, 2]}, "offsets[2]: got 2, expected at least 4", OperandError),
        ({"offsets": [0, 4, 7]}, "offsets[2]: got 7, expected at most 6", OperandError),
        ({"offsets": [-1, 4, 6]}, "offsets[0]: got -1, expected at least 0", OperandError),
        ({"offsets": [0]}, "offsets: got [0]", OperandTypeError),
        ({"offsets": [0, 1.5]}, "offsets: got [0, 1.5]", OperandTypeError),
        ({"offsets": torch.tensor([0, 4])}, "offsets: got torch.int64", OperandTypeError),
        ({"offsets": torch.tensor([[0, 4]], dtype=torch.int32)}, "offsets: got shape (1, 2)", OperandError),
        ({"scale": DEALT.rows.scale[:-1]}, "scale of GroupedRows: got shape (1023,)", OperandError),
        ({"scale": DEALT.rows.scale.float()}, "scale of GroupedRows: got torch.float32", OperandTypeError),
        ({"data": DEALT.rows.data[None]}, "data of GroupedRows: got shape (1, 6, 32)", OperandError),
    ],
)
def test_rows_that_cannot_be(changed: dict, words: str, error: type) -> None:
    with pytest.raises(error, match=re.escape(words)):
        rows(**changed)


@pytest.mark.parametrize(
    "a,options,words,error",
    [
        (DEALT.groups[0].a, {}, "a and b: got BlockScaledTensor and BlockScaledTensor", OperandTypeError),
        (rows(offsets=[0, 6]), {}, "groups of a and matrices of b: got 1 and 2", OperandError),
        (rows(), {"status": torch.zeros(1)}, "status: got torch.float32", OperandTypeError),
        (rows(), {"status": torch.zeros(2, dtype=torch.int32)}, "status: got shape (2,)", OperandError),
        (rows(), {"out": torch.empty(8, 6).t()}, "stride of out along N: got 6", OperandError),
        (rows(), {"out": torch.empty(5, 8)}, "shape of out: got (5, 8)", OperandError),
        (rows(), {"alpha": torch.ones(3)}, "alpha: got shape (3,)", OperandError),
    ],
)
def test_contiguous_form(a: object, options: dict, words: str, error: type) -> None:
    with pytest.raises(error, match=re.escape(words)):
        grouped_gemm_contiguous(a, DEALT.stack, **options)


def test_rows_of_a_batch() -> None:
    batch = gemm_problems.make(gemm_problems.Case(8, 8, 64)).a
    with pytest.raises(OperandError, match="rows of groups: got data of 3 dimensions"):
        GroupedRows.of(batch, [0, 8])


# --- configurations and plans


@pytest.mark.parametrize(
    "config,words",
    [
        (GroupedConfig(slots=17), "slots: got 17, expected 1 to 16"),
        (GroupedConfig(), "slots: got 0, expected 1 to 16"),
        (GroupedConfig(maps="workspace", slots=1), "slots: got 1"),
        (GroupedConfig(maps="shared"), "ragged: got ''"),
        (GroupedConfig(slots=1, ragged="a"), "ragged: got 'a'"),
        (GroupedConfig(maps="workspace", capacity=33), "capacity: got 33"),
        (GroupedConfig(maps="workspace", capacity=2048), "capacity: got 2048"),
        (GroupedConfig(maps="elsewhere"), "maps: got elsewhere"),
        (GroupedConfig(slots=1, store="tma"), "store of a grouped GEMM: got tma"),
        (GroupedConfig(slots=1, bias="n"), "a grouped GEMM: got bias 'n'"),
        (GroupedConfig(slots=1, tile_n=100), "tile_n: got 100"),
    ],
)
def test_configurations_that_cannot_be(config: GroupedConfig, words: str) -> None:
    assert words in can_implement_grouped(config)
    with pytest.raises(OperandError, match=re.escape(words)):
        compile_grouped_gemm(config)


def test_where_maps_are() -> None:
    """Of up to 16 groups in parameters, for powers of two of them; of more in a workspace; of dealt rows shared."""
    for groups, maps, slots, capacity in ((1, "parameters", 1, 32), (9, "parameters", 16, 32), (17, "workspace", 0, 32),
                                          (33, "workspace", 0, 64), (1024, "workspace", 0, 1024)):  # fmt: skip
        config = GroupedProblem(((64, 64, 256),) * groups).config(ARCH, False)
        assert (config.maps, config.slots, config.capacity) == (maps, slots, capacity)
    config = GroupedProblem(((640, 64, 256),), stack=40).config(ARCH, True)
    assert (config.maps, config.ragged, config.capacity) == ("shared", "b", 64)


BENCHMARKS = {
    "8 of n 4096, k 7168": ((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168),
    "8 of n 7168, k 2048": ((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048),
    "2 of n 3072, k 4096": ((192, 320), 3072, 4096),
    "2 of n 4096, k 1536": ((128, 384), 4096, 1536),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_plans_of_the_benchmark_cases(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's are possible, on no more clusters than fit; with few rows, weights are on the side of M."""
    monkeypatch.setattr(clocked, "entries", dict)
    choose_grouped.cache_clear()
    rows_, n, k = BENCHMARKS[name]
    plan = choose_grouped(GroupedProblem(tuple((m, n, k) for m in rows_)), ARCH, 148)
    assert not can_implement_grouped(plan.config)
    assert plan.workers * plan.config.cluster_size <= 148
    assert plan.swap or max(rows_) > 256
    choose_grouped.cache_clear()


# --- the source


def _lines(*names: str) -> list[list[str]]:
    """Lines of files of the package, without those that import."""
    root = Path(cute_nvfp4.__file__).parent
    files = [(root / name).read_text().splitlines() for name in names]
    return [[x.strip() for x in file if x.strip() and not re.match(r"\s*(from|import) ", x)] for file in files]


def test_nothing_is_copied() -> None:
    """No six lines in a row that the GEMM or the gated GEMM have too."""
    own = (
        *("kernels/gemm/grouped.py", "planning/grouped.py", "ops/grouped_gemm.py", "ops/grouped_launch.py"),
        *(f"kernels/gemm/{name}.py" for name in ("grouped_config", "grouped_scheduler", "group_source")),
    )
    others = (
        *(
            "kernels/gemm/arguments.py",
            "planning/gemm.py",
            "ops/gemm.py",
            "ops/gated_gemm.py",
        ),
        *("kernels/gemm/config.py", "kernels/gemm/tile_scheduler.py", "kernels/gemm/problem.py"),
        *(f"kernels/gemm/sm100/{name}.py" for name in ("host", "kernel", "loader", "mainloop", "epilogue")),
    )
    blocks = {tuple(file[i : i + 6]) for file in _lines(*others) for i in range(len(file) - 5)}
    assert len(blocks) > 500
    for name, file in zip(own, _lines(*own)):
        for i in range(len(file) - 5):
            assert tuple(file[i : i + 6]) not in blocks, f"{name}: {file[i]}"
