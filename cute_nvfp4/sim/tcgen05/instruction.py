"""Instruction descriptors of tcgen05.mma: kinds, types and shapes (PTX ISA, "Instruction Descriptor")."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cute_nvfp4.sim.errors import UnsupportedInstruction
from cute_nvfp4.sim.tcgen05.descriptor import DescriptorError

_NARROW = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
INPUTS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _NARROW,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _NARROW,
    "mxf4": {1: "e2m1x2"},
    "mxf4nvf4": {1: "e2m1x2"},
}
"""Element types by kind and type code; ``e2m1x2`` is E2M1 with two elements in a byte."""
OUTPUTS = {"f16": (0, 1), "tf32": (1,), "f8f6f4": (0, 1), "i8": (2,)}  # type codes of D by kind
ACCUMULATORS = {0: "f16", 1: "f32", 2: "s32"}  # types of D by code
BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e2m1x2": 4}
"""Bits that an element occupies along K in an operand tile; 8 for all other types (PTX ISA, "Packing formats")."""


@dataclass(frozen=True)
class InstructionDescriptor:
    """A decoded instruction descriptor."""

    kind: str
    a: str  # element types of A, B and D
    b: str
    d: str
    m: int  # rows of D, in both CTAs of a pair together
    n: int
    k: int
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    saturate: bool = False
    block: int = 0  # K elements that share a scale factor; 0 without block scaling
    scale: str = ""  # type of the scale factors
    a_sf_id: int = 0  # scale factor ids: the byte of its word at which a row's scale factors begin
    b_sf_id: int = 0

    @property
    def scales(self) -> int:
        """Number of scale factors of a row in one instruction."""
        return self.k // self.block if self.block else 0

    @property
    def chunks(self) -> int:
        """Number of 16-byte chunks of a K-major row in shared memory."""
        return 3 if self.k == 96 else 2


@lru_cache(maxsize=4096)
def decode(idesc: int, kind: str, block: int, cta_group: int, ws: bool) -> InstructionDescriptor:
    """Decodes and checks the 32-bit descriptor of a ``tcgen05.mma``. The other parameters come from its qualifiers;
    ``block`` is the number of elements that share a scale factor, 0 without scaling. Raises ``DescriptorError`` for an
    invalid descriptor, and ``UnsupportedInstruction`` for a feature that the simulator does not model."""
    text = f"instruction descriptor {idesc:#010x} of kind::{kind}"
    if idesc >> 2 & 1:
        raise UnsupportedInstruction(f"{text}: sparse A is not modelled")
    # The 4-bit kinds have three bits (9-7) for the type of A and two (11-10) for that of B. Their only type is E2M1,
    # with code 1 (PTX ISA, instruction descriptor of kind::mxf4 and mxf4nvf4; CUTLASS, MXF4Format). Bit 12 is reserved
    # in the ISA. NVIDIA's builder sets it as a sparsity version ("irrelevant for SM100"), so that bits 12-10 hold 5,
    # the code of E2M1 in the 8-bit kinds. No builder writes 5 for A, and it has no meaning there.
    codes = idesc >> 7 & 7, idesc >> 10 & (3 if kind in ("mxf4", "mxf4nvf4") else 7)
    a, b = (INPUTS[kind].get(c) for c in codes)
    if a is None or b is None:
        known = ", ".join(f"{code} is {name.removesuffix('x2')}" for code, name in INPUTS[kind].items())
        raise DescriptorError(f"{text}: type codes {codes[0]} (A) and {codes[1]} (B) do not exist here: {known}")
    m, n = (idesc >> 24 & 31) << 4, (idesc >> 17 & 63) << 3
    _check_shape(text, m, n, kind, cta_group, ws)
    major = idesc >> 15 & 1, idesc >> 16 & 1
    if any(major) and kind in ("mxf4", "mxf4nvf4"):
        raise DescriptorError(f"{text}: only K-major operands exist")
    for t, mn in ((a, major[0]), (b, major[1])):
        if mn and t in ("e2m3", "e3m2", "e2m1"):
            raise DescriptorError(f"{text}: {t} is K-major only")
    k = 256 // ELEMENT_BITS.get(a, 8)
    negate = bool(idesc >> 13 & 1), bool(idesc >> 14 & 1)
    if kind in BLOCK_SCALED:
        return _block_scaled(text, idesc, kind, block, (a, b, "f32", m, n, k, *negate, *map(bool, major)))
    output = idesc >> 4 & 3
    if output not in OUTPUTS[kind]:
        raise DescriptorError(f"{text}: accumulator type {output} does not exist")
    if kind == "i8" and any(negate):
        raise DescriptorError(f"{text}: integers cannot be negated")
    saturate = bool(idesc >> 3 & 1)
    if saturate and kind != "i8":
        raise DescriptorError(f"{text}: saturation is for kind::i8")
    if idesc >> 6 & 1 or idesc >> 23 & 1 or idesc >> 29 & 1 or (idesc >> 30 and not ws):
        raise DescriptorError(f"{text}: reserved bits are set")
    if idesc >> 30:
        raise UnsupportedInstruction(f"{text}: a shift for reuse of B is not modelled")
    return InstructionDescriptor(kind, a, b, ACCUMULATORS[output], m, n, k, *negate, *map(bool, major), saturate)


def _block_scaled(text: str, idesc: int, kind: str, block: int, common: tuple) -> InstructionDescriptor:
    if idesc >> 3 & 1 or idesc >> 6 & 1:
        raise DescriptorError(f"{text}: reserved bits are set")
    if idesc >> 31:
        if kind == "mxf8f6f4":
            raise DescriptorError(f"{text}: K = 96 is for kind::mxf4 and kind::mxf4nvf4")
        common = (*common[:5], 96, *common[6:])
    scale = "ue8m0" if idesc >> 23 & 1 else "ue4m3"
    ids = idesc >> 29 & 3, idesc >> 4 & 3
    if scale == "ue4m3" and (kind != "mxf4nvf4" or block != 16):
        raise DescriptorError(f"{text}: UE4M3 scales are for kind::mxf4nvf4 with blocks of 16")
    step = (32 if idesc >> 31 else 64) // block if kind != "mxf8f6f4" else 1
    if any(i % step for i in ids):
        raise DescriptorError(f"{text}: scale factor ids {ids} must be multiples of {step}")
    return InstructionDescriptor(kind, *common, False, block, scale, *ids)


def _check_shape(text: str, m: int, n: int, kind: str, cta_group: int, ws: bool) -> None:
    if ws:
        rows, columns = (32, 64, 128), (64, 128, 256)
    elif cta_group == 2:
        rows, columns = (128, 256), range(16, 257, 16)
    else:
        rows, columns = (128,) if kind in BLOCK_SCALED else (64, 128), range(8, 257, 8)
    if m not in rows or n not in columns:
        where = "with .ws" if ws else f"with cta_group::{cta_group}"
        raise DescriptorError(f"{text}: M = {m}, N = {n} does not exist {where}")
