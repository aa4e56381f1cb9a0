"""The one place where ``llvm.inline_asm`` is called."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

# constraint letter of each register type: PTX .b32/.s32/.u32, .b64, .b16, .f32
_LETTER = {
    cutlass.Uint32: "r",
    cutlass.Int32: "r",
    cutlass.Uint64: "l",
    cutlass.Int64: "l",
    cutlass.Uint16: "h",
    cutlass.Int16: "h",
    cutlass.Float32: "f",
}


def asm(
    text: str,
    results: Sequence[type],
    operands: Sequence[Any],
    *,
    volatile: bool = False,
    loc: Any = None,
    ip: Any = None,
) -> list[Any]:
    """Emits ``text`` and returns its results as DSL values.

    In ``text`` results are ``$0 …`` in order, operands follow. ``volatile`` keeps the block in place and alive
    (memory accesses); without it the compiler may merge, move or drop the block (pure arithmetic).
    Results are early-clobber: a block may write one before it has read every operand.
    """
    constraints = ",".join([f"=&{_LETTER[t]}" for t in results] + [_LETTER[type(x)] for x in operands])
    types = [t.mlir_type for t in results]
    if not types:
        packed = None
    elif len(types) == 1:
        packed = types[0]
    else:
        packed = ir.Type.parse(f"!llvm.struct<({','.join(str(t) for t in types)})>")
    value = llvm.inline_asm(
        packed,
        [x.ir_value(loc=loc, ip=ip) for x in operands],
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not types:
        return []
    if len(types) == 1:
        return [results[0](value)]
    return [t(llvm.extractvalue(m, value, [i], loc=loc, ip=ip)) for i, (t, m) in enumerate(zip(results, types))]


def refs(first: int, count: int, *, braces: bool = True) -> str:
    """``{$first, …}``: a vector of ``count`` operands."""
    text = ", ".join(f"${first + i}" for i in range(count))
    return "{" + text + "}" if braces else text


def literal(value: float) -> str:
    """``value`` as PTX writes single-precision constants."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"
