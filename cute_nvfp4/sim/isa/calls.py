"""Calls of ``vprintf`` and ``__assertfail``, the two device functions that compilers insert.

The sources are the PTX ISA ("call") and the CUDA C++ Programming Guide ("Formatted Output", "Assertion"). The parser
turns the parameters of a call into registers of the scope, so ``st.param`` and ``ld.param`` around it are moves.
"""

from __future__ import annotations

import re
import sys
from functools import partial

import numpy as np

from cute_nvfp4.sim.errors import OutOfBounds, Trap
from cute_nvfp4.sim.frontend.model import Instruction, Kernel, Symbol
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode
from cute_nvfp4.sim.machine.layout import WINDOW_MASK, WINDOW_SHIFT, WINDOWS
from cute_nvfp4.sim.machine.wave import Group

_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d*))?(hh|h|ll|l|j|z|t|L)?(.)", re.S)
_LONGEST = 4096  # bytes of a text


@opcode("call")
def _call(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.flag("uni")
    name = next((o.name for o in i.operands if isinstance(o, Symbol)), "")
    if name == "vprintf":
        return Op(partial(_vprintf, i), (("b32",),), ("static", ("b64", "b64")), "control", context=True)
    if name == "__assertfail":
        return Op(partial(_assertfail, i), (), ("static", ("b64", "b64", "b32", "b64", "b64")), "control", context=True)
    raise m.refuse("calls of device functions other than vprintf and __assertfail are not modelled")


def _threads(g: Group, mask: np.ndarray | None, *values: np.ndarray):
    """Yields (row, lane, that thread's values) for the active threads, in the order of warps and lanes."""
    lanes = g.lanes(mask)
    wide = [np.broadcast_to(v, (g.n, 32)) for v in values]
    for row, lane in np.argwhere(lanes).tolist():
        yield row, lane, [int(v[row, lane]) for v in wide]


def _vprintf(i: Instruction, g: Group, mask, operands) -> np.ndarray:
    """Prints the text of each active thread. Returns the number of its arguments (n, 32), as the CUDA guide says."""
    counts = np.zeros((g.n, 32), np.uint32)
    for row, lane, (text, arguments) in _threads(g, mask, *operands):
        thread = _Thread(i, g, row, lane)
        line, counts[row, lane] = thread.format(thread.string(text), arguments)
        sys.stdout.write(line)
    return counts


def _assertfail(i: Instruction, g: Group, mask, operands) -> None:
    for row, lane, (message, file, line, function, _) in _threads(g, mask, *operands):
        thread = _Thread(i, g, row, lane)
        where = f"{thread.string(file)}:{line}, {thread.string(function)}"
        who = g.wave.thread(int(g.warps[row]), lane)
        raise Trap(f"device assertion `{thread.string(message)}` failed at {where}; {who} in {g.wave.run.launch.title}")


class _Thread:
    """A thread that executes a call; reads its arguments from memory."""

    def __init__(self, instruction: Instruction, g: Group, row: int, lane: int) -> None:
        self._instruction, self._wave, self._row = instruction, g.wave, int(g.local_rows()[row, lane])

    def _bytes(self, address: int, size: int) -> bytes:
        """Returns ``size`` bytes at a generic address of global or local memory. Raises ``OutOfBounds``."""
        window, low, wave = address >> WINDOW_SHIFT, address & WINDOW_MASK, self._wave
        if window == WINDOWS["local"] and low + size <= wave.local_bytes:
            at = self._row + low - wave.local.base
            return wave.local.rows(1, 1)[1][at : at + size].tobytes()
        region = wave.run.memory.find(address) if window == 0 else None
        if region is None or address + size > region.end:
            place = wave.run.memory.describe(address) if window == 0 else f"generic address {address:#x}"
            raise OutOfBounds(f"{self._instruction.where()}: reads {size} bytes: {place}")
        first, rows = region.rows(1, 1)
        return rows[address - first : address - first + size].tobytes()

    def string(self, address: int) -> str:
        """Returns the zero-terminated text at ``address``, or its first ``_LONGEST`` bytes."""
        out = bytearray()
        while len(out) < _LONGEST and (byte := self._bytes(address + len(out), 1)) != b"\0":
            out += byte
        return out.decode(errors="replace")

    def format(self, text: str, arguments: int) -> tuple[str, int]:
        """Returns (formatted text, number of arguments used). ``arguments`` is the address of the arguments, which have
        the types of C's default promotions and their natural alignment."""
        at, taken = arguments, 0

        def take(kind: str) -> int | float:
            nonlocal at, taken
            dtype = np.dtype(kind)
            at = -(-at // dtype.itemsize) * dtype.itemsize
            value = np.frombuffer(self._bytes(at, dtype.itemsize), dtype)[0].item()
            at, taken = at + dtype.itemsize, taken + 1
            return value

        def convert(found: re.Match) -> str:
            flags, width, precision, length, kind = found.groups()
            if kind == "%":
                return "%"
            width = str(take("i4")) if width == "*" else width or ""
            if precision is not None:
                precision = str(take("i4")) if precision == "*" else precision or "0"
            head = f"%{flags}{width}" + ("" if precision is None else f".{precision}")
            if kind in "diuoxXc":
                wide = length in ("l", "ll", "j", "z", "t")
                value = take(("i" if kind in "di" else "u") + ("8" if wide else "4"))
                if kind == "c":
                    return (head + "s") % chr(value & 0xFF)
                return (head + kind.replace("u", "d")) % value
            if kind in "fFeEgG":
                return (head + kind) % take("f8")
            if kind in "aA":
                return (f"%{flags}{width}s") % take("f8").hex()
            if kind == "p":
                return (f"%{flags}{width}s") % f"{take('u8'):#x}"
            if kind == "s":
                return (head + "s") % self.string(take("u8"))
            return found.group()  # CUDA prints an unknown conversion unchanged

        return _CONVERSION.sub(convert, text), taken
