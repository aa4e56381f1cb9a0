"""Reads the operands of an instruction: registers, constants, addresses, vectors (PTX ISA, "Instruction Operands")."""

from __future__ import annotations

import re
import struct

from cute_nvfp4.sim.frontend.model import Address, Imm, Operand, Pair, Reg, Sink, Special, Symbol, Vector
from cute_nvfp4.sim.frontend.special import BITS

NAME = r"[A-Za-z_$%][\w$]*"
_INT = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_FLOAT = re.compile(r"-?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)$")
_BITS = re.compile(r"0([fF])([0-9a-fA-F]{8})$|0([dD])([0-9a-fA-F]{16})$")
_SYMBOL = re.compile(rf"({NAME})\s*(?:\+\s*(-?\d+))?$")
_ADDRESS = re.compile(r"([^+\s]+)\s*(?:\+\s*(-?\w+))?$")
_PUNCTUATION = re.compile(r"[{}\[\](),]")
_CLOSING = {"{": "}", "(": ")", "[": "]"}


class Unreadable(Exception):
    """A part of a statement cannot be read: it is ``got`` where ``expected`` is wanted. The parser adds the place."""

    def __init__(self, got: str, expected: str) -> None:
        super().__init__(got, expected)
        self.got, self.expected = got, expected


def split(text: str) -> list[str]:
    """Returns the parts of ``text`` between the commas that are outside brackets."""
    if not any(c in text for c in "{[("):
        return [p.strip() for p in text.split(",")] if text.strip() else []
    parts, depth, start = [], 0, 0
    for found in _PUNCTUATION.finditer(text):
        c = found.group()
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif not depth:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    parts.append(text[start:].strip())
    return parts


def operand(text: str, names: dict[str, Operand]) -> Operand:
    """Reads one operand. ``names`` maps the visible names to operands. Raises ``Unreadable``."""
    if text in names:
        return names[text]
    head = text[:1]
    if head in _CLOSING:
        if not text.endswith(_CLOSING[head]):
            raise Unreadable(f"`{text}`", f"`{_CLOSING[head]}` at its end")
        inside = text[1:-1]
        return _address(inside, names) if head == "[" else Vector(tuple(operand(p, names) for p in split(inside)))
    if head == "!":
        predicate = operand(text[1:].strip(), names)
        if not isinstance(predicate, Reg):
            raise Unreadable(f"`{text}`", "a predicate register after `!`")
        return Reg(predicate.name, negated=True)
    if text == "_":
        return Sink()
    if "|" in text:
        first, second = text.split("|", 1)
        return Pair(operand(first.strip(), names), operand(second.strip(), names))
    if head == "%" or text == "WARP_SZ":
        if text in BITS:
            return Special(text)
        if word := re.match(r"[%\w.]+(?=\s)", text):
            raise Unreadable(f"`{text}`", f"`,` or `;` after {word.group()}")
        raise Unreadable(f"the undeclared {text}", "a special register, or one that a .reg of this scope declares")
    if head.isdigit() or head == "-":
        return immediate(text)
    found = _SYMBOL.match(text)
    if not found:
        raise Unreadable(f"the operand `{text}`", "a register, a constant, a name, {a, b, ...} or [address]")
    base = names.get(found.group(1))
    return Symbol(base.name if isinstance(base, Symbol) else found.group(1), int(found.group(2) or 0))


def _address(text: str, names: dict[str, Operand]) -> Address:
    first, *extra = split(text) or [""]
    found = _ADDRESS.match(first)
    base = operand(found.group(1), names) if found else None
    if not isinstance(base, (Reg, Symbol, Imm)) or (isinstance(base, Reg) and base.negated):
        raise Unreadable(f"the address `[{text}]`", "[register or name or constant] or [… + constant]")
    offset = immediate(found.group(2)).value if found.group(2) else 0
    if isinstance(base, Symbol):
        base, offset = Symbol(base.name), offset + base.offset
    return Address(base, offset, tuple(operand(e, names) for e in extra))


def immediate(text: str) -> Imm:
    """Reads a constant: an integer, 0f or 0d with the bits of a float, or a decimal float. Raises ``Unreadable``."""
    if found := _BITS.match(text):
        single, bits, _, wide = found.groups()
        return Imm(int(bits, 16), "f32") if single else Imm(int(wide, 16), "f64")
    if found := _INT.match(text):
        sign, digits = found.groups()
        value = int(digits, 8) if digits[0] == "0" and digits.isdigit() else int(digits, 0)
        if value >> 64:
            raise Unreadable(f"the constant `{text}`", "an integer of at most 64 bits")
        return Imm(-value if sign else value)
    if _FLOAT.match(text):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], "f64")
    raise Unreadable(f"the constant `{text}`", "an integer, a decimal float, or 0f and 0d with 8 and 16 digits")
