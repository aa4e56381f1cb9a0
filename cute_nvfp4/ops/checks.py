"""Checks that the public functions share: formats, numbers, outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_float
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..formats import FORMATS, Format
from ..kernels.gemm.config import GATE_NAMES
from ..kernels.gemm.limits import refused_formats
from ..operand import BlockScaledTensor, address_of, check_pair, row_alignment, span_bytes
from ..tensors import check_dense, check_tensor
from .dispatch import is_recorded

DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""dtypes of an output, and their names in configurations."""
ALL_FORMATS = tuple(FORMATS.values())


def check_dtype(what: str, dtype: torch.dtype) -> None:
    """Raises unless an output may have ``dtype``."""
    if dtype not in DTYPE_NAMES:
        raise OperandTypeError.of(what, got=dtype, expected=" or ".join(map(str, DTYPE_NAMES)))


def check_bias(bias: torch.Tensor | None, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
    """Raises unless a bias, if there is one, has one of these shapes, and its columns lie side by side."""
    if bias is None:
        return
    check_tensor("bias", bias, dtypes=DTYPE_NAMES, shapes=shapes, device=device)
    if bias.shape[-1] > 1 and bias.stride(-1) != 1:
        raise OperandError.of("stride of bias along N", got=bias.stride(-1), expected="1")


def check_rows_aligned(name: str, x: torch.Tensor) -> None:
    """Raises unless the elements of a row lie side by side, and rows start at multiples of 16 bytes.

    A tensor that torch records has no address yet; the operator checks it when it runs.
    """
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        what = f"stride of {name} along its rows"
        raise OperandError.of(what, got=x.stride(-1), expected="1", hint=".contiguous() copies.")
    if not is_recorded(x) and x.numel() and row_alignment(x, 16) < 16:
        got, expected = f"address {address_of(x):#x}, strides {x.stride()}", "rows at multiples of 16 bytes"
        raise OperandError.of(f"alignment of {name}", got=got, expected=expected, hint=".clone() aligns.")


def check_gate(gate: str) -> None:
    """Raises unless a gated GEMM has ``gate``."""
    if gate not in GATE_NAMES:
        raise OperandError.of("gate", got=repr(gate), expected=f"one of {', '.join(GATE_NAMES)}")


def check_format(name: str, operand: BlockScaledTensor, formats: Sequence[Format] = ALL_FORMATS) -> None:
    """Raises unless ``operand`` has one of ``formats``."""
    if operand.format not in formats:
        expected = " or ".join(fmt.name for fmt in formats)
        raise OperandError.of(f"format of {name}", got=operand.format.name, expected=expected)


def check_formats(a_name: str, a: Any, b_name: str, b: Any) -> None:
    """Raises unless one MMA instruction multiplies both formats."""
    reason = refused_formats(a.format.name, b.format.name, f"{a_name} and {b_name}")
    if reason:
        raise OperandError(f"{reason} prepare_weight(b) makes a weight for an a of any format.")


def check_types(a: BlockScaledTensor, b: BlockScaledTensor) -> None:
    """Raises unless both are operands, so that they have keys."""
    if not (isinstance(a, BlockScaledTensor) and isinstance(b, BlockScaledTensor)):
        check_pair(a, b)


def check_product(
    a: BlockScaledTensor, others: Mapping[str, BlockScaledTensor], formats: Sequence[Format] = ALL_FORMATS
) -> None:
    """Raises unless ``a`` can be multiplied with each of ``others``: all of ``formats``, all or none with L."""
    for b in others.values():
        check_pair(a, b)
    for name, operand in {"a": a, **others}.items():
        check_format(name, operand, formats)
        if operand.is_batched != a.is_batched:
            got = f"a {a.data.ndim}-d, {name} {operand.data.ndim}-d"
            raise OperandError.of("batch dimension", got=got, expected="the same")


def number(name: str, value: float | None) -> float:
    """A Python number; None is 1."""
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OperandTypeError.of(
            name,
            got=type(value).__name__,
            expected="a Python number",
            hint="A scale that lives on the device belongs in global_scale of an operand.",
        )
    try:
        return float(value)
    except OverflowError:
        raise OperandError.of(name, got="an int beyond float64", expected="a float32 number") from None


def check_alpha(alpha: Any, device: torch.device, groups: int = 1) -> None:
    """Raises unless alpha is a number, None, or a tensor of one float32 element, or of one for each group."""
    if not isinstance(alpha, torch.Tensor):
        number("alpha", alpha)
        return
    check_dense("alpha", alpha)
    if alpha.dtype is not torch.float32:
        raise OperandTypeError.of("alpha", got=alpha.dtype, expected="torch.float32, or a Python number")
    if alpha.numel() not in (1, groups) or not alpha.is_contiguous():
        expected = "one element" if groups == 1 else f"one element, or {groups}, contiguous"
        raise OperandError.of("alpha", got=f"shape {tuple(alpha.shape)}", expected=expected)
    if alpha.device != device:
        raise OperandError.of("device of alpha", got=alpha.device, expected=device)


def split_alpha(alpha: float | torch.Tensor | None) -> tuple[float, torch.Tensor | None]:
    """A checked alpha as a number, 1 for a tensor, and as a tensor (n,), None for a number."""
    if isinstance(alpha, torch.Tensor):
        return 1.0, alpha if alpha.ndim == 1 else alpha.reshape(-1)
    return number("alpha", alpha), None


def exact_alpha(alpha: float | torch.Tensor | None, group: int = 0) -> float | torch.Tensor:
    """The factor of a group's product in exact torch: the float32 number that the kernel gets, or an element."""
    scalar, factors = split_alpha(alpha)
    return c_float(scalar).value if factors is None else factors[group if len(factors) > 1 else 0]


def factors_of(request: Any, *names: str) -> tuple[float | str, tuple[str, ...]]:
    """The alpha in a kernel's record, and the names of the device scalars that multiply it.

    The device scalars are alpha itself if it is a tensor, and the global scales of the arguments ``names``.
    """
    scalar, factors = ("alpha", []) if request.alpha is not None else (1.0, [])
    if isinstance(request.alpha, torch.Tensor):
        scalar, factors = 1.0, ["alpha"]
    scaled = [name for name in names if getattr(getattr(request, name), "global_scale", None) is not None]
    return scalar, (*factors, *(f"{name}.global_scale" for name in scaled))


def refuse_config(config: Any) -> None:
    """Raises if a config is given to exact torch, which has no kernel to run it."""
    if config is not None:
        raise OperandError.of(
            "config",
            got=f"a {type(config).__name__} with backend 'reference', which runs no kernel",
            expected="None",
            hint="Use backend='sim', or a block of cute_nvfp4.simulating(), to run the plan on CPU tensors.",
        )


def refuse_gate(gate: str) -> None:
    """Raises if a gate is given with weights that are not prepared."""
    if gate:
        raise OperandError.of("gate", got=repr(gate), expected="a prepared weight of gate and up with it")


def reads(request: Any) -> dict[str, torch.Tensor | None]:
    """Every tensor that a request reads, by name."""
    return inputs(**{name: x for name, x in request._asdict().items() if name not in ("out", "status")})


def inputs(**named: Any) -> dict[str, torch.Tensor | None]:
    """Every tensor of arguments, by name: ``bias``, ``a.data`` and so on."""
    found: dict[str, torch.Tensor | None] = {}
    for name, x in named.items():
        if isinstance(x, torch.Tensor):
            found[name] = x
        else:
            parts = ("data", "packed", "scale", "offsets", "global_scale", "up_global_scale", "row_factor")
            found |= {f"{name}.{part}": getattr(x, part) for part in parts if hasattr(x, part)}
    return found


def tensors(
    read: Mapping[str, torch.Tensor | None], written: Mapping[str, torch.Tensor | None]
) -> dict[str, tuple[torch.Tensor, bool]]:
    """Every tensor that a kernel may touch, by name, and whether it may write it."""
    named = [(read, False), (written, True)]
    return {name: (x, writable) for some, writable in named for name, x in some.items() if x is not None}


def checked_output(
    inputs: Mapping[str, torch.Tensor | None],
    device: torch.device,
    shape: tuple[int, ...],
    out: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """A valid output of ``shape``: the caller's, checked (it overlaps none of ``inputs``), or a new one."""
    if out is None:
        dtype = torch.float16 if dtype is None else dtype
        check_dtype("out_dtype", dtype)
        return torch.empty(shape, dtype=dtype, device=device)
    check_tensor("out", out, dtypes=DTYPE_NAMES, shapes=[shape], device=device)
    if dtype is not None and dtype is not out.dtype:
        raise OperandTypeError.of("out_dtype", got=dtype, expected=f"None or {out.dtype}, the dtype of out")
    check_overlap(inputs, out)
    return out


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte, and of the byte after the last."""
    start = tensor.data_ptr()
    return start, start + span_bytes(tensor)


def check_memory(read: Mapping[str, torch.Tensor | None], out: Any, *parts: str) -> None:
    """Raises if an element of an output shares memory with another one, or with an input.

    read: the inputs. out: a tensor or an operand. parts: the parts of an operand that are written; by default all.
    """
    if isinstance(out, torch.Tensor):
        return check_overlap(read, out)
    for name in parts or ("data", "scale", "global_scale"):
        if (part := getattr(out, name, None)) is not None:
            check_overlap(read, part)
            read = {**read, f"out.{name}": part}
    return None


def check_overlap(inputs: Mapping[str, torch.Tensor | None], out: torch.Tensor) -> None:
    """Raises if an element of ``out`` shares memory with another one, or with an input."""
    if not out.is_contiguous():
        _check_strides(out)
    storage = out.untyped_storage()
    first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    for name, tensor in inputs.items():
        if tensor is None:
            continue
        other = tensor.untyped_storage()
        # most tensors have a storage to themselves: compare exact spans only within a shared one
        if other.data_ptr() < last and first < other.data_ptr() + other.nbytes():
            _check_spans(name, tensor, out)


def _check_strides(out: torch.Tensor) -> None:
    """Raises if two elements of ``out`` share memory."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(out.shape, out.stride()) if size > 1):
        if stride <= reach:
            raise OperandError.of(
                "strides of out",
                got=f"{out.stride()} for shape {tuple(out.shape)}",
                expected="no element of out to be another's",
                hint="An expanded tensor cannot be written; .clone() it.",
            )
        reach += (size - 1) * stride


def _check_spans(name: str, tensor: torch.Tensor, out: torch.Tensor) -> None:
    first, last = span(tensor)
    start, end = span(out)
    if start < last and first < end:
        raise OperandError.of(
            "memory of out",
            got=f"bytes {start:#x} to {end:#x}, which overlap {name} at {first:#x} to {last:#x}",
            expected="memory of its own",
        )
