"""Reads the parameter sizes and register counts of kernels from the cubin that host code passes to the driver.

``cudaLaunchKernelEx`` passes pointers only. The driver takes the sizes from the section ``.nv.info.<kernel>``, and so
does this module. The register counts are in ``.nv.info``.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import NamedTuple

from cute_nvfp4.sim.errors import LaunchError

_ELF = b"\x7fELF"
_KPARAM_INFO = 0x17
# in kernels with more than 4 KB of parameters
_KPARAM_INFO_LARGE = 0x45
_REGCOUNT = 0x2F
_SVAL = 4


def elf_at(address: int, limit: int = 1 << 16) -> bytes:
    """Returns the bytes from the ELF image on in the fat binary at ``address`` of this process.

    The headers before the image are short, so ``limit`` bounds the bytes searched. Raises ``LaunchError`` if there is
    no fat binary or no uncompressed image.
    """
    magic, _, header, size = struct.unpack("<IHHQ", ctypes.string_at(address, 16))
    if magic != 0xBA55ED50:
        raise LaunchError(f"the host code loads a binary with magic {magic:#x}, not a fat binary")
    data = ctypes.string_at(address, header + size)
    start = data.find(_ELF, 0, limit)
    if start < 0:
        raise LaunchError("the host code loads a fat binary without an uncompressed cubin")
    return data[start:]


def parameter_sizes(elf: bytes) -> dict[str, list[int]]:
    """Returns, by kernel name, the sizes in bytes of the kernel's parameters in order."""
    prefix = ".nv.info."
    return {s.name[len(prefix) :]: _kernel_info(s.data) for s in _sections(elf) if s.name.startswith(prefix)}


def register_counts(elf: bytes) -> dict[str, int]:
    """Returns, by kernel name, the number of registers of a thread, as ptxas -v prints it."""
    counts, symbols = {}, {}
    for section in _sections(elf):
        if section.name == ".nv.info":
            for attribute, data in _records(section.data):
                if attribute == _REGCOUNT:
                    symbol, count = struct.unpack("<II", data)
                    counts[symbol] = count
        elif section.name.startswith(".text."):
            # the lower bits name the kernel's symbol
            symbols[section.name[len(".text.") :]] = section.info & 0xFFFFFF
    return {name: counts[symbol] for name, symbol in symbols.items() if symbol in counts}


class _Section(NamedTuple):
    name: str
    info: int
    data: bytes


def _sections(elf: bytes) -> list[_Section]:
    offset = struct.unpack_from("<Q", elf, 0x28)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQII", elf, offset + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    out = []
    for name, _, _, _, at, size, _, info in headers:
        start = names + name
        out.append(_Section(elf[start : elf.index(b"\0", start)].decode(), info, elf[at : at + size]))
    return out


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields (attribute, value) for the records of an attribute section that carry their own length."""
    at = 0
    while at + 4 <= len(data):
        kind, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == _SVAL:
            yield attribute, data[at : at + value]
            at += value


def _kernel_info(data: bytes) -> list[int]:
    """Returns the sizes of the parameters of one kernel, from its ``.nv.info`` section."""
    found = {}
    for attribute, value in _records(data):
        if attribute == _KPARAM_INFO:
            _, ordinal, _, flags = struct.unpack_from("<IHHI", value)
            found[ordinal] = flags >> 18
        elif attribute == _KPARAM_INFO_LARGE:
            # the last field has the size, and data about pointers follow it
            _, ordinal, _, found[ordinal] = struct.unpack_from("<IHHH", value)
    return [found[i] for i in sorted(found)]
