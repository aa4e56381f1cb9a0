"""Block-scaled formats: their descriptors, and exact codecs of their elements and scales in torch.

A code is the bit pattern of a value, held in ``uint8``. Decoding is exact. Encoding rounds to nearest, ties to even,
and saturates, as PTX ``cvt.rn.satfinite`` does; each encoder says what it makes of NaN. Nothing here reads a value back
to the host, so every function runs on any device without synchronising.

Sources: OCP Microscaling Formats (MX) v1.0, OCP 8-bit Floating Point v1.0, PTX ISA (``cvt``, "Alternate
Floating-Point Data Formats").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError


@dataclass(frozen=True)
class _Minifloat:
    """A sign-magnitude binary floating-point type with subnormals; ``nan_code`` is what NaN encodes to."""

    name: str
    bits: int
    mantissa_bits: int
    exponent_bias: int
    max_value: float
    nan_code: int


# E2M1 has no NaN: cvt.satfinite gives +MAX_NORM (code 7), and so does encode_e2m1.
_E2M1 = _Minifloat("e2m1", 4, 1, 1, 6.0, 0x7)
_E4M3 = _Minifloat("e4m3", 8, 3, 7, 448.0, 0x7F)
_E5M2 = _Minifloat("e5m2", 8, 2, 15, 57344.0, 0x7F)

# a global scale between these neither over- nor underflows anything that is computed with it
SMALLEST_GLOBAL_SCALE = 2.0**-100
LARGEST_GLOBAL_SCALE = 2.0**118

# the fields of the types that encoding computes in: integer view, mantissa bits, exponent bias
_WORK = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
_UE8M0_MAX = 2.0**127
_UE8M0_MIN = 2.0**-127


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A ``uint8`` view of ``tensor``, which has any one-byte dtype (also ``float4_e2m1fn_x2``), of the same shape."""
    if tensor.dtype is torch.uint8:
        return tensor
    if tensor.element_size() != 1:
        raise OperandTypeError.of("tensor of codes", got=tensor.dtype, expected="a one-byte dtype")
    return tensor.view(torch.uint8)


def _floating(x: torch.Tensor) -> torch.Tensor:
    """``x`` in float32 (float64 stays), which is exact, and without a gradient."""
    x = x.detach()
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.to(torch.float32)
    if x.dtype not in _WORK:
        raise OperandTypeError.of("values to encode", got=x.dtype, expected="float16, bfloat16, float32 or float64")
    return x


def _encode(x: torch.Tensor, kind: _Minifloat) -> torch.Tensor:
    x = _floating(x)
    integer, mantissa_bits, bias = _WORK[x.dtype]
    nan = torch.isnan(x)
    # max_value is representable, so saturating before rounding gives the same as after it
    magnitude = x.abs().clamp(max=kind.max_value).masked_fill(nan, 0)
    min_exponent = 1 - kind.exponent_bias
    exponent = ((magnitude.view(integer) >> mantissa_bits) - bias).clamp(min=min_exponent)
    # 2**(mantissa_bits - exponent) makes the step between neighbouring codes 1; the product is exact
    inverse_step = ((bias + kind.mantissa_bits - exponent) << mantissa_bits).view(x.dtype)
    steps = torch.round(magnitude * inverse_step).to(integer)
    # a carry out of the mantissa moves to the next exponent by itself
    code = ((exponent - min_exponent) << kind.mantissa_bits) + steps
    code = code | (_has_sign(x).to(integer) << (kind.bits - 1))
    return code.masked_fill(nan, kind.nan_code).to(torch.uint8)


def _has_sign(x: torch.Tensor) -> torch.Tensor:
    """Whether the sign bit of ``x`` is set."""
    if torch.compiler.is_compiling():
        # on a GPU, inductor's signbit takes −0 for positive
        return torch.copysign(torch.ones_like(x), x) < 0
    return torch.signbit(x)


