"""The copy engine told in scalar loops, one element after the other, from the text of the PTX ISA ("Tensors").

Slow on purpose, and independent of the simulator's own code but for the decoded tensor map.
"""

from __future__ import annotations

import itertools

NAN = 0x7FF77FF77FF77FF7
"""What fills in place of zeros, in elements of any width."""


def elements(m, coords, offsets=(), rows=None):
    """Yields (element index in the copy, coordinates in the tensor) in the order of shared memory."""
    if m.im2col is not None:
        yield from _im2col(m, coords, offsets)
        return
    if rows is not None:
        for j, row in enumerate(rows):
            for x in range(m.box[0]):
                yield j * m.box[0] + x, (coords[0] + x, row)
        return
    steps = [m.element_strides[d] if d else 1 for d in range(m.rank)]
    ranges = [range(0, m.box[d], steps[d]) for d in range(m.rank)]
    for n, index in enumerate(itertools.product(*reversed(ranges))):
        yield n, tuple(c + i for c, i in zip(coords, reversed(index)))


def _im2col(m, coords, offsets):
    im, spatial = m.im2col, m.rank - 2
    position, image = list(coords[1:-1]), coords[-1]
    for pixel in range(im.pixels):
        for x in range(im.channels):
            at = tuple(p + o for p, o in zip(position, offsets))
            yield pixel * im.channels + x, (coords[0] + x, *at, image)
        for d in range(spatial):
            position[d] += m.element_strides[1 + d]
            if position[d] < m.dims[1 + d] + im.upper[d]:
                break
            position[d] = im.lower[d]
        else:
            image += 1


PADDING = 0xA5
"""What the simulator puts where the ISA leaves padding open."""


def padded_load(m, read_bits, shared, destination, coords, rows=None):
    """``load`` for types with padding: 16 elements take 16 bytes of shared memory, packed from the low end.
    complete_tx counts the bytes without padding."""
    values = {}
    for n, at in elements(m, coords, (), rows):
        values[n] = read_bits(bit_address(m, at), m.bits) if inside(m, at) else 0
    for group in range(len(values) // 16):
        packed = sum(values[16 * group + j] << m.bits * j for j in range(16))
        for b in range(16):
            byte = packed >> 8 * b & 255 if b < 2 * m.bits else PADDING
            shared[swizzled(m, destination + 16 * group + b)] = byte
    return len(values) * m.bits // 8


def inside(m, at):
    return all(0 <= c < n for c, n in zip(at, m.dims))


def bit_address(m, at):
    return 8 * (m.address + sum(c * s for c, s in zip(at[1:], m.strides))) + at[0] * m.bits


def swizzled(m, address):
    """Exchanges 16-byte units according to the bits of the address above 128 bytes."""
    if m.swizzle == "128B_ATOM_32B":
        # 32-byte pieces, by the number of the 128-byte line modulo 4
        return address ^ (address >> 7 & 3) << 5
    mask = {"none": 0, "32B": 1, "64B": 3, "128B": 7}[m.swizzle]
    return address ^ (address >> 7 & mask) << 4


def place(m, base, byte):
    """Where a byte of the copy lies: with a swizzle, rows are as far apart as the swizzle is wide."""
    row = m.box[0] * m.bits // 8
    pitch = {"none": row, "32B": 32, "64B": 64}.get(m.swizzle, 128)
    return swizzled(m, base + byte // row * pitch + byte % row)


def tf32(x):
    """The nearest value with 10 bits of mantissa, ties to even."""
    if x & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFFE000
    low, kept = x & 0x1FFF, x & ~0x1FFF
    return kept + (0x2000 if low > 0x1000 or (low == 0x1000 and kept & 0x2000) else 0)


def load(m, read_bits, shared, destination, coords, offsets=(), rows=None):
    """``read_bits(bit address, count)`` reads global memory; writes into the dict ``shared`` of byte address to byte.
    Returns the bytes counted by complete_tx."""
    size = 0
    packed = {}
    for n, at in elements(m, coords, offsets, rows):
        if inside(m, at):
            value = read_bits(bit_address(m, at), m.bits)
            if m.type.startswith("tf32"):
                value = tf32(value)
        else:
            value = NAN & (1 << m.bits) - 1 if m.nan_fill else 0
        for b in range(m.bits):
            packed[n * m.bits + b] = value >> b & 1
        size = (n + 1) * m.bits
    for byte in range(size // 8):
        value = sum(packed[8 * byte + b] << b for b in range(8))
        shared[place(m, destination, byte)] = value
    return size // 8


def store(m, shared, source, coords, touch, rows=None):
    """Calls ``touch(bit address, count, value)`` for every element that is written: those inside the tensor, and those
    that share a unit of 16 bytes with one."""
    per_unit = 128 // m.bits
    for n, at in elements(m, coords, [0] * (m.rank - 2), rows):
        value = 0
        for b in range(m.bits):
            bit = n * m.bits + b
            value |= (int(shared[place(m, source, bit // 8)]) >> bit % 8 & 1) << b
        if inside(m, (at[0] // per_unit * per_unit, *at[1:])):
            touch(bit_address(m, at), m.bits, value)
