"""The shapes that ``gemm.py`` measures, their sources, and the floor of each. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 16
"""Elements of NVFP4 that share a scale of one byte."""


class Shape(NamedTuple):
    """Products with weights (N, K) in NVFP4; ``m`` has the rows of each group (one, unless it is a grouped product).

    problem: "dense", "gated" (two weights, silu(gate) · up) or "grouped" (weights for each group). name: the layer's
    name, if the shape comes from a model.
    """

    problem: str
    m: tuple[int, ...]
    n: int
    k: int
    name: str = ""

    @property
    def products(self) -> int:
        """How many products share the same activations."""
        return 2 if self.problem == "gated" else 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of elements and scales, each read once."""
        return len(self.m) * self.products * self.n * (self.k // 2 + self.k // BLOCK)

    @property
    def flop(self) -> int:
        """Additions and multiplications of the products."""
        return 2 * sum(self.m) * self.products * self.n * self.k

    def __str__(self) -> str:
        rows = str(self.m[0]) if len(self.m) == 1 else "+".join(map(str, self.m))
        return f"{rows}, {self.n}, {self.k}"


class Ceilings(NamedTuple):
    """What floors consist of, measured: the rates of a device copy (read and written) and of a large bf16 product, and
    the time of a tiny kernel."""

    copy_bytes_s: float
    dense_flop_s: float
    launch_us: float


MEASURED = {"H200": Ceilings(4.26e12, 790e12, 3.0)}
"""Ceilings for ``--dry-run``, from runs on 2026-11-22 (torch 2.11.0+cu130, driver 580). A real run measures its own."""


def floor_us(shape: Shape, ceilings: Ceilings) -> float:
    """A lower bound in µs: the longer of reading all weights once and computing all products, plus a launch."""
    return (
        1e6 * max(shape.weight_bytes / ceilings.copy_bytes_s, shape.flop / ceilings.dense_flop_s) + ceilings.launch_us
    )


class Model(NamedTuple):
    """The sizes in a model's ``config.json``: hidden_size, intermediate_size, num_attention_heads, …"""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    def layers(self) -> Iterator[tuple[str, int, int]]:
        """Name, N and K of the products of a decoder layer, fused as inference engines fuse them."""
        yield "qkv", (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden
        yield "o", self.hidden, self.heads * self.head_dim
        yield "gate_up", 2 * self.intermediate, self.hidden
        yield "down", self.hidden, self.intermediate


MODELS = {
    # huggingface.co/meta-llama/Llama-3.1-8B and -70B, config.json
    "Llama-3.1-8B": Model(4096, 14336, 32, 8, 128),
    "Llama-3.1-70B": Model(8192, 28672, 64, 8, 128),
    # huggingface.co/Qwen/Qwen3-8B and -32B, config.json
    "Qwen3-8B": Model(4096, 12288, 32, 8, 128),
    "Qwen3-32B": Model(5120, 25600, 64, 8, 128),
}
MODEL_ROWS = (1, 16, 128, 2048)
SWEEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)


def model_shapes() -> Iterator[Shape]:
    """Yields every layer of every model for a few batch sizes, each shape once."""
    names: dict[tuple[int, int], list[str]] = {}
    for model, sizes in MODELS.items():
        for layer, n, k in sizes.layers():
            names.setdefault((n, k), []).append(f"{model} {layer}")
    for (n, k), layers in names.items():
        for m in MODEL_ROWS:
            yield Shape("dense", (m,), n, k, ", ".join(layers))


SETS = {
    # the benchmark shapes of GPU MODE's NVFP4 hackathon: its gemm, dual_gemm and group_gemm problems
    "contest": [Shape("dense", (128,), n, k) for n, k in ((7168, 16384), (4096, 7168), (7168, 2048))],
    "m-sweep": [Shape("dense", (m,), 8192, 8192) for m in SWEEP_ROWS],
    # where cuBLAS was ahead in bfloat16, and rows between those of the other sets
    "gaps": [Shape("dense", (m,), n, k) for m, n, k in ((200, 6144, 4096), (1000, 4096, 4096), (512, 4096, 7168))],
    "models": list(model_shapes()),
    "gated": [
        Shape("gated", (m,), n, k)
        for m, n, k in ((256, 4096, 7168), (512, 4096, 7168), (256, 3072, 4096), (512, 3072, 7168))
    ],
    "grouped": [
        Shape("grouped", m, n, k)
        for m, n, k in (
            ((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168),
            ((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048),
            ((192, 320), 3072, 4096),
            ((128, 384), 4096, 1536),
        )
    ],
}