def _codes(codes: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    if codes.dtype is not torch.uint8 and codes.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in (torch.uint8, *dtypes))
        raise OperandTypeError.of("codes", got=codes.dtype, expected=expected)
    return as_bytes(codes)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0..15 (``uint8``, one a byte) of floating-point ``x``; shape kept.

    Nearest, ties to even, saturating at ±6 (infinities too); −0 and negative underflow give code 8.
    E2M1 has no NaN: NaN of either sign becomes code 7 (+6), as ``cvt.rn.satfinite.e2m1x2`` has it.
    """
    return _encode(x, _E2M1)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """E4M3 (``float8_e4m3fn``) codes of ``x``: nearest, ties to even, saturating at ±448; NaN becomes 0x7F."""
    return _encode(x, _E4M3)


def encode_e5m2(x: torch.Tensor) -> torch.Tensor:
    """E5M2 codes of ``x``: nearest, ties to even, saturating at ±57344 (infinities too); NaN becomes 0x7F."""
    return _encode(x, _E5M2)


def encode_ue8m0(x: torch.Tensor, *, rounding: str) -> torch.Tensor:
    """UE8M0 codes (2**(code − 127)) of ``x``, saturating to 2**−127 (zero too) and 2**127 (infinity too).

    ``rounding`` has no default because the quantization rules disagree: "rz" to the power of two below (the
    OCP floor rule), "rp" to the one above, "rna" to the nearest in value with ties upward, as torch casts.
    NaN becomes 0xFF (NaN), and so do negative numbers: UE8M0 has no sign.
    """
    wide = _floating(x).to(torch.float64)
    invalid = ~(wide >= 0)
    _, mantissa_bits, bias = _WORK[torch.float64]
    # inside [2**-127, 2**127] every double is normal, so that its exponent field is the whole answer
    bits = wide.clamp(_UE8M0_MIN, _UE8M0_MAX).masked_fill(invalid, 1.0).view(torch.int64)
    code = (bits >> mantissa_bits) - bias + 127
    fraction = bits & ((1 << mantissa_bits) - 1)
    if rounding == "rp":
        code = code + (fraction > 0)
    elif rounding == "rna":
        code = code + (fraction >= 1 << (mantissa_bits - 1))
    elif rounding != "rz":
        raise OperandError.of("rounding of UE8M0", got=repr(rounding), expected="'rz', 'rp' or 'rna'")
    return code.masked_fill(invalid, 0xFF).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of E2M1 codes, one a byte (only the low four bits count): exact in every floating dtype."""
    codes = _codes(codes)
    # s.ee.m moved into E5M2's s.000ee.m0 has the same meaning up to the exponent bias (15 - 1), subnormals included
    as_e5m2 = ((codes & 0x8) << 4) | ((codes & 0x7) << 1)
    return as_e5m2.view(torch.float8_e5m2).to(dtype) * 2.0**14


