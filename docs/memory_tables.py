"""The tables of docs/reference/memory.md. The script asks the package for the sizes of its operands and plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from table_cells import table

import cute_nvfp4 as nv
from cute_nvfp4.planning import packed
from cute_nvfp4.planning.packed_problem import PackedProblem
from cute_nvfp4.target import architecture

WHOLE, ODD = (1024, 1024), (100, 48)
ROWS = (1, 16, 64, 128, 256, 512, 2048)
N, K = 4096, 14336


def _bytes(of: Any) -> int:
    """The bytes of all tensors of a record."""
    if isinstance(of, torch.Tensor):
        return of.numel() * of.element_size()
    values = (getattr(of, field.name) for field in dataclasses.fields(of))
    return sum(_bytes(value) for value in values if isinstance(value, torch.Tensor))


def _forms(n: int, k: int) -> Iterator[tuple[str, Any]]:
    """Yields the forms in which one can keep a weight (n, k), each with such a weight."""
    w = torch.ones(n, k, dtype=torch.bfloat16)
    yield "bfloat16", w
    for name in ("nvfp4", "mxfp4", "mxfp8"):
        if k % 32 and name != "nvfp4":
            continue
        quantized = nv.quantize(w, name, backend="reference")
        yield f"`quantize(w)`, {name.upper()}", quantized
        yield "`prepare_weight(…)` of it, for 16 bits", nv.prepare_weight(quantized, backend="reference")
        if name != "mxfp8":
            eight = nv.prepare_weight(quantized, dtype=torch.float8_e4m3fn, backend="reference")
            yield "`prepare_weight(…)` of it, for FP8", eight


def weights() -> str:
    """Bits a value of each form of a weight, and the bytes of a weight whose sizes are no multiples of 128."""
    rows = []
    odd = {i: found for i, (_, found) in enumerate(_forms(*ODD))}
    for i, (text, found) in enumerate(_forms(*WHOLE)):
        cell = f"{_bytes(odd[i]):,}" if i in odd else ""
        rows.append([text, f"{8 * _bytes(found) / (WHOLE[0] * WHOLE[1]):.2f}", cell])
    head = ["weight", f"bits a value ({WHOLE[0]} × {WHOLE[1]})", f"bytes of {ODD[0]} × {ODD[1]}"]
    return table(head, rows)


def scratch() -> str:
    """The scratch memory of a product with a prepared weight, by its plan on an H200."""
    arch = architecture("sm_90a")
    rows = []
    for m in ROWS:
        cells = [f"{m} × {N} × {K}"]
        for dtype, more in (("bfloat16", 0), ("float8_e4m3fn", m * K + 4 * m)):
            problem = PackedProblem(m=m, n=N, k=K, dtype=dtype)
            size = packed.choose(problem, arch, arch.sm_count).scratch(N)
            cells.append(f"{(4 * size.floats + 4 * size.flags + more) / 1e6:.2f}")
        rows.append(cells)
    return table(["M × N × K", "W4A16, MB", "W4A8, x in 16 bits, MB"], rows)


def model(of: dict[str, Any]) -> str:
    """The bytes of a whole model's weights, from the record of ``benchmarks/generate.py``."""
    sizes = of["weight_bytes"]
    shown = [f"{value / 1e9:.2f}" for value in sizes.values()]
    return table(["Llama-3.1-8B's shape", *sizes], [["weights, GB", *shown]])
