"""What grouped GEMMs share: errors that name the group, outputs, and the factors of groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..tensors import check_dense
from .checks import check_dtype, checked_output, inputs
from .planned import allocator


def each_group(function: Callable[..., Any], *columns: Iterable[Any]) -> list:
    """The results of ``function`` for every group; an error names its group."""
    results: list[Any] = []
    try:
        for group in zip(*columns):
            results.append(function(*group))
    except (OperandError, OperandTypeError) as error:
        raise type(error)(f"group {len(results)}: {error}") from None
    return results


def maker(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> Callable[[], list[torch.Tensor]]:
    """A function that makes new results: views of one tensor if that keeps them aligned."""
    n = shapes[0][1]
    if any(shape[1] != n for shape in shapes) or n * dtype.itemsize % 16:
        return lambda: [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    rows = [shape[0] for shape in shapes]
    whole = allocator(torch.empty((sum(rows), n), dtype=dtype, device=device))
    # autograd must not take the results for views of one tensor
    return lambda: whole().unsafe_split_with_sizes(rows)


def checked_outputs(
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
    out: Sequence[torch.Tensor] | None,
    dtype: torch.dtype | None,
    default: torch.dtype,
) -> list[torch.Tensor]:
    """The results: new ones, or the caller's. Overlap is not checked yet."""
    if out is None:
        dtype = default if dtype is None else dtype
        check_dtype("out_dtype", dtype)
        return maker(shapes, dtype, device)()
    if not isinstance(out, (list, tuple)) or len(out) != len(shapes):
        got = f"{type(out).__name__}" + (f" of {len(out)}" if isinstance(out, (list, tuple)) else "")
        raise OperandError.of("out", got=got, expected=f"a list of {len(shapes)} tensors")

    def check(x: Any, shape: tuple[int, int]) -> None:
        check_dense("out", x)
        checked_output({}, device, shape, x, dtype or getattr(out[0], "dtype", None))
        check_rows_contiguous("out", x)

    each_group(check, out, shapes)
    return list(out)


def store_each(exact: Sequence[torch.Tensor | None], outs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies the exact results of groups that have rows to the outputs."""
    for x, out in zip(exact, outs):
        if x is not None:
            out.copy_(x)
    return list(outs)


def store_rows(exact: tuple[Sequence[int], torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Copies the exact rows that belong to a group to the output."""
    (first, *_, last), rows = exact
    out[first:last] = rows[first:last]
    return out


def rows_of(x: Any) -> int:
    """The number of rows of an operand or a tensor; 0 for None."""
    return 0 if x is None else len(x) if isinstance(x, torch.Tensor) else x.rows


def check_spans(spans: list[tuple[int, int, str, int, bool]]) -> None:
    """Raises if a span that is written overlaps another one. spans: (start, end, name, group, whether written)."""
    reach: dict[bool, tuple] = {True: (0, "", 0), False: (0, "", 0)}
    for start, end, name, group, written in sorted(spans):
        for other in (True, False) if written else (True,):
            last, what, its_group = reach[other]
            if start < min(last, end):
                got = f"bytes {start:#x} to {end:#x}, which overlap {what} of group {its_group}"
                raise OperandError.of(f"group {group}: memory of {name}", got=got, expected="memory of its own")
        if end > reach[written][0]:
            reach[written] = end, name, group


def check_rows_contiguous(name: str, out: torch.Tensor) -> None:
    """Raises unless the rows of an output are contiguous."""
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise OperandError.of(f"stride of {name} along N", got=out.stride(-1), expected="1")


def checked_status(status: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The word in which a kernel reports wrong offsets: the caller's, checked, or a new one."""
    if status is None:
        return torch.empty(1, dtype=torch.int32, device=device)
    if not isinstance(status, torch.Tensor) or status.dtype is not torch.int32:
        got = status.dtype if isinstance(status, torch.Tensor) else type(status).__name__
        raise OperandTypeError.of("status", got=got, expected="a torch.int32 tensor")
    check_dense("status", status)
    if status.numel() != 1 or status.device != device:
        got = f"shape {tuple(status.shape)} on {status.device}"
        raise OperandError.of("status", got=got, expected=f"one element on {device}")
    return status


def status_of(device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """The maker of the status word, for a call that gives none."""
    return {"status": functools.partial(checked_status, None, device)}


def alpha_of_live(live: Sequence[int], whole: bool, alpha: torch.Tensor | None) -> torch.Tensor | None:
    """The factors (n,) of the groups ``live``, those with rows; whole: all groups are. Copies nothing from the host."""
    if alpha is None or whole or alpha.numel() == 1 or not live:
        return alpha
    first, last = live[0], live[-1] + 1
    if len(live) == last - first:
        return alpha[first:last]
    each = alpha.split(1)
    return torch.cat([each[i] for i in live])


def addresses(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """The addresses of the tensors, without those that are None."""
    return tuple([x.data_ptr() for x in tensors if x is not None])


def tensors_of(groups: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Every tensor of the operands of groups."""
    for pair in groups:
        yield from (x for x in inputs(a=pair[0], b=pair[1]).values() if x is not None)
