"""Compiles the kernels once, and runs them on :class:`shapes.Product`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream

from cute_nvfp4.runtime.compile import CompiledKernel, build

from .dual import gated
from .gemm import Gemm, first
from .group import ADDRESSES, DESCRIPTOR_BYTES, DESCRIPTORS, GroupGemm
from .pair import PairGemm
from .running import ARCH, INT, POINTER, element_pointer, out_pointer, scale_pointer, simulate, word_pointer
from .shapes import Product
from .tile import Tile

GEMM_TILE = Tile()
# three stages: their number need not be a power of two, and two matrices B leave no room for more than four
DUAL_TILE = Tile(products=2, stages=3)
PAIR_TILE = Tile(m=256, pair=True, cluster=(2, 1))
_CLUSTERS, _GROUP_CTAS = 16, 12


@functools.cache
def compile_gemm(tile: Tile, arch: str = ARCH, options: str = "") -> CompiledKernel:
    """The kernel of ``gemm``, or of ``dual`` for a tile with two products."""
    combine = gated if tile.products == 2 else first
    i32, several = cutlass.Int32(1), range(tile.products)
    args = (
        element_pointer(), scale_pointer(), tuple(element_pointer() for _ in several),
        tuple(scale_pointer() for _ in several), out_pointer(), i32, i32, i32, i32, CUstream(0),
    )  # fmt: skip
    return build(Gemm(tile, combine), args, name="gemm", arch=arch, options=options)


@functools.cache
def compile_pair(tile: Tile, arch: str = ARCH, options: str = "") -> CompiledKernel:
    i32 = cutlass.Int32(1)
    args = (
        element_pointer(), scale_pointer(), element_pointer(), scale_pointer(), out_pointer(),
        i32, i32, i32, i32, i32, CUstream(0),
    )  # fmt: skip
    return build(PairGemm(tile), args, name="pair", arch=arch, options=options)


@functools.cache
def compile_group(tile: Tile, arch: str = ARCH, options: str = "") -> CompiledKernel:
    i32 = cutlass.Int32(1)
    args = (
        element_pointer(), scale_pointer(), element_pointer(), scale_pointer(), i32, i32, i32,
        word_pointer(cutlass.Int32, 4), word_pointer(), word_pointer(align=DESCRIPTOR_BYTES), i32, i32, i32,
        CUstream(0),
    )  # fmt: skip
    return build(GroupGemm(tile), args, name="group", arch=arch, options=options)


def run_gemm(product: Product, tile: Tile = GEMM_TILE, **options: Any) -> Any:
    """C of one or two products by ``gemm`` (or ``dual``)."""
    a, bs, kernel = product.a, product.bs, compile_gemm(tile)
    types = [*[POINTER] * (3 + 2 * len(bs)), *[INT] * 4, POINTER]
    values = [a.data.data_ptr(), a.blocked.data_ptr()]
    values += [b.data.data_ptr() for b in bs] + [b.blocked.data_ptr() for b in bs]
    values += [product.c.data_ptr(), *product.sizes, None]
    return simulate(kernel, types, values, product.tensors(), **options)


def run_dual(product: Product, tile: Tile = DUAL_TILE, **options: Any) -> Any:
    """C of two products."""
    return run_gemm(product, tile, **options)


def run_pair(product: Product, tile: Tile = PAIR_TILE, clusters: int = _CLUSTERS, **options: Any) -> Any:
    """C by persistent clusters of CTA pairs."""
    a, (b,) = product.a, product.bs
    types = [*[POINTER] * 5, *[INT] * 5, POINTER]
    pointers = [x.data_ptr() for x in (a.data, a.blocked, b.data, b.blocked, product.c)]
    return simulate(
        compile_pair(tile), types, [*pointers, *product.sizes, clusters, None], product.tensors(), **options
    )


def run_group(products: Sequence[Product], tile: Tile = GEMM_TILE, ctas: int = _GROUP_CTAS, **options: Any) -> Any:
    """Every C of a list of products by one launch."""
    sizes = torch.tensor([p.sizes[:3] for p in products], dtype=torch.int32)
    addresses = torch.tensor(
        [
            [x.data_ptr() for x in (p.a.data, p.a.blocked, p.bs[0].data, p.bs[0].blocked, p.c)] for p in products
        ],
        dtype=torch.int64,
    )  # fmt: skip
    assert addresses.shape[1] == ADDRESSES
    tiles = sum(-(-m // tile.m) * -(-n // tile.n) for m, n, _ in sizes.tolist())
    ctas = min(ctas, tiles)
    # torch aligns to 64 bytes, descriptors lie at multiples of 128
    words = ctas * len(products) * DESCRIPTORS * DESCRIPTOR_BYTES // 8
    room = torch.zeros(words + DESCRIPTOR_BYTES // 8, dtype=torch.int64)
    skip = -room.data_ptr() % DESCRIPTOR_BYTES // 8
    workspace = room[skip : skip + words]
    tensors = {"sizes": (sizes, False), "addresses": (addresses, False), "workspace": (workspace, True)}
    for i, product in enumerate(products):
        tensors |= product.tensors(f"{i}.")
    start = products[0]
    types = [*[POINTER] * 4, *[INT] * 3, *[POINTER] * 3, *[INT] * 3, POINTER]
    values = [*addresses[0, :4].tolist(), *start.sizes[:3]]
    values += [sizes.data_ptr(), addresses.data_ptr(), workspace.data_ptr(), len(products), tiles, ctas, None]
    return simulate(compile_group(tile), types, values, tensors, **options)
