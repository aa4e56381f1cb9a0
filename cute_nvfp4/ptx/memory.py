"""Loads and stores, with L1 and L2 policies. Global addresses are 64-bit, in bytes; shared addresses are 32-bit.

The policies are performance hints (PTX ISA, "Cache Eviction Priority Hints"); the values loaded do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from ._asm import asm, refs

# Only 256-bit loads (PTX 8.8, sm_100 or later) take an L2 policy as a suffix. Narrower loads take it as an operand:
# this is what ``createpolicy.fractional.L2::evict_first.b64 p, 1.0`` returns.
EVICT_FIRST_POLICY = 0x12F0000000000000

_L1 = {"": "", "no_allocate": ".L1::no_allocate", "evict_last": ".L1::evict_last", "evict_first": ".L1::evict_first"}
_SUFFIX = {4: ".b32", 8: ".v2.b32", 16: ".v4.b32", 32: ".v8.b32"}


def _instruction(num_bytes: int, l1: str, l2: str, first_operand: int) -> str:
    """The ``ld`` of ``num_bytes`` from the address in operand ``first_operand``, with its cache policies."""
    if num_bytes not in _SUFFIX:
        raise ValueError(f"bytes of a load: got {num_bytes}, expected one of {list(_SUFFIX)}")
    if l2 not in ("", "evict_first"):
        raise ValueError(f"L2 policy: got {l2!r}, expected '' or 'evict_first'")
    words = num_bytes // 4
    target = refs(0, words) if words > 1 else "$0"
    if num_bytes == 32:
        level2 = f".L2::{l2}" if l2 else ""
        return f"ld.global{_L1[l1]}{level2}{_SUFFIX[num_bytes]} {target}, [${first_operand}];"
    if l2:
        policy = f"0x{EVICT_FIRST_POLICY:X}"
        head = f"{{ .reg .b64 policy; mov.b64 policy, {policy}; ld.global{_L1[l1]}.L2::cache_hint"
        return f"{head}{_SUFFIX[num_bytes]} {target}, [${first_operand}], policy; }}"
    return f"ld.global{_L1[l1]}{_SUFFIX[num_bytes]} {target}, [${first_operand}];"


def load_global(address: Int64, num_bytes: int, *, l1: str = "", l2: str = "") -> list[Uint32]:
    """Loads 4, 8, 16 or 32 bytes as 32-bit words. The address is a multiple of ``num_bytes``.

    l1: "", "no_allocate", "evict_last" or "evict_first" (PTX 7.4, sm_80). l2: "" or "evict_first", a cache hint (PTX
    7.4, sm_80). 32 bytes are one ``ld.global.v8.b32`` (PTX 8.8, sm_100 or later). The load is volatile, so that it
    stays ahead of the arithmetic that hides its latency.
    """
    text = _instruction(num_bytes, l1, l2, num_bytes // 4)
    return asm(text, [Uint32] * (num_bytes // 4), [Int64(address)], volatile=True)


def load_global_if(predicate: Any, address: Int64, num_bytes: int, *, l1: str = "", l2: str = "") -> list[Uint32]:
    """Loads as :func:`load_global` does where ``predicate`` (an Int32, not a Boolean) is not zero; zeros elsewhere.

    Where the predicate is zero nothing is read, so that the address may be invalid.
    """
    words = num_bytes // 4
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(words))
    body = _instruction(num_bytes, l1, l2, words).lstrip("{ ").removesuffix("}")
    declaration, separator, load = body.rpartition("ld.global")
    text = f"{{ .reg .pred p; {declaration} setp.ne.b32 p, ${words + 1}, 0; {zeros} @p {separator}{load} }}"
    operands = [Int64(address), Int32(predicate)]
    return asm(text, [Uint32] * words, operands, volatile=True)


def load_shared(address: Int32, num_bytes: int) -> list[Uint32]:
    """Loads 4, 8 or 16 bytes of shared memory as 32-bit words; the address is a multiple of ``num_bytes`` (PTX 1.0)."""
    words = num_bytes // 4
    target = refs(0, words) if words > 1 else "$0"
    text = f"ld.shared{_SUFFIX[num_bytes]} {target}, [${words}];"
    return asm(text, [Uint32] * words, [Int32(address)], volatile=True)


def store_shared(address: Int32, words: Sequence[Any]) -> None:
    """Stores one, two or four 32-bit words to shared memory, at a multiple of their bytes (PTX 1.0)."""
    source = refs(1, len(words)) if len(words) > 1 else "$1"
    text = f"st.shared{_SUFFIX[4 * len(words)]} [$0], {source};"
    asm(text, [], [Int32(address), *map(Uint32, words)], volatile=True)


def load_global_byte_if(predicate: Any, address: Int64) -> Uint32:
    """Loads one byte, zero-extended, where ``predicate`` (an Int32) is not zero; zero elsewhere (PTX 1.0)."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.u8 $0, [$1]; }"
    return asm(text, [Uint32], [Int64(address), Int32(predicate)], volatile=True)[0]


