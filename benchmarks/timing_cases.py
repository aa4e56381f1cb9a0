"""The launches of ``timing.py`` and how to make them, on "cuda" (a GPU or a simulated one)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import timing_examples
import timing_programs
import torch

import cute_nvfp4
from cute_nvfp4 import BlockScaledTensor
from cute_nvfp4.ops.gemv import gemv
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.ops.rmsnorm_quantize import rmsnorm_quantize
from cute_nvfp4.ops.silu_mul_quantize import silu_mul_quantize
from cute_nvfp4.scale_layout import to_blocked


class Case(NamedTuple):
    """One launch: an operation and its sizes. rule: of a quantization; n: of a GEMM with a repacked weight; sizes: all
    sizes of a program ("copy" and so on) or of an example of NVIDIA ("nvidia add")."""

    operation: str
    rows: int = 0
    k: int = 0
    batch: int = 1
    rule: str = ""
    n: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        if self.sizes:
            return f"{self.operation} {' x '.join(map(str, self.sizes))}"
        batch = f" x {self.batch}" if self.batch > 1 else ""
        if self.n:
            return f"{self.operation} {self.rows} x {self.n} x {self.k}{batch}"
        return f"{self.operation} {self.rows} x {self.k}{batch}{' ' + self.rule if self.rule else ''}"


SEEN = (
    Case("gemv", 7168, 16384),
    Case("gemv", 7168, 2048),
    Case("gemv", 7168, 2048, 4),
    Case("gemv", 4096, 4096),
    Case("quantize", 16, 4096, rule="max"),
    Case("quantize", 1024, 4096, rule="max"),
    Case("rmsnorm_quantize", 128, 4096),
    Case("silu_mul_quantize", 128, 4096),
    *(Case("gemv", m, k) for m, k in ((8192, 8192), (4096, 14336), (14336, 4096), (1024, 1024), (2048, 8192))),
    *(Case("gemv", m, k) for m, k in ((128, 256), (512, 16384), (5120, 5120), (28672, 8192))),
    *(Case("gemv", m, k, b) for m, k, b in ((4096, 7168, 8), (1536, 7168, 4), (256, 2048, 16))),
    *(Case("quantize", m, k, rule="max") for m, k in ((1, 4096), (128, 7168), (512, 4096), (2048, 4096), (128, 16384))),
    *(Case("quantize", m, k, rule="four_six_mse") for m, k in ((16, 4096), (128, 7168), (1024, 4096))),
    *(Case("rmsnorm_quantize", m, k) for m, k in ((16, 4096), (128, 7168), (1024, 4096), (512, 8192))),
    *(Case("silu_mul_quantize", m, k) for m, k in ((16, 4096), (128, 7168), (1024, 4096), (512, 14336))),
)

HELD_OUT = (
    *(Case("gemv", m, k) for m, k in ((6144, 4096), (3072, 12288), (2560, 2560), (11008, 4096))),
    *(Case("gemv", m, k, b) for m, k, b in ((4096, 1024, 8), (1024, 8192, 2))),
    *(Case("quantize", m, k, rule="max") for m, k in ((64, 8192), (256, 5120), (768, 2048), (4096, 2048))),
    *(Case("quantize", m, k, rule=r) for m, k, r in ((64, 4096, "four_six_mae"), (256, 4096, "four_six_abs_max"))),
    *(Case("rmsnorm_quantize", m, k) for m, k in ((64, 2048), (256, 8192), (2048, 2048), (32, 16384))),
    *(Case("silu_mul_quantize", m, k) for m, k in ((64, 2048), (256, 8192), (2048, 2048), (32, 11008))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((1, 2048, 4096), (4, 8192, 2048), (8, 4096, 4096), (16, 2048, 8192))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((32, 4096, 4096), (128, 2048, 4096), (192, 4096, 2048))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((512, 2048, 2048), (1024, 2048, 2048))),
)
"""Written on 2026-11-22, before anybody predicted or measured any of them. Known since."""


def _others(kind: str, *which: tuple[str, tuple[int, ...]]) -> tuple[Case, ...]:
    return tuple(Case(kind + name, sizes=sizes) for name, sizes in which)


OTHERS_SEEN = (
    *_others("", ("copy", (1 << 22,)), ("axpy", (1 << 21,)), ("gelu", (1 << 20,)), ("row_sum", (1024, 4096))),
    *_others("", ("column_sum", (1024, 4096)), ("transpose", (1024, 2048))),
    *_others("nvidia ", ("add", (1024, 1024)), ("layer_norm", (512, 2048)), ("sgemm", (256, 256, 64))),
    *_others("nvidia ", ("tensorop_gemm", (512, 512, 256)), ("flash_attention_v2", (1, 256, 4, 64))),
    *_others("nvidia ", ("wgmma_gemm", (512, 512, 512)), ("wgmma_gemm_persistent", (512, 512, 512))),
    *_others("nvidia ", ("fp8_gemm_2xacc", (512, 512, 512)), ("grouped_gemm", (2, 256, 256, 256))),
    *_others("nvidia ", ("fmha", (1, 512, 4, 64))),
)


SEEN_EARLY = (
    *(Case("gemv", m, k) for m, k in ((10240, 4096), (2048, 16384), (7168, 7168))),
    Case("gemv", 1536, 1536, 4),
    *(Case("quantize", m, k, rule="max") for m, k in ((384, 6144), (1536, 4096))),
    Case("quantize", 192, 7168, rule="four_six_mse"),
    *(Case("rmsnorm_quantize", m, k) for m, k in ((512, 4096), (48, 6144))),
    *(Case("silu_mul_quantize", m, k) for m, k in ((512, 4096), (24, 14336))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((2, 6144, 4096), (12, 4096, 2048), (24, 2048, 8192))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((64, 4096, 4096), (256, 2048, 2048), (384, 3072, 2048))),
    *_others("", ("copy", (6 << 20,)), ("axpy", (1 << 22,)), ("gelu", (1 << 22,)), ("row_sum", (512, 8192))),
    *_others("", ("column_sum", (2048, 2048)), ("transpose", (2048, 2048))),
    *_others("nvidia ", ("layer_norm", (1024, 1024)), ("rms_norm", (256, 4096))),
)
"""Meant to be held out, but their measured times were known before they were predicted."""

HELD_OUT_2 = (
    *(Case("gemv", m, k) for m, k in ((9216, 4096), (3584, 18432), (5120, 8192))),
    Case("gemv", 2048, 2048, 4),
    *(Case("quantize", m, k, rule="max") for m, k in ((320, 8192), (1280, 5120))),
    Case("quantize", 160, 6144, rule="four_six_mse"),
    *(Case("rmsnorm_quantize", m, k) for m, k in ((640, 4096), (24, 8192))),
    *(Case("silu_mul_quantize", m, k) for m, k in ((384, 6144), (40, 11008))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((1, 4096, 7168), (6, 6144, 2048), (16, 4096, 4096))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((48, 4096, 2048), (96, 2048, 4096), (320, 2048, 2048))),
    *_others("", ("copy", (5 << 20,)), ("axpy", (3 << 20,)), ("gelu", (3 << 20,)), ("row_sum", (768, 6144))),
    *_others("", ("column_sum", (1536, 3072)), ("transpose", (1536, 2048))),
    *_others("nvidia ", ("add", (2048, 1024)), ("add_fp16", (2048, 2048)), ("layer_norm", (768, 1536))),
    *_others("nvidia ", ("rms_norm", (384, 3072)), ("sgemm", (512, 256, 128)), ("tensorop_gemm", (256, 512, 512))),
    *_others("nvidia ", ("flash_attention_v2", (1, 512, 2, 64)), ("wgmma_gemm", (1024, 512, 512))),
    *_others("nvidia ", ("wgmma_gemm_cluster", (512, 1024, 256)), ("wgmma_gemm_persistent", (1024, 512, 256))),
    *_others("nvidia ", ("fp8_gemm_2xacc", (512, 1024, 1024)), ("grouped_gemm", (3, 256, 512, 256))),
    *_others("nvidia ", ("fmha", (1, 256, 8, 64)), ("fmha_causal", (1, 512, 4, 64))),
)
"""Written on 2026-11-22, before anybody predicted or measured any of them. Known since."""

HELD_OUT_3 = (
    *(Case("gemv", m, k) for m, k in ((7680, 3072), (1280, 12288), (12288, 2048))),
    Case("gemv", 3072, 1536, 6),
    *(Case("quantize", m, k, rule="max") for m, k in ((448, 3072), (96, 12288), (1792, 2560))),
    Case("quantize", 208, 5120, rule="four_six_mse"),
    *(Case("rmsnorm_quantize", m, k) for m, k in ((320, 5120), (80, 3072))),
    *(Case("silu_mul_quantize", m, k) for m, k in ((448, 5120), (56, 7168))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((3, 3072, 3072), (10, 2048, 5120), (40, 3072, 2048))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((112, 3072, 2048), (224, 2048, 3072))),
    *(Case("gated_gemm", m, k, n=n) for m, n, k in ((8, 2048, 2048), (64, 2048, 2048), (192, 1024, 2048))),
    *(Case("grouped_gemm", m, k, b, n=n) for b, m, n, k in ((8, 8, 1024, 2048), (4, 24, 2048, 2048))),
    Case("grouped_gemm", 96, 2048, 3, n=1536),
    *_others("", ("copy", (7 << 20,)), ("axpy", (5 << 20,)), ("gelu", (1 << 21,)), ("row_sum", (384, 7168))),
    *_others("", ("column_sum", (3072, 1024)), ("transpose", (1024, 3072))),
    *_others("nvidia ", ("add", (1536, 1024)), ("add_fp16", (1024, 2048)), ("layer_norm", (640, 2560))),
    *_others("nvidia ", ("rms_norm", (512, 1536)), ("sgemm", (384, 256, 96)), ("tensorop_gemm", (384, 384, 384))),
    *_others("nvidia ", ("flash_attention_v2", (1, 384, 3, 64)), ("wgmma_gemm", (768, 512, 384))),
    *_others("nvidia ", ("wgmma_gemm_cluster", (512, 512, 256)), ("wgmma_gemm_persistent", (768, 512, 512))),
    *_others("nvidia ", ("fp8_gemm_2xacc", (768, 512, 512)), ("grouped_gemm", (2, 256, 384, 256))),
    *_others("nvidia ", ("fmha", (1, 384, 4, 64)), ("fmha_causal", (1, 256, 8, 64))),
)
"""Written on 2026-11-22 at 23:17 UTC, before anybody predicted or measured any of them. Known since."""

HELD_OUT_4 = (
    *(Case("gemv", m, k) for m, k in ((4608, 6144), (1792, 10240), (16384, 1536))),
    Case("gemv", 1280, 2560, 5),
    *(Case("quantize", m, k, rule="max") for m, k in ((576, 2560), (80, 9216))),
    *(Case("quantize", m, k, rule=r) for m, k, r in ((352, 3584, "four_six_mae"),)),
    *(Case("rmsnorm_quantize", m, k) for m, k in ((144, 6144), (1152, 2560))),
    *(Case("silu_mul_quantize", m, k) for m, k in ((144, 7168), (832, 3072))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((1, 5120, 3072), (5, 2560, 4096), (14, 3072, 3584))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((56, 2560, 2560), (160, 2048, 3072), (448, 2048, 2048))),
    *(Case("gated_gemm", m, k, n=n) for m, n, k in ((4, 1536, 3072), (96, 1536, 2048))),
    *(Case("grouped_gemm", m, k, b, n=n) for b, m, n, k in ((6, 12, 1280, 2048), (3, 64, 2048, 1536))),
    *_others("", ("copy", (9 << 20,)), ("axpy", (7 << 20,)), ("gelu", (5 << 20,)), ("row_sum", (1536, 3072))),
    *_others("", ("column_sum", (1280, 2560)), ("transpose", (1280, 2816))),
    *_others("nvidia ", ("add", (896, 2304)), ("add_fp16", (1280, 3328)), ("layer_norm", (896, 2048))),
    *_others("nvidia ", ("layer_norm", (256, 5120)), ("rms_norm", (768, 2560)), ("rms_norm", (192, 6144))),
    *_others("nvidia ", ("sgemm", (256, 384, 160)), ("tensorop_gemm", (512, 384, 320))),
    *_others("nvidia ", ("flash_attention_v2", (1, 448, 2, 64)), ("wgmma_gemm", (640, 768, 320))),
    *_others("nvidia ", ("wgmma_gemm", (384, 1024, 448)), ("wgmma_gemm_cluster", (768, 640, 320))),
    *_others("nvidia ", ("wgmma_gemm_persistent", (640, 512, 384)), ("fp8_gemm_2xacc", (640, 512, 384))),
    *_others("nvidia ", ("fmha", (1, 320, 6, 64)), ("fmha_causal", (1, 448, 3, 64))),
)
"""Written on 2026-11-24 at 20:30 UTC, before anybody predicted or measured any of them. Known since."""

HELD_OUT_5 = (
    *(Case("gemv", m, k) for m, k in ((5376, 4608), (2304, 14336), (20480, 1280))),
    Case("gemv", 1664, 3072, 4),
    *(Case("quantize", m, k, rule="max") for m, k in ((704, 2816), (112, 7680))),
    *(Case("quantize", m, k, rule=r) for m, k, r in ((288, 4608, "four_six_mse"),)),
    *(Case("rmsnorm_quantize", m, k) for m, k in ((208, 5120), (1472, 2048))),
    *(Case("silu_mul_quantize", m, k) for m, k in ((176, 6144), (640, 3584))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((2, 4608, 3072), (7, 3072, 3584), (12, 2560, 5120))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((72, 2560, 3072), (144, 3072, 2048), (416, 2304, 2048))),
    *(Case("gated_gemm", m, k, n=n) for m, n, k in ((6, 2048, 2560), (120, 1280, 2048))),
    *(Case("grouped_gemm", m, k, b, n=n) for b, m, n, k in ((5, 10, 1536, 2048), (3, 80, 1536, 2048))),
    *_others("", ("copy", (13 << 19,)), ("axpy", (3 << 21,)), ("gelu", (7 << 19,)), ("row_sum", (640, 5120))),
    *_others("", ("column_sum", (1792, 2048)), ("transpose", (1408, 2304))),
    *_others("nvidia ", ("add", (1152, 1792)), ("add_fp16", (1536, 2560)), ("layer_norm", (640, 3072))),
    *_others("nvidia ", ("layer_norm", (320, 4096)), ("rms_norm", (1024, 2048)), ("rms_norm", (160, 7168))),
    *_others("nvidia ", ("sgemm", (384, 384, 128)), ("tensorop_gemm", (640, 384, 256))),
    *_others("nvidia ", ("flash_attention_v2", (1, 320, 3, 64)), ("wgmma_gemm", (896, 640, 256))),
    *_others("nvidia ", ("wgmma_gemm", (512, 896, 384)), ("wgmma_gemm_cluster", (1024, 512, 384))),
    *_others("nvidia ", ("wgmma_gemm_persistent", (896, 512, 320)), ("fp8_gemm_2xacc", (896, 512, 384))),
    *_others("nvidia ", ("fmha", (1, 448, 4, 64)), ("fmha_causal", (1, 384, 6, 64))),
)
"""Written on 2026-11-28 at 17:40 UTC, before anybody predicted or measured any of them."""


def operands(case: Case, device: str) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """Random operands of a GEMV."""
    generator = torch.Generator(device=device).manual_seed(1)

    def draw(rows: int) -> BlockScaledTensor:
        size = (case.batch, rows, case.k // 2), (case.batch, rows, case.k // 16)
        data = torch.randint(0, 256, size[0], dtype=torch.uint8, device=device, generator=generator)
        return BlockScaledTensor(
            data, to_blocked(torch.randint(32, 96, size[1], dtype=torch.uint8, device=device, generator=generator))
        )

    return draw(case.rows), draw(1)


def call_of(case: Case, device: str) -> Callable[[], object]:
    """The launch, with its operands made, and with a given output where the operation takes one."""
    if case.sizes:
        word, _, name = case.operation.rpartition(" ")
        return (timing_examples if word else timing_programs).launch_of(name, case.sizes)
    if case.operation == "gemv":
        a, b = operands(case, device)
        return functools.partial(gemv, a, b, out=gemv(a, b)) if device == "cuda" else lambda: gemv(a, b)
    generator = torch.Generator(device=device).manual_seed(1)
    if case.n:
        return gemm_of(case, generator)
    width = case.k * (2 if case.operation == "silu_mul_quantize" else 1)
    x = torch.randn(case.rows, width, generator=generator, device=device).bfloat16()
    scale = torch.tensor(6.1803 / 2688, device=device)
    backend = "cuda" if device == "cuda" else "sim"
    if case.operation == "quantize":
        options = {"rule": case.rule, "global_scale": scale, "backend": backend}
        out = quantize(x, **options) if device == "cuda" else None
        return lambda: quantize(x, **options, out=out)
    if case.operation == "silu_mul_quantize":
        return lambda: silu_mul_quantize(x, global_scale=scale, backend=backend)
    weight = torch.ones(case.k, dtype=torch.bfloat16, device=device)
    return lambda: rmsnorm_quantize(x, weight, global_scale=scale, backend=backend)


def gemm_of(case: Case, generator: torch.Generator) -> Callable[[], object]:
    """W4A16: bf16 times a repacked weight, times two of a gated product, or times one for each group."""
    given = {"device": generator.device, "generator": generator, "dtype": torch.uint8}
    options = {"backend": "cuda" if generator.device.type == "cuda" else "sim"}

    def weight() -> BlockScaledTensor:
        data = torch.randint(0, 256, (case.n, case.k // 2), **given)
        return BlockScaledTensor(data, torch.randint(32, 96, (case.n, case.k // 16), **given))

    def x() -> torch.Tensor:
        return torch.randn(case.rows, case.k, device=generator.device, generator=generator).bfloat16()

    out = [torch.empty(case.rows, case.n, device=generator.device, dtype=torch.bfloat16) for _ in range(case.batch)]
    if case.operation == "grouped_gemm":
        groups = [(x(), cute_nvfp4.prepare_weight(weight())) for _ in range(case.batch)]
        return lambda: cute_nvfp4.grouped_gemm(groups, out=out, **options)
    gated = case.operation == "gated_gemm"
    prepared, operation = (
        cute_nvfp4.prepare_weight(weight(), weight() if gated else None),
        getattr(cute_nvfp4, case.operation),
    )
    rows = x()
    return lambda: operation(rows, prepared, out=out[0], **options)
