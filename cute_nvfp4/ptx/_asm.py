"""The one place where ``llvm.inline_asm`` is called."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

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

HALVES = {"float16": "f16", "bfloat16": "bf16"}
"""PTX's names of the 16-bit floating-point types."""


def _call_site() -> ir.Location:
    """The line outside this package that calls one of its functions, which line information names."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__package__") == __package__ or frame.f_globals["__name__"].startswith("cutlass."):
        frame = frame.f_back
    return ir.Location.file(frame.f_code.co_filename, frame.f_lineno, 0)


@dsl_user_op
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

    In ``text``, ``$0 …`` are the results in order, and the operands follow them. ``volatile`` keeps the block in place
    and alive (memory accesses); without it the compiler may merge, move or drop the block (pure arithmetic).
    Results are early-clobber: a block may write one before it has read every operand.
    """
    # the DSL passes a location only where line information is asked for: then it is that of the caller of this package
    at = {"loc": loc and _call_site(), "ip": ip}
    constraints = ",".join([f"=&{_LETTER[t]}" for t in results] + [_LETTER[type(x)] for x in operands])
    types = [t.mlir_type for t in results]
    packed = types[0] if types else None
    if len(types) > 1:
        packed = ir.Type.parse(f"!llvm.struct<({','.join(str(t) for t in types)})>")
    value = llvm.inline_asm(
        packed,
        [x.ir_value(**at) for x in operands],
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        **at,
    )
    if len(types) > 1:
        return [t(llvm.extractvalue(m, value, [i], **at)) for i, (t, m) in enumerate(zip(results, types))]
    return [result(value) for result in results]


def refs(first: int, count: int, *, braces: bool = True) -> str:
    """``{$first, …}``: PTX's vector of ``count`` consecutive operands."""
    text = ", ".join(f"${first + i}" for i in range(count))
    return "{" + text + "}" if braces else text


def literal(value: float) -> str:
    """``value`` as PTX writes single-precision constants."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"
