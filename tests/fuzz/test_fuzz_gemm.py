"""Random calls of gemm(), which gives a right answer or one of our errors, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import gemm_problems
from support.gemm_problems import FORMAT_PAIRS, OUTPUTS, Case, Problem, make

from cute_nvfp4 import gemm
from cute_nvfp4.errors import OperandError, OperandTypeError, TargetError
from cute_nvfp4.operand import BlockScaledTensor

OURS = (OperandError, OperandTypeError, TargetError)
# few structures, so that few kernels are compiled; the others are refused
PLANS = (
    *[{"workers": 2}] * 4, {"workers": 2, "swap": True}, {"workers": 1, "tile_n": 64, "split_k": 2},
    {"workers": 3, "tile_n": 64, "scheduler": "stream_k"}, {"pair": True}, {"split_k": 3}, {"stages": 20},
    {"workers": -1}, {"tile_n": 100}, {"cluster_m": 4, "cluster_n": 4},
)  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    a_format, b_format = draw(st.sampled_from([*[FORMAT_PAIRS[0]] * 12, FORMAT_PAIRS[3], ("nvfp4", "mxfp4")]))
    case = Case(
        m=draw(st.sampled_from([1, 5, 130])), n=draw(st.sampled_from([1, 3, 8, 70])),
        k=draw(st.sampled_from([32, 64, 256, 544, 544])), batch=draw(st.sampled_from([0, 1, 2])),
        a_format=a_format, b_format=b_format,
        # one dtype of output: each other one is another kernel
        dtype="float32", out=draw(st.sampled_from(OUTPUTS)),
        alpha=draw(st.sampled_from([None, -0.5])), alpha_tensor=draw(st.integers(0, 5)) == 0,
        bias=draw(st.sampled_from(["", "", "n", "batch"])), pitch=draw(st.sampled_from([0, 0, 16, 48])),
        repeat_a=draw(st.booleans()), repeat_b=draw(st.booleans()), seed=draw(st.integers(0, 1000)),
    )  # fmt: skip
    if case.batch == 0 and case.bias == "batch":
        case = replace(case, bias="n")
    return replace(case, **draw(st.sampled_from(PLANS)))


def one_of(draw: st.DrawFn, choices: list) -> object:
    """One of ``choices``, which may be tensors: hypothesis would print them."""
    return choices[draw(st.integers(0, len(choices) - 1))]


def spoiled(draw: st.DrawFn, problem: Problem) -> Problem:
    """``problem``, of which one part is another's, somewhere else, or of the wrong kind."""
    how = draw(st.sampled_from([*["nothing"] * 16, "alpha", "bias", "out", "data", "scale", "global"]))
    if how == "alpha":
        bad = ["1", torch.ones(2), torch.ones(1, dtype=torch.float16), torch.ones((1, 1)), 3, float("nan")]
        return replace(problem, alpha=one_of(draw, bad))
    if how == "bias":
        bad = [torch.zeros(problem.case.n + 1), torch.zeros(2 * problem.case.n)[::2], 0.5, problem.out]
        return replace(problem, bias=one_of(draw, bad))
    if how == "out" and problem.out is not None:
        c = problem.out
        bad = [c[..., :1], c.double(), c[:1].expand(c.shape), c.half(), problem.a.data, c.transpose(-1, -2)]
        return replace(problem, out=one_of(draw, bad))
    if how == "data":
        x = problem.a
        narrow = x.data[..., : x.data.shape[-1] // 2]
        data = one_of(draw, [narrow, x.data[..., 8:], x.data.transpose(-1, -2), x.data.view(torch.int8)])
        return replace(problem, a=BlockScaledTensor(data, x.scale, x.global_scale, x.format))
    if how == "scale":
        x = problem.b
        codes = x.scale.clone()
        codes[0, 0, 0, 0, 0, 0] = 0x81
        other = one_of(draw, [codes, x.rowmajor_scale()[0], x.scale.contiguous(), x.scale[..., :1]])
        return replace(problem, b=BlockScaledTensor(x.data, other, x.global_scale, x.format))
    if how == "global":
        x = problem.b
        value = one_of(draw, [torch.tensor(0.5), torch.ones(2), torch.ones(1).double()])
        return replace(problem, b=BlockScaledTensor(x.data, x.scale, value, x.format))
    return problem


def test_right_or_refused() -> None:
    """Many combinations are refused; the test would mean nothing if all of them were."""
    ran: list[Case] = []
    refused: list[str] = []
    right_or_refused(ran, refused)
    assert len(ran) >= 20 and len(refused) >= 20 and len({text.split(":")[0] for text in refused}) >= 8


@settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def right_or_refused(ran: list[Case], refused: list[str], data: st.DataObject) -> None:
    problem = make(data.draw(cases()))
    case = problem.case
    try:
        problem = spoiled(data.draw, problem)
        if problem.out is not None:
            # what the caller gives may be no output at all, which is for gemm to say
            problem.room.fill_(gemm_problems.GUARD)
            if problem.out.dtype is torch.float32 and 0 not in problem.out.stride():
                problem.out.fill_(torch.nan)
        c = gemm(
            problem.a, problem.b, alpha=problem.alpha, bias=problem.bias, out=problem.out,
            out_dtype=torch.float32 if problem.out is None else None, config=case.plan(),
        )  # fmt: skip
    except OURS as error:
        assert "got" in str(error) and "expected" in str(error)
        refused.append(str(error))
        return
    if isinstance(problem.alpha, float) and problem.alpha != problem.alpha:
        assert c.isnan().all()
        return
    case = replace(case, dtype=str(c.dtype).removeprefix("torch."))
    gemm_problems.check(replace(problem, case=case), c)
    ran.append(case)
