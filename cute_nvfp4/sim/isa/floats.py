"""f32, f64, f16, bf16 and packed arithmetic (PTX ISA, "Floating Point", "Half Precision" and "Mixed Precision"
instructions)."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction, Kernel
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, float_form, opcode
from cute_nvfp4.sim.numerics import double, half, single

_MODES = ("rn", "rz", "rm", "rp")
_HALF = ("f16", "f16x2", "bf16", "bf16x2")


def _pair(fn):
    """Returns a function that applies the f32 function ``fn`` to both halves of f32x2 bits."""

    def both(*args):
        parts = [np.ascontiguousarray(a).view("f4").reshape(*a.shape, 2) for a in args]
        return np.ascontiguousarray(fn(*parts)).view("u8")[..., 0]

    return both


def _saturate(x: np.ndarray) -> np.ndarray:
    """Returns ``x`` clamped to [0, 1], with +0 for NaN (``.sat``)."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


def _arithmetic(fn, ftz: bool, sat: bool, exact=None, mode: str = "rn"):
    """Wraps an f32 function with flushing of inputs and output (``ftz``), and saturation (``sat``). ``exact`` returns
    the results in binary64, rounded to odd; it is needed where rounding can make a tiny result normal."""
    if not ftz and not sat:
        return fn

    def wrapped(*args):
        if ftz:
            args = [single.flush(a) for a in args]
        out = fn(*args)
        if ftz:
            out = single.flush_tiny(out, mode, lambda: exact(*args)) if exact else single.flush(out)
        return _saturate(out) if sat else out

    return wrapped


def _half_op(fn, t: str, ftz: bool, sat: bool, relu: bool = False, exact=None):
    """Wraps a function of widened values that returns a rounded array of type ``t``, as ``_arithmetic`` wraps an f32
    function."""

    def wrapped(*args):
        wide = [half.widen(a, t) for a in args]
        if ftz:
            wide = [half.flush_half(w) for w in wide]
        out = fn(*wide)
        if ftz or sat or relu:
            back = half.widen(out, t)
            if ftz:
                back = half.flush_tiny_half(back, lambda: exact(*wide)) if exact else half.flush_half(back)
            back = _saturate(back) if sat else back
            if relu:
                back = np.where(np.isnan(back), back, np.where(back > 0, back, np.float32(0)))
            out = half.narrow(back, t)
        return out

    return wrapped


def _binary(kind: str, mode: str):
    if kind == "mul":
        return lambda a, b: single.mul32(a, b, mode)
    sign = np.negative if kind == "sub" else np.positive
    return lambda a, b: single.add32(a, sign(b), mode)


@float_form("add", "sub", "mul")
def _add(i: Instruction, m: Mods, k: Kernel) -> Op:
    mode = m.take(*_MODES, default="rn")
    ftz, sat = m.flag("ftz"), m.flag("sat")
    t = m.type("f32", "f64", "f32x2", *_HALF)
    if t in ("f32", "f32x2"):
        if t == "f32" and m.left:
            source = m.take("f16", "bf16", required=True)
            plain = _arithmetic(_binary(i.base, mode), ftz, sat)
            if i.base == "mul":
                raise m.refuse("mixed-precision mul does not exist")
            return Op(lambda a, c: plain(half.widen(a, source), c), ("f32",), (source, "f32"), "f32")
        # Sums need no ``exact``: a sum below 2**-126 is exact.
        fn = _arithmetic(_binary(i.base, mode), ftz, sat, single.exact_mul if i.base == "mul" else None, mode)
        return Op(_pair(fn) if t == "f32x2" else fn, (t,), (t, t), "f32")
    if t == "f64":
        if ftz or sat:
            raise m.refuse("f64 arithmetic has no .ftz or .sat")
        fn = {"add": double.add64, "sub": double.sub64, "mul": double.mul64}[i.base]
        return Op(lambda a, b: fn(a, b, mode), (t,), (t, t), "f64")
    if mode != "rn" or (ftz and t.startswith("bf16")):
        raise m.refuse("half precision has .rn only, and .ftz only for f16")
    if i.base == "mul":
        fn = lambda a, b: half.narrow(_exact_product(a, b, t), t)  # noqa: E731
    else:
        sign = np.negative if i.base == "sub" else np.positive
        fn = lambda a, b: half.add_half(a, sign(b), t)  # noqa: E731
    exact = single.exact_mul if i.base == "mul" else None
    return Op(_half_op(fn, t, ftz, sat, exact=exact), (t,), (t, t), "half")


