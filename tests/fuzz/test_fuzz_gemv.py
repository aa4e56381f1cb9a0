"""Random calls of gemv(), which gives a right answer or one of our errors, and nothing else."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import gemv_problems
from support.gemv_problems import Case, Problem

from cute_nvfp4.errors import OperandError, OperandTypeError, TargetError
from cute_nvfp4.formats import MXFP4, NVFP4
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.scale_layout import blocked_bytes, to_blocked

OURS = (OperandError, OperandTypeError, TargetError)
small = st.sampled_from([1, 2, 3, 4, 8, 9])
DTYPES = [*[torch.uint8] * 8, *[torch.float4_e2m1fn_x2] * 4, torch.float8_e4m3fn, torch.int8]


@st.composite
def views(draw: st.DrawFn, generator: torch.Generator, shape: tuple[int, ...], dtypes: list) -> torch.Tensor:
    """Bytes of about ``shape``, seen through a few transformations."""
    shape = list(shape)
    if draw(st.integers(0, 15)) == 0:
        axis = draw(st.integers(0, len(shape) - 1))
        shape[axis] = max(0, shape[axis] + draw(st.sampled_from([-1, 1, 8])))
    step, first = draw(st.sampled_from([*[(1, 0)] * 8, (2, 0), (1, 8), (1, 8), (1, 1)]))
    axis = draw(st.integers(0, len(shape) - 1))
    room = list(shape)
    room[axis] = room[axis] * step + first
    tensor = torch.randint(0, 126, room, generator=generator, dtype=torch.uint8)
    tensor = tensor.narrow(axis, first, room[axis] - first)
    tensor = tensor[(slice(None),) * axis + (slice(None, None, step),)]
    if len(shape) == 3 and draw(st.integers(0, 5)) == 0:
        tensor = (
            tensor[:1].expand(shape) if draw(st.booleans()) else tensor.transpose(0, 1).contiguous().transpose(0, 1)
        )
    return tensor.view(draw(st.sampled_from(dtypes))) if tensor.numel() else tensor


@st.composite
def operands(
    draw: st.DrawFn, generator: torch.Generator, lead: tuple[int, ...], rows: int, k: int
) -> BlockScaledTensor:
    data = draw(views(generator, (*lead, rows, k // 2), DTYPES))
    columns = max(1, k // 16)
    kind = draw(st.sampled_from(["rowmajor"] * 4 + ["blocked", "blocked", "flat", "flat", "odd"]))
    if kind == "blocked":
        scale = to_blocked(torch.randint(0, 126, (*lead, rows, columns), generator=generator, dtype=torch.uint8))
    elif kind == "flat":
        size = blocked_bytes(rows, columns, lead[0] if lead else 1)
        scale = torch.randint(0, 126, (size,), generator=generator, dtype=torch.uint8)
    elif kind == "odd":
        scale = torch.zeros(draw(st.lists(small, min_size=0, max_size=4)), dtype=torch.uint8)
    else:
        scale = draw(views(generator, (*lead, rows, columns), [torch.uint8, torch.float8_e4m3fn]))
    fmt = MXFP4 if draw(st.integers(0, 19)) == 0 else NVFP4
    value = draw(st.sampled_from([*[None] * 8, torch.tensor(0.5), torch.ones(1), torch.ones(2), 1.0]))
    return BlockScaledTensor(data, scale, value, fmt)


def test_right_or_refused() -> None:
    """Most combinations are refused; the test would mean nothing if all of them were."""
    ran: list[Case] = []
    right_or_refused(ran)
    assert len(ran) >= 10


@settings(max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def right_or_refused(ran: list[Case], data: st.DataObject) -> None:
    draw = data.draw
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    lead = draw(st.sampled_from([(), (1,), (2,)]))
    m, k = draw(st.sampled_from([1, 5, 33])), draw(st.sampled_from([16, 64, 64, 256, 256, 24]))
    out_dtype = draw(st.sampled_from([*[torch.float32, torch.float16] * 3, torch.float64]))
    try:
        a = draw(operands(generator, lead, m, k))
        b = draw(operands(generator, draw(st.sampled_from([*[lead] * 8, (2,)])), draw(st.sampled_from([1, 3])), k))
        c = gemv_problems.gemv(a, b, alpha=2.0**-12, out_dtype=out_dtype)
    except OURS as error:
        assert "got" in str(error) and "expected" in str(error)
        return
    case = Case(a.rows, a.k, a.batch if a.is_batched else 0, alpha=2.0**-12, dtype=out_dtype)
    gemv_problems.check(Problem(case, a, b, None), c)
    ran.append(case)
