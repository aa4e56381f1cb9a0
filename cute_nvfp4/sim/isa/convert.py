"""cvt: conversions between numeric types, scalar and packed (PTX ISA, "cvt"). cvt.pack is not modelled."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction, Kernel
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, bits, opcode
from cute_nvfp4.sim.numerics import half, narrow, single

_INTS = tuple(f"{k}{n}" for k in "us" for n in (8, 16, 32, 64))
_FLOATS = ("f16", "bf16", "f32", "f64")
_PACKED = ("f16x2", "bf16x2", "e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2", "ue8m0x2", "tf32")
_NARROW = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2")
_TO_INT = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_ROUND = ("rn", "rz", "rm", "rp", "rna")


@opcode("cvt")
def _cvt(i: Instruction, m: Mods, k: Kernel) -> Op:
    rounding = m.take(*_TO_INT, *_ROUND, "rs")
    if rounding == "rs":
        raise m.refuse("stochastic rounding is not modelled")
    finite, relu = m.flag("satfinite"), m.flag("relu")
    finite = finite or m.flag("satfinite")
    ftz, sat = m.flag("ftz"), m.flag("sat")
    d = m.type(*_INTS, *_FLOATS, *_PACKED)
    s = m.type(*_INTS, *_FLOATS, *_PACKED)
    if d in _PACKED or s in _PACKED:
        if ftz or sat:
            raise m.refuse("packed conversions have no .ftz or .sat")
        return Op(*_packed(d, s, rounding, finite, relu, m), "convert", relaxed=True)
    if relu or finite:
        if s not in ("f32",) or d not in ("f16", "bf16"):
            raise m.refuse(".relu and .satfinite are for f32 to f16 or bf16 here")
    if d in _INTS and s in _INTS:
        return Op(_int_to_int(d, sat, rounding, m), (d,), (s,), "convert", relaxed=True)
    if d in _INTS:
        return Op(_float_to_int(d, s, rounding, ftz, m), (d,), (s,), "convert", relaxed=True)
    if s in _INTS:
        return Op(_int_to_float(d, rounding, sat, m), (d,), (s,), "convert", relaxed=True)
    return Op(_float_to_float(d, s, rounding, ftz, sat, finite, relu, m), (d,), (s,), "convert", relaxed=True)


def _numpy(t: str) -> np.dtype:
    return np.dtype(("i" if t[0] == "s" else "u") + str(bits(t) // 8))


def _int_to_int(d: str, sat: bool, rounding: str, m: Mods):
    if rounding:
        raise m.refuse("an integer conversion does not round")
    target = _numpy(d)
    if not sat:
        return lambda a: a.astype(target)
    info = np.iinfo(target)

    def fn(a):
        source = np.iinfo(a.dtype)
        low, high = max(info.min, source.min), min(info.max, source.max)
        return np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(target)

    return fn


def _float_to_int(d: str, s: str, rounding: str, ftz: bool, m: Mods):
    """Returns the conversion, which always saturates. NaN gives 0; in a 64-bit result, or a 32-bit result from f64, it
    gives only the highest bit."""
    if rounding not in _TO_INT:
        raise m.refuse("a conversion to an integer needs .rni, .rzi, .rmi or .rpi")
    target, integral = _numpy(d), _TO_INT[rounding]
    info = np.iinfo(target)

    def fn(a):
        x = half.widen(a, s)
        x = (single.flush(x) if ftz else x).astype("f8")
        r = integral(x)
        low, high = float(info.min), float(info.max)
        inside = (r >= low) & (r < high if bits(d) == 64 else r <= high)
        out = np.where(inside, r, 0.0).astype(target)
        out = np.where(r > low, np.where(inside, out, info.max), info.min).astype(target)
        nan = target.type(0)
        if bits(d) == 64 or (bits(d) == 32 and s == "f64"):
            # Observed on an H200; the ISA specifies it for .s64 and .u64 only.
            nan = np.array(1 << bits(d) - 1, f"u{target.itemsize}").view(target)[()]
        return np.where(np.isnan(x), nan, out)

    return fn


def _int_to_float(d: str, rounding: str, sat: bool, m: Mods):
    if rounding not in ("rn", "rz", "rm", "rp"):
        raise m.refuse("an integer to float conversion needs .rn, .rz, .rm or .rp")

    def fn(a):
        if d == "f64":
            if a.dtype.itemsize == 8 and rounding != "rn":
                raise m.refuse("64-bit integers to f64 are modelled with .rn only")
            out = a.astype("f8")
        elif d == "f32":
            out = a.astype("f4") if rounding == "rn" else single.to_single(_odd(a), rounding)
        else:
            out = half.narrow(_odd(a), d, rounding)
        if sat:
            wide = half.widen(out, d)
            clamped = np.where(wide > 0, np.minimum(wide, 1), 0).astype(wide.dtype)
            out = clamped if d in ("f32", "f64") else half.narrow(clamped, d)
        return out

    return fn


def _odd(a: np.ndarray) -> np.ndarray:
    """Returns integers in binary64, rounded to odd where they have more than 53 bits."""
    if a.dtype.itemsize < 8:
        return a.astype("f8")
    negative = a < 0 if a.dtype.kind == "i" else np.zeros(a.shape, bool)
    magnitude = np.where(negative, np.negative(a), a).view("u8")
    sticky = (magnitude & np.uint64(0xFFF) != 0).astype("u8") << np.uint64(12)
    cut = np.where(magnitude >> np.uint64(53) != 0, (magnitude & ~np.uint64(0xFFF)) | sticky, magnitude)
    out = cut.astype("f8")
    return np.where(negative, -out, out)


def _float_to_float(d: str, s: str, rounding: str, ftz: bool, sat: bool, finite: bool, relu: bool, m: Mods):
    narrowing = bits(d) < bits(s) or {d, s} == {"f16", "bf16"}
    if narrowing and rounding not in ("rn", "rz", "rm", "rp"):
        raise m.refuse("a narrowing conversion needs a rounding mode")
    if rounding in _ROUND and not narrowing and d != s:
        raise m.refuse("a widening conversion does not round")
    same = d == s
    if same and rounding not in ("", *_TO_INT):
        raise m.refuse("a conversion between equal types rounds to an integer or not at all")

    def fn(a):
        if s == "bf16" and d == "f32" and not (ftz or sat or relu):
            # The conversion is a shift, which does not change NaNs.
            return half.widen(a, s)
        x = half.widen(a, s)
        if ftz and s == "f32":
            x = single.canonical(single.flush(x))
        if rounding in _TO_INT:
            x = _TO_INT[rounding](x)
        if relu:
            x = np.where(np.isnan(x), x, np.where(x > 0, x, x.dtype.type(0)))
        if sat:
            x = np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))
        if d in ("f16", "bf16"):
            out = _finite(x, d, rounding if rounding in _ROUND else "rn", finite)
            return half.narrow_nan(out, x) if s == "f64" else out
        if d == "f64":
            return x.astype("f8")
        if s == "f64":
            out = single.to_single(x, rounding)
            return half.narrow_nan(single.flush_tiny(out, rounding, lambda: x) if ftz else out, x)
        x = single.flush(x) if ftz else x
        return x if same and rounding not in _TO_INT else single.canonical(x)

    return fn


def _finite(x: np.ndarray, d: str, mode: str, finite: bool) -> np.ndarray:
    """Returns f32 values rounded to f16 or bf16. With ``finite`` (``.satfinite``), magnitudes that would be infinite
    become the largest finite value."""
    out = half.narrow(x, d, mode)
    if not finite:
        return out
    top = {"f16": 0x7BFF, "bf16": 0x7F7F}[d]
    raw = out.view("u2")
    over = (raw & np.uint16(0x7FFF)) == (np.uint16(top) + np.uint16(1))
    return np.where(over, (raw & np.uint16(0x8000)) | np.uint16(top), raw).view(out.dtype)


def _pack(high: np.ndarray, low: np.ndarray, kind: str, shift: int) -> np.ndarray:
    return high.astype(kind) << np.array(shift, kind) | low.astype(kind)


def _packed(d: str, s: str, rounding: str, finite: bool, relu: bool, m: Mods):
    """Returns (function, destination types, source types) of a packed conversion; the first source is the high half."""
    rectify = (lambda x: np.where(np.isnan(x), x, np.where(x > 0, x, np.float32(0)))) if relu else (lambda x: x)
    if d in ("f16x2", "bf16x2") and s == "f32" and rounding in ("rn", "rz"):
        t = d[:-2]

        def halves(a, b):
            high, low = (_finite(rectify(x), t, rounding, finite).view("u2") for x in (a, b))
            return _pack(high, low, "u4", 16)

        return halves, (d,), ("f32", "f32")
    if d in _NARROW and s == "f32" and rounding == "rn" and finite:
        shift, kind = (4, "u1") if d == "e2m1x2" else (8, "u2")
        return (
            lambda a, b: _pack(narrow.encode(a, d[:-2], relu), narrow.encode(b, d[:-2], relu), kind, shift),
            (d,),
            ("f32", "f32"),
        )
    if d in ("e4m3x2", "e5m2x2") and s in ("f16x2", "bf16x2") and rounding == "rn" and finite:

        def from_pair(a):
            codes = narrow.encode(half.widen(a, s), d[:-2], relu)
            return _pack(codes[..., 1], codes[..., 0], "u2", 8)

        return from_pair, (d,), (s,)
    if d == "f16x2" and s in _NARROW and rounding == "rn" and not finite:
        return _decode_pair(s, relu), (d,), (s,)
    if d == "ue8m0x2" and s == "f32" and rounding in ("rz", "rp") and not relu:

        def to_powers(a, b):
            high, low = (narrow.encode_ue8m0(x, rounding == "rp", bool(finite)) for x in (a, b))
            return _pack(high, low, "u2", 8)

        return to_powers, (d,), ("f32", "f32")
    if d == "ue8m0x2" and s == "bf16x2" and rounding in ("rz", "rp") and not relu:

        def pair_to_powers(a):
            codes = narrow.encode_ue8m0(half.widen(a, s), rounding == "rp", bool(finite))
            return _pack(codes[..., 1], codes[..., 0], "u2", 8)

        return pair_to_powers, (d,), (s,)
    if d == "bf16x2" and s == "ue8m0x2" and rounding == "rn" and not relu and not finite:
        return (
            lambda a: _pack(
                narrow.decode_ue8m0((a >> np.uint16(8)).astype("u1")), narrow.decode_ue8m0(a.astype("u1")), "u4", 16
            ),
            (d,),
            (s,),
        )
    if d == "tf32" and s == "f32" and rounding in ("rn", "rz", "rna"):
        return lambda a: single.to_tf32(rectify(a), rounding), (d,), ("f32",)
    raise m.refuse(f"cvt from .{s} to .{d} with these modifiers is not modelled")


def _decode_pair(s: str, relu: bool):
    """Returns a function that decodes both codes by one table look-up on the packed bits."""
    size = 8 if s == "e2m1x2" else 16
    codes = np.arange(1 << size)
    width = size // 2
    values = narrow.decode_table(s[:-2])
    if relu:
        values = np.where(np.isnan(values), values, np.maximum(values, np.float32(0)))
    table = half.to_half(values).view("u2").astype("u4")
    # The upper two bits of a byte with a 6-bit code are padding.
    own = len(values) - 1
    pairs = (table[codes >> width & own] << np.uint32(16)) | table[codes & ((1 << width) - 1) & own]
    return lambda a: pairs.take(a)