def _exact_product(a, b, t: str):
    """Returns the product of widened values: in f32 for f16, and in binary64 for bf16, whose products can leave the
    exponent range of f32."""
    return a * b if t.startswith("f16") else a.astype("f8") * b.astype("f8")


@opcode("fma")
@float_form("mad")
def _fma(i: Instruction, m: Mods, k: Kernel) -> Op:
    mode = m.take(*_MODES, required=True)
    ftz, sat, relu = m.flag("ftz"), m.flag("sat"), m.flag("relu")
    t = m.type("f32", "f64", "f32x2", *_HALF)
    if t in ("f32", "f32x2"):
        if relu:
            raise m.refuse(".relu is for half precision")
        fn = _arithmetic(lambda a, b, c: single.fma32(a, b, c, mode), ftz, sat, single.exact_fma, mode)
        if t == "f32" and m.left:
            source = m.take("f16", "bf16", required=True)
            return Op(
                lambda a, b, c: fn(half.widen(a, source), half.widen(b, source), c),
                ("f32",),
                (source, source, "f32"),
                "f32",
            )
        return Op(_pair(fn) if t == "f32x2" else fn, (t,), (t, t, t), "f32")
    if t == "f64":
        if ftz or sat or relu:
            raise m.refuse("f64 arithmetic has no .ftz, .sat or .relu")
        return Op(lambda a, b, c: double.fma64(a, b, c, mode), (t,), (t, t, t), "f64")
    if mode != "rn" or (ftz and t.startswith("bf16")):
        raise m.refuse("half precision has .rn only, and .ftz only for f16")
    fn = _half_op(lambda a, b, c: half.fma_half(a, b, c, t), t, ftz, sat, relu, single.exact_fma)
    return Op(fn, (t,), (t, t, t), "half")


