"""The table of docs/reference/shapes.md: which M, N and K each call takes, and the message for other sizes.

The script asks the package: it checks and plans calls of many sizes for each architecture, and neither compiles nor
launches. It probes sizes above a base, of which every kernel takes the multiples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import cute_nvfp4 as nv
from cute_nvfp4.errors import CuteNvfp4Error
from cute_nvfp4.runtime.kernel import planning_only

ARCHS = {"sm_100a": "B200, B300", "sm_90a": "H100, H200", "sm_120a": "RTX 50, GB10"}
"""One architecture of each generation: all architectures of a generation have the same limits."""
BASE = {"M": 128, "N": 256, "K": 256}
STEPS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Call:
    """A call of the table. operands: in a reader's words; call: makes the call from M, N and K."""

    name: str
    operands: str
    call: Callable[[int, int, int], Any]
    sizes: str = "MNK"


@functools.cache
def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16)


def _block(format: str, *shape: int) -> nv.BlockScaledTensor:
    found = nv.quantize(_ones(*shape), format)  # planned but not launched: its memory is uninitialized
    found.data.zero_()
    found.scale.zero_()
    return found


def _prepared(format: str, n: int, k: int, dtype: torch.dtype = torch.bfloat16, both: bool = False) -> Any:
    weights = [_block(format, n, k)] * (1 + both)
    return nv.prepare_weight(*weights, dtype=dtype, backend="sim")


def calls() -> Iterator[Call]:
    """Yields the calls; those of an operation stand together."""
    yield Call("gemv", "NVFP4", lambda m, n, k: nv.gemv(_block("nvfp4", m, k), _block("nvfp4", 1, k)), "MK")
    for a, b in (("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"), ("mxfp8", "mxfp4")):
        text = f"{a.upper()} × {b.upper()}"
        yield Call("gemm", text, lambda m, n, k, a=a, b=b: nv.gemm(_block(a, m, k), _block(b, n, k)))
    for format in ("nvfp4", "mxfp4", "mxfp8"):
        text = f"bf16 × {format.upper()}, prepared"
        yield Call("gemm", text, lambda m, n, k, f=format: nv.gemm(_ones(m, k), _prepared(f, n, k)))
    eight = torch.float8_e4m3fn
    yield Call("gemm", "FP8 × NVFP4, prepared", lambda m, n, k: nv.gemm(_ones(m, k), _prepared("nvfp4", n, k, eight)))
    yield Call("gated_gemm", "NVFP4 × NVFP4", lambda m, n, k: nv.gated_gemm(
        _block("nvfp4", m, k), _block("nvfp4", n, k), _block("nvfp4", n, k)))  # fmt: skip
    yield Call("gated_gemm", "bf16 × NVFP4, prepared", lambda m, n, k: nv.gated_gemm(
        _ones(m, k), _prepared("nvfp4", n, k, both=True)))  # fmt: skip
    yield Call("gated_gemm", "bf16 × NVFP4, prepared, quantized output", lambda m, n, k: nv.gated_gemm(
        _ones(m, k), _prepared("nvfp4", n, k, both=True), out_global_scale=1.0))  # fmt: skip
    yield Call("grouped_gemm", "NVFP4 × NVFP4", lambda m, n, k: nv.grouped_gemm(
        [(_block("nvfp4", m, k), _block("nvfp4", n, k))] * 2))  # fmt: skip
    yield Call("grouped_gemm", "bf16 × NVFP4, prepared", lambda m, n, k: nv.grouped_gemm(
        [(_ones(m, k), _prepared("nvfp4", n, k))] * 2))  # fmt: skip
    yield Call("grouped_gemm_contiguous", "NVFP4 × NVFP4", lambda m, n, k: nv.grouped_gemm_contiguous(
        nv.GroupedRows.of(_block("nvfp4", m, k), [0, m]), _block("nvfp4", 1, n, k)))  # fmt: skip
    yield Call("grouped_gemm_contiguous", "bf16 × NVFP4, prepared", lambda m, n, k: nv.grouped_gemm_contiguous(
        _ones(m, k), nv.prepare_weight(_block("nvfp4", 1, n, k), backend="sim"), offsets=[0, m]))  # fmt: skip
    for format in ("nvfp4", "mxfp4", "mxfp8", "fp8_e4m3"):
        text = f"bf16 → {format.upper()}"
        yield Call("quantize", text, lambda m, n, k, f=format: nv.quantize(_ones(m, k), f), "MK")


def _fused() -> Iterator[Call]:
    """Yields the calls that are fused with quantization."""
    for format in ("nvfp4", "mxfp4"):
        given = {"global_scale": 1.0 if format == "nvfp4" else None, "format": format}
        text = f"bf16 → {format.upper()}"
        yield Call(
            "rmsnorm_quantize", text, lambda m, n, k, g=given: nv.rmsnorm_quantize(_ones(m, k), _ones(k), **g), "MK"
        )
        yield Call(
            "silu_mul_quantize",
            text,
            lambda m, n, k, g=given: nv.silu_mul_quantize(_ones(m, k), _ones(m, k), **g),
            "MK",
        )


def refusal(call: Call, sizes: dict[str, int], arch: str) -> str:
    """The package's message for a call of these sizes, or an empty string if a kernel takes it."""
    with nv.simulating(arch), planning_only():
        try:
            call.call(sizes["M"], sizes["N"], sizes["K"])
        except CuteNvfp4Error as error:
            return " ".join(str(error).split())
    return ""


def limit(call: Call, size: str, arch: str) -> tuple[int, str]:
    """The smallest step above the base that the call takes, and the message for half of it; 1 and "" if it takes any
    size."""
    said = ""
    for step in STEPS:
        found = refusal(call, BASE | {size: BASE[size] + step}, arch)
        if not found:
            return step, said
        said = found
    raise ValueError(f"{call.name} of {call.operands} on {arch}: got no {size} that is taken: {said}")


def markdown() -> str:
    """The table: a row for each call and for the architectures on which its limits are the same."""
    lines = ["| call | operands | on | M | N | K | message for a size between |", "|---|---|---|---|---|---|---|"]
    for call in (*calls(), *_fused()):
        found: dict[tuple, list[str]] = {}
        for arch, name in ARCHS.items():
            if not refusal(call, BASE, arch):
                limits = tuple((size, *limit(call, size, arch)) for size in call.sizes)
                found.setdefault(limits, []).append(name)
        for limits, names in found.items():
            steps = {size: "any" if step == 1 else f"multiple of {step}" for size, step, _ in limits}
            said = dict.fromkeys(message.replace("|", "\\|") for _, _, message in limits if message)
            where = "all" if len(names) == len(ARCHS) else "; ".join(names)
            cells = [steps.get(size, "–") for size in "MNK"]
            messages = " ".join(said)  # not as code, so that a browser may break the line
            lines.append("| " + " | ".join([f"`{call.name}`", call.operands, where, *cells, messages]) + " |")
    return "\n".join(lines) + "\n"