def load_shared_floats(address: Int32) -> list[Float32]:
    """Loads four floats of shared memory, 16-byte aligned (PTX 1.0)."""
    text = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
    return asm(text, [Float32] * 4, [Int32(address)], volatile=True)


def load_flag(address: Int64) -> Int32:
    """Loads a word of global memory. Later reads see what :func:`store_flag`'s thread had written before that word.

    ``ld.acquire.gpu`` (PTX ISA, "Memory Consistency Model"; sm_70 or later).
    """
    return asm("ld.acquire.gpu.global.b32 $0, [$1];", [Int32], [Int64(address)], volatile=True)[0]


def store_flag(address: Int64, value: Int32) -> None:
    """Stores a word of global memory after every write that this thread has observed (``st.release.gpu``)."""
    text = "st.release.gpu.global.b32 [$0], $1;"
    asm(text, [], [Int64(address), Int32(value)], volatile=True)


def store_global(address: Any, words: Sequence[Any]) -> None:
    """Stores one, two or four 32-bit words to global memory, at a multiple of their bytes (PTX 1.0)."""
    source = refs(1, len(words)) if len(words) > 1 else "$1"
    suffix = {1: ".b32", 2: ".v2.b32", 4: ".v4.b32"}[len(words)]
    asm(f"st.global{suffix} [$0], {source};", [], [Int64(address), *map(Uint32, words)], volatile=True)


def store_global_byte(address: Any, word: Uint32) -> None:
    """Stores the low byte of ``word`` to global memory (PTX 1.0)."""
    asm("st.global.b8 [$0], $1;", [], [Int64(address), Uint32(word)], volatile=True)


def add_16bit_global(address: Any, words: Sequence[Any], dtype: str) -> None:
    """Adds eight bfloat16 or float16 values to global memory, each sum rounded; the address is a multiple of 16.
    ``red.global.add.noftz.v4``: PTX 8.1, sm_90 or later."""
    pair = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    text = f"red.relaxed.gpu.global.add.noftz.v4.{pair} [$0], {refs(1, 4)};"
    asm(text, [], [Int64(address), *map(Uint32, words)], volatile=True)


def atomic_max_global(address: Any, value: Uint32) -> None:
    """Raises a word of global memory to ``value`` if that is larger. PTX 1.2: ``red.global.max.u32``."""
    text = "red.relaxed.gpu.global.max.u32 [$0], $1;"
    asm(text, [], [Int64(address), Uint32(value)], volatile=True)


def load_system(address: Any) -> list[Uint32]:
    """Loads four 32-bit words that other devices write, 16-byte aligned. The load bypasses L1; each word is whole, and
    nothing orders it with other loads. ``ld.relaxed.sys`` (PTX ISA, "Memory Consistency Model"; sm_70 or later)."""
    text = f"ld.relaxed.sys.global.v4.b32 {refs(0, 4)}, [$4];"
    return asm(text, [Uint32] * 4, [Int64(address)], volatile=True)


def store_system(address: Any, words: Sequence[Any]) -> None:
    """Stores four 32-bit words, 16-byte aligned, to memory that other devices read or own: ``st.relaxed.sys``."""
    text = f"st.relaxed.sys.global.v4.b32 [$0], {refs(1, 4)};"
    asm(text, [], [Int64(address), *map(Uint32, words)], volatile=True)
