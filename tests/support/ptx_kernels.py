"""Small DSL kernels around single device helpers: every thread reads its words, applies a body, writes its words.

The same kernels run in the simulator and on a GPU: :func:`run`. ``ptx_cases`` has their cases and oracles.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.runtime import make_ptr

from cute_nvfp4.ptx import convert, half, memory
from cute_nvfp4.ptx._asm import asm
from cute_nvfp4.ptx.async_copy import commit_group, copy_async, wait_group
from cute_nvfp4.ptx.mma import mma_m16n8k8_f16, mma_m16n8k32_s8
from cute_nvfp4.ptx.warp import sum_lanes
from cute_nvfp4.runtime.compile import CompiledKernel, build
from cute_nvfp4.runtime.launch import CudaLauncher, SimLauncher
from cute_nvfp4.runtime.template import Template, capture
from cute_nvfp4.target import Architecture, architecture

BLOCK = 128
SHARED_BYTES = 256
L1_POLICIES = ("", "no_allocate", "evict_last", "evict_first")
L2_POLICIES = ("", "evict_first")
LANE_SUMS = (1, 2, 4, 8, 16, 32)
PRMT_MODES = ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")
SHUFFLES = ("up", "down", "bfly", "idx")
# an address for pointers that must not be followed: far from all mapped memory
NOWHERE = 1 << 44


@dataclass(frozen=True)
class Place:
    """What a body may use besides its words: an address in global memory, and SHARED_BYTES of shared memory of its
    own."""

    arch: Architecture
    memory: Any
    shared: Any


def _bits(value: Float32) -> Uint32:
    return asm("mov.b32 $0, $1;", [Uint32], [value])[0]


def _e2m1_f16x2(place: Place, words: list) -> list:
    return convert.e2m1x8_to_f16x2(words[0], place.arch)


def _e2m1_f16x2_table(place: Place, words: list) -> list:
    return convert.e2m1x8_to_f16x2_by_table(words[0])


def _e2m1_s8_apart(place: Place, words: list) -> list:
    # with the table as constants, and in registers
    apart = convert.e2m1x8_to_s8x4_signs_apart
    return apart(words[0]) + apart(words[0], words[1:3])


def _e2m1_s8(place: Place, words: list) -> list:
    return convert.e2m1x8_to_s8x4(words[0])


def _e4m3_f16x2(place: Place, words: list) -> list:
    low = convert.e4m3x2_to_f16x2(Uint16(words[0] & Uint32(0xFFFF)))
    high = convert.e4m3x2_to_f16x2(Uint16(words[0] >> Uint32(16)))
    return [low, high, *convert.e4m3x4_to_f16x2(words[0])]


def _f16x2_f32(place: Place, words: list) -> list:
    return [_bits(x) for x in convert.f16x2_to_f32(words[0])]


def _bits_f32(place: Place, words: list) -> list:
    return [_bits(convert.bits_to_f32(Int32(words[0])))]


def _fma_f16x2(place: Place, words: list) -> list:
    return [half.fma_f16x2(*words), half.mul_f16x2(words[0], words[1])]


def _fma_e2m1x8(place: Place, words: list) -> list:
    # accumulator, word, four f16x2
    return [half.fma_e2m1(words[0], words[1:2], words[2:6], place.arch)]


def _fma_e2m1x16(place: Place, words: list) -> list:
    # accumulator, two words, eight f16x2
    return [half.fma_e2m1(words[0], words[1:3], words[3:11], place.arch)]


def _policies() -> list[dict]:
    return [{"l1": l1, "l2": l2} for l1 in L1_POLICIES for l2 in L2_POLICIES]


def _load(num_bytes: int) -> Callable:
    def body(place: Place, words: list) -> list:
        address = place.memory + Int64(Int32(words[0]))
        return [w for policy in _policies() for w in memory.load_global(address, num_bytes, **policy)]

    return body


def _load_if(num_bytes: int) -> Callable:
    def body(place: Place, words: list) -> list:
        predicate = Int32(words[1])
        away = cutlass.select_(predicate == 0, Int64(NOWHERE), Int64(0))
        address = place.memory + Int64(Int32(words[0])) + away
        return [w for policy in _policies() for w in memory.load_global_if(predicate, address, num_bytes, **policy)]

    return body


def _byte_if(place: Place, words: list) -> list:
    predicate = Int32(words[1])
    away = cutlass.select_(predicate == 0, Int64(NOWHERE), Int64(0))
    return [memory.load_global_byte_if(predicate, place.memory + Int64(Int32(words[0])) + away)]


def _shared(place: Place, words: list) -> list:
    """Stores four words in one, two and four parts, and reads each back in parts of every width."""
    results: list = []
    for i, width in enumerate((4, 8, 16)):
        base = place.shared + 16 * i
        for first in range(0, 4, width // 4):
            memory.store_shared(base + 4 * first, words[first : first + width // 4])
        for read in (4, 8, 16):
            for first in range(0, 16, read):
                results += memory.load_shared(base + first, read)
    return results


def _copy_async(num_bytes: int) -> Callable:
    def body(place: Place, words: list) -> list:
        """Slots of sixteen bytes, filled with ones in advance: whole and masked copies, each with both policies."""
        valid = Int32(words[1])
        away = cutlass.select_(valid == 0, Int64(NOWHERE), Int64(0))
        whole = place.memory + Int64(Int32(words[0]))
        slots = [(whole, None, False), (whole, None, True), (whole + away, valid, False), (whole + away, valid, True)]
        for i in range(len(slots)):
            memory.store_shared(place.shared + 16 * i, [Uint32(0xFFFFFFFF)] * 4)
        for i, (address, size, evict_first) in enumerate(slots):
            copy_async(place.shared + 16 * i, address, num_bytes, size, evict_first=evict_first)
            commit_group()
        wait_group(0)
        return [w for i in range(len(slots)) for w in memory.load_shared(place.shared + 16 * i, 16)]

    return body


def _mma_s8(place: Place, words: list) -> list:
    a, b, c = ([Int32(w) for w in part] for part in (words[:4], words[4:6], words[6:10]))
    return [Uint32(d) for d in mma_m16n8k32_s8(a, b, c)]


def _mma_f16(place: Place, words: list) -> list:
    c = [convert.bits_to_f32(Int32(w)) for w in words[3:7]]
    return [_bits(d) for d in mma_m16n8k8_f16(words[:2], words[2], c)]


def _sum_lanes(place: Place, words: list) -> list:
    value = convert.bits_to_f32(Int32(words[0]))
    return [_bits(sum_lanes(value, width)) for width in LANE_SUMS]


def _prmt(place: Place, words: list) -> list:
    return [asm(f"prmt.b32{mode} $0, $1, $2, $3;", [Uint32], words)[0] for mode in PRMT_MODES]


def _shuffle(place: Place, words: list) -> list:
    """The value, and whether the source lane was in range, for each mode; words: value, lane or distance, bounds."""
    results: list = []
    for mode in SHUFFLES:
        text = f"{{ .reg .pred p; shfl.sync.{mode}.b32 $0|p, $2, $3, $4, -1; selp.b32 $1, 1, 0, p; }}"
        results += asm(text, [Uint32, Uint32], words, volatile=True)
    return results


@dataclass(frozen=True)
class Body:
    """A body: ``apply(place, words)`` takes ``ins`` words and returns ``outs``."""

    apply: Callable[[Place, list], list]
    ins: int
    outs: int


BODIES = {
    "e2m1_f16x2": Body(_e2m1_f16x2, 1, 4),
    "e2m1_f16x2_table": Body(_e2m1_f16x2_table, 1, 4),
    "e2m1_s8_apart": Body(_e2m1_s8_apart, 3, 8),
    "e2m1_s8": Body(_e2m1_s8, 1, 2),
    "e4m3_f16x2": Body(_e4m3_f16x2, 1, 4),
    "f16x2_f32": Body(_f16x2_f32, 1, 2),
    "bits_f32": Body(_bits_f32, 1, 1),
    "fma_f16x2": Body(_fma_f16x2, 3, 2),
    "fma_e2m1x8": Body(_fma_e2m1x8, 6, 1),
    "fma_e2m1x16": Body(_fma_e2m1x16, 11, 1),
    "byte_if": Body(_byte_if, 2, 1),
    "shared": Body(_shared, 4, 36),
    "mma_s8": Body(_mma_s8, 10, 4),
    "mma_f16": Body(_mma_f16, 7, 4),
    "sum_lanes": Body(_sum_lanes, 1, len(LANE_SUMS)),
    "prmt": Body(_prmt, 3, len(PRMT_MODES)),
    "shuffle": Body(_shuffle, 3, 2 * len(SHUFFLES)),
    **{f"load{n}": Body(_load(n), 1, 2 * n) for n in (4, 8, 16, 32)},
    **{f"load{n}_if": Body(_load_if(n), 2, 2 * n) for n in (4, 8, 16, 32)},
    **{f"copy{n}": Body(_copy_async(n), 2, 16) for n in (4, 8, 16)},
}


class PerThread:
    """The kernel of one body: thread t reads x[t, :ins] and writes y[t, :outs]."""

    def __init__(self, body: Body, arch: Architecture) -> None:
        self.body, self.arch = body, arch

    @cute.jit
    def __call__(self, x: cute.Pointer, y: cute.Pointer, data: cute.Pointer, blocks: Int32, stream: CUstream):
        self.kernel(x, y, data).launch(grid=(blocks, 1, 1), block=(BLOCK, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Pointer, y: cute.Pointer, data: cute.Pointer):
        lane, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared = cute.arch.alloc_smem(cutlass.Uint8, BLOCK * SHARED_BYTES, alignment=16).toint()
        self.apply(x, y, data, block * BLOCK + lane, shared + lane * SHARED_BYTES)

    def apply(self, x: cute.Pointer, y: cute.Pointer, data: cute.Pointer, thread: Int32, shared: Int32) -> None:
        ins, outs = self.body.ins, self.body.outs
        source = cute.make_tensor(x, cute.make_layout((ins, 1 << 20), stride=(1, ins)))
        target = cute.make_tensor(y, cute.make_layout((outs, 1 << 20), stride=(1, outs)))
        words = [source[i, thread] for i in range(ins)]
        for i, word in enumerate(self.body.apply(Place(self.arch, data.toint(), shared), words)):
            target[i, thread] = word


ARGUMENT_TYPES = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)


@functools.cache
def compiled(name: str, arch: str) -> CompiledKernel:
    """The kernel of body ``name``."""

    def pointer(dtype: type) -> object:
        return make_ptr(dtype, 4, cute.AddressSpace.gmem, assumed_align=4)

    args = [pointer(Uint32), pointer(Uint32), pointer(cutlass.Uint8), Int32(1), CUstream(0)]
    return build(PerThread(BODIES[name], architecture(arch)), args, name=name, arch=arch)


def template(kernel: CompiledKernel, blocks: int) -> Template:
    """The launch of ``blocks`` CTAs; the addresses x, y and data vary."""
    return capture(kernel, ARGUMENT_TYPES, (0, 0, 0, blocks, 0), (0, 1, 2))


def touched(x: torch.Tensor, y: torch.Tensor, data: torch.Tensor) -> dict[str, tuple[torch.Tensor, bool]]:
    return {"x": (x, False), "y": (y, True), "data": (data, False)}


@functools.cache
def launcher(kernel: CompiledKernel, backend: str, blocks: int) -> CudaLauncher | SimLauncher:
    planned = template(kernel, blocks)
    if backend == "cuda":
        return CudaLauncher(kernel, planned, torch.cuda.current_device())
    return SimLauncher(kernel, planned, functools.partial(template, blocks=blocks), touched)


def run_kernel(
    kernel: CompiledKernel, words: np.ndarray, outs: int, data: np.ndarray | None = None, backend: str = "sim"
) -> np.ndarray:
    """Runs ``kernel`` on ``words`` (threads, ins) of uint32, threads a multiple of 128: (threads, outs)."""
    assert words.dtype == np.uint32 and words.ndim == 2 and len(words) % BLOCK == 0
    device = "cuda" if backend == "cuda" else "cpu"
    x = torch.from_numpy(np.ascontiguousarray(words).view(np.int32)).to(device)
    y = torch.full((len(words), outs), 0x5A5A5A5A, dtype=torch.int32, device=device)
    given = torch.zeros(32, dtype=torch.uint8) if data is None else torch.from_numpy(data)
    # the base is 32-byte aligned, and memory ends with the last byte
    room = torch.empty(given.numel() + 32, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % 32
    place = room[start : start + given.numel()]
    place.copy_(given)
    tensors = x, y, place
    launcher(kernel, backend, len(words) // BLOCK)(tuple(t.data_ptr() for t in tensors), tensors)
    return y.cpu().numpy().view(np.uint32)


def run(name: str, words: np.ndarray, data: np.ndarray | None = None, *, arch: str, backend: str = "sim") -> np.ndarray:
    """Compiles body ``name`` for ``arch`` (once) and runs it."""
    return run_kernel(compiled(name, arch), words, BODIES[name].outs, data, backend)
