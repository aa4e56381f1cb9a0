"""The messages of docs/reference/errors.md. Each call is made; its message stands beside the reason and the remedy.

A message that needs a GPU to occur is quoted from its module, and the script checks that the module has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from table_cells import table

import cute_nvfp4 as nv
from cute_nvfp4.errors import CuteNvfp4Error
from cute_nvfp4.runtime.kernel import planning_only

PACKAGE = Path(nv.__file__).parent
N, K = 128, 256
EIGHT = torch.float8_e4m3fn


@dataclass(frozen=True)
class Refused:
    """A call that the package refuses: a reader's way to write it, a function that makes it, the reason and the
    remedy."""

    call: str
    make: Callable[[], Any]
    mend: str
    arch: str = "sm_90a"


@dataclass(frozen=True)
class Quoted:
    """Words of an error that ``module`` has, with "…" for what differs; their meaning and the remedy."""

    words: str
    module: str
    mend: str


def _x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(*(shape or (16, K)), dtype=dtype)


def _weight(**options: Any) -> nv.PreparedWeight:
    return nv.prepare_weight(_quantized(N, K), backend="sim", **options)


def _quantized(*shape: int, format: str = "nvfp4") -> nv.BlockScaledTensor:
    """An operand of zeros, for calls that are planned and not launched."""
    found = nv.quantize(torch.zeros(*shape), format, backend="reference")
    found.data.zero_()
    return found


def _far_apart() -> nv.BlockScaledTensor:
    scales = torch.full((N, K // 32), 20, dtype=torch.uint8)
    scales[0] = 220
    return nv.BlockScaledTensor(torch.full((N, K // 2), 0x22, dtype=torch.uint8), scales, format=nv.MXFP4)


def products() -> Iterator[Refused]:
    """Refused calls with products and weights."""
    yield Refused("`gemm(x, quantize(w))`, x in bf16", lambda: nv.gemm(_x(), _quantized(N, K)),
                  "Prepare the weight once (any GPU), or quantize x, too (fastest on Blackwell).")  # fmt: skip
    yield Refused("`prepare_weight(w)`, w in bf16", lambda: nv.prepare_weight(_x(N, K)), "Quantize w first.")
    yield Refused("`gemm(x, weight)`, x in float32", lambda: nv.gemm(_x(dtype=torch.float32), _weight()),
                  "Convert x, or prepare the weight for float16. float32 is no type of x.")  # fmt: skip
    yield Refused("`gemm(x, weight)`, x of three dimensions", lambda: nv.gemm(_x(1, 16, K), _weight()),
                  "`x.reshape(-1, K)`, and reshape the result. Skip calls without rows.")  # fmt: skip
    yield Refused("`gemm(x[:, 1:257], weight)`", lambda: nv.gemm(_x(16, K + 8)[:, 1 : K + 1], _weight()),
                  "A view whose rows begin between multiples of 16 bytes: copy it.")  # fmt: skip
    yield Refused("`gemm(x.t(), weight)`", lambda: nv.gemm(_x(K, 16).t(), _weight()), "Copy it; rows may be strided.")
    yield Refused("`gemm(x, prepare_weight(gate, up))`",
                  lambda: nv.gemm(_x(), nv.prepare_weight(_quantized(N, K), _quantized(N, K), backend="sim")),
                  "Call `gated_gemm`.")  # fmt: skip
    yield Refused("`gated_gemm(x, prepare_weight(w))`", lambda: nv.gated_gemm(_x(), _weight()), "Prepare both weights.")
    yield Refused("`prepare_weight(w, dtype=torch.float8_e4m3fn)` on a B200",
                  lambda: nv.gemm(_x(), _weight(dtype=EIGHT)),
                  "FP8 activations run on Hopper only. On Blackwell quantize x to NVFP4.", "sm_100a")  # fmt: skip
    yield Refused("`prepare_weight(w)`, w in MXFP4", lambda: nv.prepare_weight(_far_apart(), backend="sim"),
                  "Keep this layer in 16 bits, or quantize it to NVFP4.")  # fmt: skip
    yield Refused("`gemm(a, b)`, K = 272, on a B200", lambda: nv.gemm(_quantized(16, 272), _quantized(N, 272)),
                  "Pad x and w before you quantize ([shapes](shapes.md)).", "sm_100a")  # fmt: skip
    yield Refused("`gemm(a, b)`, different K", lambda: nv.gemm(_quantized(16, K), _quantized(N, 128)),
                  "Both operands are (rows, K); B is not transposed.")  # fmt: skip
    yield Refused("`gemm(a, b)`, NVFP4 and MXFP4", lambda: nv.gemm(_quantized(16, K), _quantized(N, K, format="mxfp4")),
                  "Quantize both to one format; MXFP8 with MXFP4 is allowed.", "sm_100a")  # fmt: skip
    yield Refused("`gemm(a, b)`, scales row-major, on a B200", lambda: nv.gemm(_rowmajor(), _quantized(N, K)),
                  "`to_blocked`.", "sm_100a")  # fmt: skip
    yield Refused("`gemm(…, out=y)`, y a part of x", _overlapping, "Give `out` memory that no operand has.")
    yield Refused("`gemm(…, config=plan)` of another GPU", lambda: nv.gemm(_x(), _weight(), config=object()),
                  "Leave `config` out.")  # fmt: skip
    yield Refused("`grouped_gemm_contiguous(…, offsets=[0, 9, 4])`", _offsets, "Offsets never decrease.")
    yield Refused(
        "a prepared call with another shape", _other_shape, "Prepare one call for each shape, or call `gemm`."
    )
    yield Refused("alpha that requires a gradient", _gradient, "`detach()`, or multiply after the product ([gradients]"
                  "(../how-to/torch.md#gradients)).")  # fmt: skip


def _rowmajor() -> nv.BlockScaledTensor:
    a = _quantized(16, K)
    return nv.BlockScaledTensor(a.data, a.rowmajor_scale()[0].view(torch.float8_e4m3fn), a.global_scale)


def _overlapping() -> Any:
    x = _x()
    return nv.gemm(x, _weight(), out=x[:, :N])


def _offsets() -> Any:
    stack = nv.prepare_weight(_quantized(2, N, K), backend="sim")
    return nv.grouped_gemm_contiguous(_x(), stack, offsets=[0, 9, 4])


def _other_shape() -> Any:
    return nv.prepare(nv.gemm, _x(), _weight(), vary=("a",))(_x(4, K))


def _gradient() -> Any:
    return nv.gemm(_x(), _weight(), alpha=torch.ones((), requires_grad=True))


def quantizations() -> Iterator[Refused]:
    """Refused calls of ``quantize``."""
    yield Refused("`quantize(x)`, K = 264", lambda: nv.quantize(_x(16, 264)), "`pad=True`, for x and for w alike.")
    yield Refused("`quantize(x)` without rows", lambda: nv.quantize(_x(0, K)), "Skip the call.")
    yield Refused("`quantize(x)`, x in float64", lambda: nv.quantize(_x(dtype=torch.float64)), "Convert x.")
    yield Refused(
        '`quantize(x, "fp4")`', lambda: nv.quantize(_x(), "fp4"), "`fp8_e4m3` (rows for W4A8) is a name, too."
    )
    yield Refused("`quantize(x, rule=\"best\")`", lambda: nv.quantize(_x(), rule="best"),
                  "[The rules](../explanation/quantization.md#nvfp4).")  # fmt: skip
    yield Refused("`quantize(x, global_scale=1e-40)`", lambda: nv.quantize(_x(), global_scale=1e-40),
                  "Scale x, or take a scale in this range.")  # fmt: skip


def machines() -> Iterator[Refused]:
    """Refused calls with backends and architectures."""
    yield Refused("`backend=\"cuda\"` with CPU tensors",
                  lambda: nv.gemm(_quantized(16, K), _quantized(N, K), backend="cuda"), "`.cuda()`.")  # fmt: skip
    yield Refused("`backend=\"gpu\"`", lambda: nv.gemm(_quantized(16, K), _quantized(N, K), backend="gpu"),
                  "`auto` is nearly always right.")  # fmt: skip
    yield Refused("`simulating(\"sm_89\")`", lambda: nv.simulating("sm_89").__enter__(),
                  "[Which GPUs](support.md#which-gpus); exact torch runs on all.")  # fmt: skip
    yield Refused('`simulating("sm_120")`', lambda: nv.simulating("sm_120").__enter__(), "Write the letter.")


QUOTED = (
    Quoted("compute capability of …", "runtime/backend.py",
           "The GPU has no kernels here (an A100, an L40S, an RTX 4090). `backend=\"reference\"`, or CPU tensors."),
    Quoted("… is not loaded on … yet, and loading it would break the CUDA graph that is", "runtime/driver.py",
           "Make the same call once before the capture."),
    Quoted("… loading kernel …", "runtime/driver.py",
           "The driver is too old for the cubin: [which drivers](../how-to/installation.md#platforms)."),
    Quoted("cannot … the kernel cache, the kernel is kept in this process only", "runtime/cache.py",
           "A warning: name a folder that can be written, `CUTE_NVFP4_CACHE_DIR` ([where](environment.md#files))."),
    Quoted("Triton asked for the driver of a GPU to launch a kernel", "harness/remote.py",
           "Triton's kernels are judged on a GPU: `--backend cuda`."),
    Quoted("the clock … one of CUDA 13", "sim/clock/tools.py",
           "No ptxas: `pip install -c constraints.txt -e '.[clock]'`. Everything but modelled times works without."),
)  # fmt: skip


def said(refused: Refused) -> str:
    """The type and the message of the error that a call raises; addresses, which differ between runs, become "0x…"."""
    with nv.simulating(refused.arch), planning_only():
        try:
            refused.make()
        except CuteNvfp4Error as error:
            text = re.sub(r"0x[0-9a-f]+", "0x…", " ".join(str(error).split()))
            return f"`{type(error).__name__}` {text}".replace("|", "\\|")
    raise ValueError(f"{refused.call}: got no error, expected one")


def _rows(calls: Iterator[Refused]) -> str:
    return table(["call", "message", "what to do"], [[one.call, said(one), one.mend] for one in calls])


def of_products() -> str:
    """Messages of products and weights."""
    return _rows(products())


def of_quantize() -> str:
    """Messages of ``quantize``."""
    return _rows(quantizations())


def of_machines() -> str:
    """Messages about backends, architectures and what a machine lacks."""
    for one in QUOTED:
        source = (PACKAGE / one.module).read_text(encoding="utf-8")
        if missing := [part.strip() for part in one.words.split("…") if part.strip() not in source]:
            raise ValueError(f"{one.module}: got no {missing}, expected the words of docs/messages.py")
    return _rows(machines()) + "\n" + table(["message", "what to do"], [[one.words, one.mend] for one in QUOTED])
