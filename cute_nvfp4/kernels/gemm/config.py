"""What a GEMM kernel is compiled for, as frozen configurations."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ...formats import FORMATS, Format
from ...target import ARCHITECTURES, Architecture

CTA_ROWS = 128
"""Rows of an output tile that one CTA computes: one for each lane of tensor memory."""
TILE_BYTES = 128
"""Bytes of one row along K in a stage: the longest swizzle, so that TMA needs the fewest boxes."""
MMA_BYTES = 32
"""Bytes of one row along K that one tcgen05.mma reads, for every kind."""
TILE_N = (64, 128, 192, 256)
SM120_TILE_N = (16, 32, 64, 128)
SPLITS = (1, 2, 4, 8)
MAX_CLUSTER = 8
"""Largest number of CTAs in a cluster that every GPU runs (CUDA's portable limit)."""
QUANTIZED = "nvfp4"
"""The name of a quantized output: E2M1 elements, and a scale factor for each block."""
OUT_BYTES: dict[str, float] = {"float16": 2, "bfloat16": 2, "float32": 4, QUANTIZED: 9 / 16}
GATE_NAMES = ("silu", "gelu_tanh", "gelu_erf", "relu", "identity")
INTERLEAVED_ROWS = 128
"""Rows of each of two matrices that lie together where the two alternate: a multiple of the scale atom's rows."""
MIN_EPI_TILE_N = 8
"""Fewest columns of an epilogue tile; a thread has all of them in registers."""
MAX_EPI_TILE_N = 32
"""Most columns of an epilogue tile."""
SM120_EPI_TILE_N = 16
"""Most columns of an epilogue tile of ``mma.sync``, whose accumulators a thread has as neighbours in a row."""


@dataclass(frozen=True)
class Kind:
    """One ``.kind`` of block-scaled tcgen05.mma (PTX ISA, "tcgen05.mma", "block scaling").

    k: elements along K of one instruction; block: elements that share a scale factor; scale_type: bit 23 of the
    instruction descriptor (0 UE4M3, 1 UE8M0); element_types: each operand format and its code in the descriptor.
    """

    name: str
    vector: str
    k: int
    block: int
    scale_type: int
    element_types: tuple[tuple[str, int], ...]

    @property
    def scales(self) -> int:
        """Scale factors of a row that one instruction reads."""
        return self.k // self.block

    @property
    def tile_k(self) -> int:
        """Elements along K in a stage."""
        return self.k * (TILE_BYTES // MMA_BYTES)

    def data_bytes(self, fmt: str) -> int:
        """Bytes of global memory of one row that one instruction reads: half of ``MMA_BYTES`` where four-bit elements
        are unpacked to eight bits in shared memory."""
        return self.k // FORMATS[fmt].elements_per_byte

    def unpacks(self, fmt: str) -> bool:
        """Whether TMA unpacks operands of ``fmt``: sixteen elements to the low half of each sixteen bytes."""
        return self.data_bytes(fmt) < MMA_BYTES


KINDS = (
    Kind("mxf4nvf4", "scale_vec::4X", 64, 16, 0, (("nvfp4", 1),)),
    Kind("mxf4", "scale_vec::2X", 64, 32, 1, (("mxfp4", 1),)),
    Kind("mxf8f6f4", "scale_vec::1X", 32, 32, 1, (("mxfp8", 0), ("mxfp8_e5m2", 1), ("mxfp4", 5))),
)
"""The kinds of tcgen05.mma. If two multiply the same formats, the one with more elements an instruction comes first."""
UNPACKED_K = 128
"""K of an operand that TMA unpacks is a multiple of this, and its addresses and strides are multiples of 32 bytes (PTX
ISA, "Restriction on Tensor Copy instructions")."""


_KIND_OF = {(a, b): kind for kind in reversed(KINDS) for a, _ in kind.element_types for b, _ in kind.element_types}


def kind_of(a_format: str, b_format: str) -> Kind | None:
    """The kind of MMA that multiplies operands of two formats, or None."""
    return _KIND_OF.get((a_format, b_format))


@dataclass(frozen=True, kw_only=True)
class GemmSignature:
    """What a GEMM computes, whatever its sizes. A problem adds the sizes, a configuration adds the tiling.

    It computes ``products`` products A · Bᵀ. a_format, b_format: formats that one ``Kind`` multiplies. out: the
    output's dtype, or "nvfp4" for a quantized one. out_major: the output's contiguous dimension, "n" (row-major) or
    "m". vector: whether its rows (columns, for "m") start at multiples of 16 bytes. bias: "" or the dimension that it
    lies along; bias_dtype: its dtype. factors: device scalars that multiply alpha. products: 2 for two matrices B with
    one A. gate: the function that joins the two. interleaved: whether the two B are one matrix, whose rows alternate in
    blocks of INTERLEAVED_ROWS.
    """

    a_format: str = "nvfp4"
    b_format: str = "nvfp4"
    out: str = "float16"
    out_major: str = "n"
    vector: bool = True
    bias: str = ""
    bias_dtype: str = "float32"
    factors: int = 0
    products: int = 1
    gate: str = ""
    interleaved: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of MMA that multiplies the formats; ``limits`` refuses formats that have none."""
        found = kind_of(self.a_format, self.b_format)
        assert found is not None, (self.a_format, self.b_format)
        return found

    @property
    def formats(self) -> tuple[Format, Format]:
        """The formats of A and of B."""
        return FORMATS[self.a_format], FORMATS[self.b_format]

    @property
    def unpacked(self) -> tuple[bool, bool]:
        """Whether TMA unpacks A, and whether it unpacks B."""
        return self.kind.unpacks(self.a_format), self.kind.unpacks(self.b_format)

    def signature(self, swap: bool = False) -> dict[str, Any]:
        """These fields by name. swap: as a kernel sees them that computes Cᵀ = B · Aᵀ."""
        found = {field.name: getattr(self, field.name) for field in fields(GemmSignature)}
        if swap:
            found |= {"a_format": self.b_format, "b_format": self.a_format}
            found |= {"out_major": _OTHER[self.out_major], "bias": _OTHER[self.bias]}
        return found


_OTHER = {"": "", "n": "m", "m": "n"}


@dataclass(frozen=True, kw_only=True)
class GemmTiling:
    """How a kernel tiles a problem: what a plan decides.

    tile_n: columns of an output tile, which has 128 rows, or 256 with ``pair`` (cta_group::2: two CTAs share an MMA).
    cluster: CTAs along M and N that share loads by multicast. split_k: CTAs of a cluster that share a tile along K and
    reduce through distributed shared memory. stages: of operands in shared memory; acc_stages: of accumulators in
    tensor memory; 0 takes as many as fit (at most two accumulators). scheduler: "static" (work tiles in turn) or
    "stream_k" (equal shares of all k-tiles). raster: the dimension, "m" or "n", along which consecutive tiles lie.
    store: "tma", or "direct" for stores by threads.
    """

    tile_n: int = 128
    pair: bool = False
    cluster: tuple[int, int] = (1, 1)
    split_k: int = 1
    stages: int = 0
    acc_stages: int = 0
    scheduler: str = "static"
    raster: str = "m"
    store: str = "tma"

    @property
    def tiling(self) -> dict[str, Any]:
        """These fields by name."""
        return {name: getattr(self, name) for name in TILING}


TILING = tuple(field.name for field in fields(GemmTiling))


@dataclass(frozen=True, kw_only=True)
class GemmConfig(GemmSignature, GemmTiling):
    """One variant of the kernel: everything the compiled code depends on.

    Each of two products has an accumulator. shared: the operand that both products use: "a", or "b" where A and B are
    swapped.
    """

    arch: Architecture = ARCHITECTURES["sm_100a"]
    shared: str = "a"
    # a GroupedConfig overrides these three
    maps, ragged, table_bytes = "", "", 0

    @property
    def counts(self) -> tuple[int, int]:
        """The number of matrices A and the number of matrices B."""
        return (1, self.products) if self.shared == "a" else (self.products, 1)

    @property
    def ctas(self) -> int:
        """CTAs that share one MMA."""
        return 2 if self.pair else 1

    @property
    def tile_m(self) -> int:
        return CTA_ROWS * self.ctas

    @property
    def tile_k(self) -> int:
        """Elements along K in a stage."""
        return self.kind.tile_k

    @property
    def blocks_k(self) -> int:
        """MMA instructions along K in a stage."""
        return TILE_BYTES // MMA_BYTES

    @property
    def cluster_mnk(self) -> tuple[int, int, int]:
        return (*self.cluster, self.split_k)

    @property
    def cluster_size(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.split_k

    @property
    def slice_n(self) -> int:
        """Columns of a tile that one CTA stores: all of them, or its share where a cluster splits K."""
        return self.tile_n // self.split_k

    @property
    def epi_tile_n(self) -> int:
        """Columns of an epilogue tile."""
        if self.arch.generation == "sm120":
            return min(SM120_EPI_TILE_N, self.tile_n // 4)
        return next(p for p in (MAX_EPI_TILE_N, 16, MIN_EPI_TILE_N) if self.slice_n % p == 0)

    @property
    def out_bytes(self) -> int:
        return OUT_BYTES[self.out]

    def __str__(self) -> str:
        """The configuration as tables show it: ``256x128x256 2sm cluster 2x1 static nvfp4 float16 n-major tma``."""
        words = [f"{self.tile_m}x{self.tile_n}x{self.tile_k}", "2sm" if self.pair else "1sm"]
        words.append(f"cluster {self.cluster[0]}x{self.cluster[1]}")
        words += [f"split {self.split_k}"] if self.split_k > 1 else []
        words += [
            self.scheduler,
            self.a_format if self.a_format == self.b_format else f"{self.a_format}*{self.b_format}",
        ]
        words += [self.out, f"{self.out_major}-major", self.store]
        words += [f"bias {self.bias}"] if self.bias else []
        words += [f"{self.gate} of two {'B' if self.shared == 'a' else 'A'}"] if self.gate else []
        words += ["interleaved"] if self.interleaved else []
        return " ".join(words)


def epilogue_threads(config: GemmConfig) -> int:
    """Threads of a CTA that store its tile: one for each row of tensor memory, or all threads of ``mma.sync`` warps."""
    return 256 if config.arch.generation == "sm120" else CTA_ROWS