@float_form("div")
def _div(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds div. div.approx and div.full, to which the ISA allows 2 ulp, are correctly rounded here, except for the
    large divisors of ``div_approx32``."""
    mode = m.take(*_MODES, "approx", "full", required=True)
    ftz = m.flag("ftz")
    t = m.type("f32", "f64")
    if t == "f64":
        if mode != "rn" or ftz:
            raise m.refuse("f64 division is modelled with .rn only")
        return Op(double.div64, (t,), (t, t), "f64")
    if mode == "approx":
        return Op(_arithmetic(single.div_approx32, ftz, False), (t,), (t, t), "f32")
    mode = mode if mode in _MODES else "rn"
    fn = _arithmetic(lambda a, b: single.div32(a, b, mode), ftz, False, single.exact_div, mode)
    return Op(fn, (t,), (t, t), "f32")


@opcode("sqrt", "rcp")
def _sqrt(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds sqrt and rcp. Their .approx forms, to which the ISA allows 1 ulp, are correctly rounded here."""
    mode = m.take(*_MODES, "approx", required=True)
    ftz = m.flag("ftz")
    t = m.type("f32", "f64")
    if t == "f64":
        if mode not in ("rn", "approx"):
            raise m.refuse("f64 is modelled with .rn only")
        fn = double.sqrt64 if i.base == "sqrt" else lambda a: double.div64(np.ones((1, 1)), a)
        return Op(fn, (t,), (t,), "f64")
    rounding = mode if mode in _MODES else "rn"
    one = np.ones((1, 1), "f4")
    fn = (lambda a: single.sqrt32(a, rounding)) if i.base == "sqrt" else (lambda a: single.div32(one, a, rounding))
    exact = (lambda a: single.exact_div(one, a)) if i.base == "rcp" else None
    wrapped = _arithmetic(fn, ftz, False, exact, rounding)
    return Op(wrapped, (t,), (t,), "special" if mode == "approx" else "f32")


@opcode("ex2", "lg2", "rsqrt", "sin", "cos", "tanh")
def _approximate(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds the approximations, whose errors the ISA bounds. The results are computed in binary64 and rounded once."""
    m.take("approx", required=True)
    ftz = m.flag("ftz")
    t = m.type("f32", "f64", *_HALF)
    base = {
        "ex2": np.exp2,
        "lg2": np.log2,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "sin": np.sin,
        "cos": np.cos,
        "tanh": np.tanh,
    }[i.base]
    if (t == "f64" and i.base != "rsqrt") or (t in _HALF and i.base not in ("ex2", "tanh")):
        raise m.refuse(f"{i.base} does not exist for .{t}")
    if t in _HALF:
        if ftz != (i.base == "ex2" and t.startswith("bf16")):
            raise m.refuse("of these types, ex2 of bf16 has .ftz, and always has it")

        def narrowed(a):
            out = base(half.widen(a, t).astype("f8"))
            # Only ex2 has .ftz here, so that a flushed result is +0 and a flushed input changes none.
            return half.narrow(np.where(out < 2.0**-126, 0, out) if ftz else out, t)

        return Op(narrowed, (t,), (t,), "special")
    fn = lambda a: single.canonical(base(a.astype("f8")).astype(a.dtype))  # noqa: E731
    return Op(_arithmetic(fn, ftz, False), (t,), (t,), "special")


@float_form("min", "max")
def _extremum(i: Instruction, m: Mods, k: Kernel) -> Op:
    ftz, nan, xorsign = m.flag("ftz"), m.flag("NaN"), m.flag("xorsign")
    if xorsign:
        m.take("abs", required=True)
    t = m.type("f32", "f64", *_HALF)
    pick = single.minimum if i.base == "min" else single.maximum

    def two(a, b):
        if not xorsign:
            return pick(a, b, nan)
        sign = np.signbit(a) ^ np.signbit(b)
        return np.where(sign, -1, 1).astype(a.dtype) * pick(np.abs(a), np.abs(b), nan)

    three = len(i.operands) == 4
    if three and (t != "f32" or xorsign):
        raise m.refuse("three inputs are only for .f32 without .xorsign")
    fn = (lambda a, b, c: two(two(a, b), c)) if three else two
    if t in _HALF:
        return Op(_half_op(lambda a, b: half.narrow(two(a, b), t), t, ftz, False), (t,), (t, t), "half")
    return Op(_arithmetic(fn, ftz, False), (t,), (t,) * (3 if three else 2), t)


@float_form("neg", "abs")
def _sign(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds neg and abs. A NaN becomes the canonical NaN (observed on an H200); an f64 NaN keeps sign and payload."""
    ftz = m.flag("ftz")
    t = m.type("f32", "f64", *_HALF)
    negate = i.base == "neg"
    if t in _HALF:
        raw = "b32" if t.endswith("x2") else "b16"
        sign = np.array(0x80008000, "u4") if raw == "b32" else np.array(0x8000, "u2")
        flip = (lambda a: a ^ sign) if negate else (lambda a: a & ~sign)
        if ftz:
            return Op(
                _half_op(lambda a: half.narrow(-a if negate else np.abs(a), t), t, True, False), (t,), (t,), "half"
            )
        return Op(lambda a: half.canonical_half(flip(a), t), (raw,), (raw,), "half")
    fn = np.negative if negate else np.abs
    if t == "f64":
        return Op(lambda a: double.with_nan(fn(a), a), (t,), (t,), t)
    return Op(lambda a: single.canonical(fn(single.flush(a) if ftz else a)), (t,), (t,), t)


@opcode("copysign")
def _copysign(i: Instruction, m: Mods, k: Kernel) -> Op:
    t = m.type("f32", "f64")
    return Op(lambda a, b: np.copysign(b, a), (t,), (t, t), t)


@opcode("testp")
def _testp(i: Instruction, m: Mods, k: Kernel) -> Op:
    kind = m.take("finite", "infinite", "number", "notanumber", "normal", "subnormal", required=True)
    t = m.type("f32", "f64")
    tiny = {"f32": 2.0**-126, "f64": 2.0**-1022}[t]
    fns = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= tiny),
        "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
    }
    return Op(fns[kind], ("pred",), (t,), "compare")