def decode_e4m3(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of E4M3 codes (``uint8`` or ``float8_e4m3fn``); 0x7F and 0xFF are NaN. Exact in every dtype."""
    return _codes(codes, torch.float8_e4m3fn).view(torch.float8_e4m3fn).to(dtype)


def decode_e5m2(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of E5M2 codes (``uint8`` or ``float8_e5m2``), infinities and NaN included. Exact in every dtype."""
    return _codes(codes, torch.float8_e5m2).view(torch.float8_e5m2).to(dtype)


def decode_ue8m0(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """2**(code − 127) of UE8M0 codes (``uint8`` or ``float8_e8m0fnu``); 0xFF is NaN. Exact, hence no float16."""
    codes = _codes(codes, torch.float8_e8m0fnu)
    if dtype is torch.float16:
        raise OperandTypeError.of(
            "dtype of decoded UE8M0", got=dtype, expected="float32, float64 or bfloat16, which hold 2**±127"
        )
    return codes.view(torch.float8_e8m0fnu).to(dtype)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """(…, K) E2M1 codes to (…, K/2) bytes: the code of even k is the low nibble. K must be even.

    The result is ``uint8``; ``.view(torch.float4_e2m1fn_x2)`` is the same memory in torch's packed dtype.
    """
    codes = _codes(codes)
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise OperandError.of("codes to pack", got=f"shape {tuple(codes.shape)}", expected="an even last size")
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """(…, K/2) bytes (``uint8`` or ``float4_e2m1fn_x2``) to (…, K) E2M1 codes in ``uint8``; see ``pack_e2m1``."""
    packed = _codes(packed, torch.float4_e2m1fn_x2)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _decode_packed_e2m1(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return decode_e2m1(unpack_e2m1(packed), dtype)


@dataclass(frozen=True)
class _Codec:
    """An element or scale type: its bits, torch's dtype, its largest value, and its decoder."""

    bits: int
    dtype: torch.dtype
    max_value: float
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]


_CODECS = {
    "e2m1": _Codec(_E2M1.bits, torch.float4_e2m1fn_x2, _E2M1.max_value, _decode_packed_e2m1),
    "e4m3": _Codec(_E4M3.bits, torch.float8_e4m3fn, _E4M3.max_value, decode_e4m3),
    "e5m2": _Codec(_E5M2.bits, torch.float8_e5m2, _E5M2.max_value, decode_e5m2),
    "ue8m0": _Codec(8, torch.float8_e8m0fnu, _UE8M0_MAX, decode_ue8m0),
}


@dataclass(frozen=True)
class Format:
    """A block-scaled format: ``block`` elements along K share one scale. Everything else follows from the names.

    ``element``: "e2m1" (two a byte), "e4m3" or "e5m2"; ``scale``: "e4m3" or "ue8m0"; ``has_global_scale``: whether a
    float32 scale of the whole tensor may multiply the blocks' scales.
    """

    name: str
    element: str
    block: int
    scale: str
    has_global_scale: bool

    @property
    def element_bits(self) -> int:
        """Bits of an element."""
        return _CODECS[self.element].bits

    @property
    def elements_per_byte(self) -> int:
        """Elements in a byte of data: 2 for E2M1, else 1."""
        return 8 // self.element_bits

    @property
    def block_bytes(self) -> int:
        """Bytes of data under one scale."""
        return self.block // self.elements_per_byte

    @property
    def max_value(self) -> float:
        """Largest finite magnitude of an element."""
        return _CODECS[self.element].max_value

    @property
    def max_scale(self) -> float:
        """Largest finite scale."""
        return _CODECS[self.scale].max_value

    @property
    def data_dtype(self) -> torch.dtype:
        """torch's dtype of the data; ``uint8`` of the same bits is accepted everywhere."""
        return _CODECS[self.element].dtype

    @property
    def scale_dtype(self) -> torch.dtype:
        """torch's dtype of the scales; ``uint8`` of the same bits is accepted everywhere."""
        return _CODECS[self.scale].dtype

    def data_columns(self, k: int) -> int:
        """Bytes of data in a row of ``k`` elements."""
        self._check_k(k)
        return k // self.elements_per_byte

    def scale_columns(self, k: int) -> int:
        """Scales in a row of ``k`` elements, padding not counted."""
        self._check_k(k)
        return k // self.block

    def decode_data(self, data: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(…, K / elements_per_byte) data to (…, K) unscaled values, exact."""
        return _CODECS[self.element].decode(data, dtype)

    def decode_scale(self, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values of scales of any shape, exact."""
        return _CODECS[self.scale].decode(scale, dtype)

    def _check_k(self, k: int) -> None:
        if k <= 0 or k % self.block:
            raise OperandError.of(f"K of {self.name}", got=k, expected=f"a positive multiple of {self.block}")


NVFP4 = Format("nvfp4", element="e2m1", block=16, scale="e4m3", has_global_scale=True)
MXFP4 = Format("mxfp4", element="e2m1", block=32, scale="ue8m0", has_global_scale=False)
MXFP8 = Format("mxfp8", element="e4m3", block=32, scale="ue8m0", has_global_scale=False)
MXFP8_E5M2 = Format("mxfp8_e5m2", element="e5m2", block=32, scale="ue8m0", has_global_scale=False)

FORMATS = {fmt.name: fmt for fmt in (NVFP4, MXFP4, MXFP8, MXFP8_E5M2)}
