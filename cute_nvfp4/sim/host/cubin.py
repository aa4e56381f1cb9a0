"""Reads the sizes of kernel parameters out of the cubin that the host code hands to the driver.

``cudaLaunchKernelEx`` passes pointers only; the driver takes the sizes from ``.nv.info.<kernel>``, and so do we.
"""

from __future__ import annotations

import ctypes
import struct

from cute_nvfp4.sim.errors import LaunchError

_ELF = b"\x7fELF"
_KPARAM_INFO = 0x17
# of kernels with more than 4 KB of parameters
_KPARAM_INFO_LARGE = 0x45
_SVAL = 4


def elf_at(address: int, limit: int = 1 << 16) -> bytes:
    """The bytes of the ELF image found in the fat binary that starts at ``address`` of this process.

    The headers in front of the image are short; ``limit`` bounds the search. Raises ``LaunchError`` if there is none.
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
    """Kernel name to the byte sizes of its parameters in order."""
    section_offset = struct.unpack_from("<Q", elf, 0x28)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", elf, section_offset + i * entry_size) for i in range(count)]
    names = sections[names_index][4]
    sizes: dict[str, list[int]] = {}
    for name_offset, _, _, _, offset, size in sections:
        name = elf[names + name_offset : elf.index(b"\0", names + name_offset)].decode()
        if name.startswith(".nv.info."):
            sizes[name[len(".nv.info.") :]] = _kernel_info(elf[offset : offset + size])
    return sizes


def _kernel_info(data: bytes) -> list[int]:
    """Walks the (format, attribute, value) records of one kernel; a record of format 4 carries its own length."""
    found, at = {}, 0
    while at + 4 <= len(data):
        kind, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind != _SVAL:
            continue
        if attribute == _KPARAM_INFO:
            _, ordinal, _, flags = struct.unpack_from("<IHHI", data, at)
            found[ordinal] = flags >> 18
        elif attribute == _KPARAM_INFO_LARGE:
            # 16 bits of size, then what a pointer points to
            _, ordinal, _, found[ordinal] = struct.unpack_from("<IHHH", data, at)
        at += value
    return [found[i] for i in sorted(found)]
