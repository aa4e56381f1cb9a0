"""``quantize`` of activations to FP8: E4M3 with a float32 scale for each row, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..kernels.quantize.fp8_config import (
    MAX_THREADS,
    MAX_VECTORS,
    VECTOR,
    Fp8RowsArguments,
    Fp8RowsConfig,
    can_implement,
)
from ..operand import address_of, is_wrapper, row_alignment
from ..row_scaled import FP8, RowScaledTensor, by_rows
from ..runtime.backend import Backend, resolve
from ..runtime.bounded import Bounded
from ..runtime.kernel import Kernel
from ..runtime.launch import Tensors
from ..runtime.simulating import world
from ..target import Target
from ..tensors import check_dense
from .arguments import TENSOR
from .calls import allocator
from .checks import DTYPE_NAMES, tensors
from .dispatch import by_operator

MAX_K = MAX_THREADS * MAX_VECTORS * VECTOR


def quantize_rows(x: torch.Tensor, backend: Backend = "auto") -> RowScaledTensor:
    """Rows of x (M, K), bfloat16 or float16, in E4M3: a row's largest magnitude becomes 448. No gradient is followed.

    Raises:
        OperandError, OperandTypeError: another shape or dtype; K that is no multiple of 16.
    """
    check_dense("x", x)
    if by_operator((x,), follows=False):
        return RowScaledTensor(*torch.ops.cute_nvfp4.quantize_rows(x, backend=backend))
    found = TENSOR(x), backend, world(not x.is_cuda)
    call = _calls.find(found)
    if call is None:
        check_rows(x)
        target = resolve(backend, x.device)
        call = _calls[found] = by_rows if target.backend == "reference" else QuantizeRowsCall(x, target)
    return call(x.detach())


def check_no_options(given: Sequence[Any]) -> None:
    """Raises unless the arguments of ``quantize`` that rows in FP8 do not have are left out.

    given: rule, global scale, generator, Hessian, out, and the options.
    """
    if tuple(given) != ("max", "auto", None, None, None, False, "nearest", None, False, None, False, "blocked"):
        expected = "none but backend"
        raise OperandError.of(f"arguments of quantize for {FP8}", got=repr(tuple(given)), expected=expected)


def check_rows(x: torch.Tensor) -> None:
    """Raises unless the kernel takes x."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise OperandTypeError.of(f"dtype of x for {FP8}", got=x.dtype, expected="torch.bfloat16 or torch.float16")
    if x.ndim != 2 or x.shape[0] < 1 or not 0 < x.shape[1] <= MAX_K or x.shape[1] % VECTOR:
        expected = f"(M, K), K a multiple of {VECTOR}, at most {MAX_K}"
        raise OperandError.of(f"shape of x for {FP8}", got=tuple(x.shape), expected=expected)
    if x.stride(1) != 1 or (not is_wrapper(x) and row_alignment(x, 16) < 16):
        got = f"strides {x.stride()}, address {address_of(x):#x}"
        raise OperandError.of(
            "x", got=got, expected="1 along K, rows at multiples of 16 bytes", hint=".clone() aligns."
        )


def config_of(dtype: str, k: int, arch: Any) -> Fp8RowsConfig:
    """The variant for rows of K: few vectors a thread, so that all loads are under way at once."""
    vectors = -(-k // VECTOR)
    each = max(-(-vectors // MAX_THREADS), 2 if vectors > 32 else 1)
    threads = -(-vectors // each)
    return Fp8RowsConfig(dtype, min(-(-threads // 32) * 32, MAX_THREADS), each, arch)


class QuantizeRowsCall:
    """The kernel for tensors like x."""

    def __init__(self, x: torch.Tensor, target: Target) -> None:
        rows, k = x.shape
        self._data = allocator(torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=x.device))
        self._scale = allocator(torch.empty(rows, dtype=torch.float32, device=x.device))
        arguments = Fp8RowsArguments(0, 0, 0, rows, k, x.stride(0) * x.element_size())
        config = config_of(DTYPE_NAMES[x.dtype], k, target.arch)
        self._launch = KERNEL.launcher(config, target, x.device, arguments, _touched)

    def __call__(self, x: torch.Tensor) -> RowScaledTensor:
        out = RowScaledTensor(self._data(), self._scale())
        self._launch((x.data_ptr(), out.data.data_ptr(), out.scale.data_ptr()), (x, out))
        return out


def _touched(x: torch.Tensor, out: RowScaledTensor) -> Tensors:
    return tensors({"x": x}, {"data": out.data, "scale": out.scale})


def _host(config: Fp8RowsConfig) -> Callable[..., Any]:
    from ..kernels.quantize.fp8_rows import Fp8Rows

    return Fp8Rows(config)


_calls = Bounded()
KERNEL = Kernel("quantize_fp8_rows", Fp8RowsArguments, _host, can_implement)
