"""Templates: the launches of a compiled host function, without the values that vary from call to call.

The host code (grid arithmetic, tensor maps, packing) runs when a call is planned, never when it is made. It runs twice,
with made-up values of the varying arguments. Its launches are captured, and the bytes in which they differ show where
each value goes. Exactly one value must explain each difference, or the kernel is refused: a template is proved for this
host code, not guessed.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import CompileError

if TYPE_CHECKING:
    from ..sim import Launch
    from .cache import CompiledKernel

CODES = {ctypes.c_void_p: "Q", ctypes.c_float: "f", ctypes.c_int32: "i"}
"""How a varying value stands in a parameter, in ``struct`` notation. A constant may be added to an address."""

# Made-up addresses are so far apart that an address plus any offset within a tensor is none of the others.
_APART, _FIRST = 1 << 36, 1 << 46
_MAX_ADDED = 1 << 35
_MAP_BYTES = 128


@dataclass(frozen=True)
class Patch:
    """Byte ``offset`` of parameter ``param`` of launch ``launch`` holds varying value ``value`` plus ``added``."""

    launch: int
    param: int
    offset: int
    code: str
    value: int
    added: int = 0


@dataclass(frozen=True)
class Template:
    """Launches without their varying values, and the places of these. values: the number of varying values."""

    launches: tuple[Launch, ...]
    patches: tuple[Patch, ...]
    values: int

    def filled(self, values: Sequence[Any]) -> list[Launch]:
        """The launches, with ``values`` filled in."""
        params = [[bytearray(p) for p in launch.params] for launch in self.launches]
        for p in self.patches:
            value = values[p.value] + p.added
            # struct refuses a float beyond float32, of which C makes an infinity
            value = ctypes.c_float(value).value if p.code == "f" else value
            struct.pack_into("<" + p.code, params[p.launch][p.param], p.offset, value)
        return [replace(launch, params=tuple(map(bytes, found))) for launch, found in zip(self.launches, params)]


def capture(kernel: CompiledKernel, types: Sequence[type], values: Sequence[Any], varying: Sequence[int]) -> Template:
    """The template of a call of ``kernel``.

    types, values: the C types and values of all arguments. varying: the indices of those that vary.

    Raises:
        CompileError: a parameter depends on a varying value in another way than by holding it.
    """
    codes = [CODES[types[i]] for i in varying]

    def launches(probe: int) -> list[Launch]:
        made_up = list(values)
        for n, i in enumerate(varying):
            made_up[i] = _made_up(codes[n], n, len(varying), probe)
        found = kernel.host.call([kind(value) for kind, value in zip(types, made_up)])
        return [replace(launch, params=tuple(map(_defined, launch.params))) for launch in found]

    first, second = launches(0), launches(1)
    if [replace(x, params=()) for x in first] != [replace(x, params=()) for x in second]:
        raise CompileError(f"kernel {kernel.name}: what it launches depends on addresses or other varying arguments")
    pairs = [[_made_up(code, n, len(codes), probe) for probe in (0, 1)] for n, code in enumerate(codes)]
    patches = []
    for number, (one, two) in enumerate(zip(first, second)):
        for index, (x, y) in enumerate(zip(one.params, two.params)):
            patches += [
                Patch(number, index, offset, codes[n], n, added)
                for offset, n, added in _explained(kernel, codes, pairs, x, y)
            ]
    return Template(tuple(first), tuple(patches), len(varying))


def _defined(param: bytes) -> bytes:
    """The parameter; of a tensor map only the half that host code writes and copies read."""
    from ..sim.tma.descriptor import InvalidTensorMap, TensorMap

    if len(param) != _MAP_BYTES:
        return param
    try:
        TensorMap.decode(param)
    except InvalidTensorMap:
        return param
    return param[: _MAP_BYTES // 2].ljust(_MAP_BYTES, b"\0")


def _made_up(code: str, n: int, count: int, probe: int) -> Any:
    """The made-up value ``n`` of ``count``, in probe 0 or 1."""
    if code == "f":
        return (1.0, 100.0)[probe] + (n + 1) / 64
    if code == "i":
        return (0x12340000, 0x23450000)[probe] + n
    return _FIRST + (n if probe == 0 else 2 * count - n) * _APART + probe * 4096


def _explained(
    kernel: CompiledKernel, codes: Sequence[str], pairs: Sequence[Sequence[Any]], x: bytes, y: bytes
) -> list[tuple[int, int, int]]:
    """(offset, value, added) for each place where the parameters ``x`` and ``y`` of the two probes differ."""
    found, at = [], 0
    while at < len(x):
        eight = x[at : at + 8], y[at : at + 8]
        if eight[0] == eight[1]:
            at += 8
            continue
        address = _address(codes, pairs, *eight) if len(eight[0]) == 8 else None
        if address is not None:
            found.append((at, *address))
            at += 8
            continue
        four = x[at : at + 4], y[at : at + 4]
        if four[0] != four[1]:
            number = _number(codes, pairs, *four)
            if number is None:
                raise CompileError(
                    f"kernel {kernel.name}: byte {at} of a parameter of {len(x)} bytes depends on an address or "
                    "another varying argument, but does not hold it"
                )
            found.append((at, number, 0))
        at += 4
    return found


def _address(codes: Sequence[str], pairs: Sequence[Sequence[Any]], x: bytes, y: bytes) -> tuple[int, int] | None:
    """(value, added) of the one address that eight bytes hold in both probes; None if it is not one."""
    words = [int.from_bytes(word, "little") for word in (x, y)]
    added = {n: words[0] - pairs[n][0] for n, code in enumerate(codes) if code == "Q"}
    fits = [(n, a) for n, a in added.items() if abs(a) < _MAX_ADDED and words[1] - pairs[n][1] == a]
    return fits[0] if len(fits) == 1 else None


def _number(codes: Sequence[str], pairs: Sequence[Sequence[Any]], x: bytes, y: bytes) -> int | None:
    """The index of the one number that four bytes hold in both probes; None if it is not one."""
    fits = [
        n
        for n, code in enumerate(codes)
        if code != "Q" and [struct.pack("<" + code, value) for value in pairs[n]] == [x, y]
    ]
    return fits[0] if len(fits) == 1 else None
