"""tcgen05.mma: checks its operands and queues its operations (PTX ISA, "tcgen05.mma", "tcgen05.mma.ws")."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from cute_nvfp4.sim.errors import TensorMemoryError, UnsupportedInstruction
from cute_nvfp4.sim.frontend.model import Address, Imm, Instruction, Kernel, Vector
from cute_nvfp4.sim.frontend.opcodes import Mods, Op
from cute_nvfp4.sim.machine.engine import issue_rows
from cute_nvfp4.sim.tcgen05 import descriptor, instruction
from cute_nvfp4.sim.tcgen05.descriptor import DescriptorError
from cute_nvfp4.sim.tcgen05.mma import Mma, Spec, pair, shared_spec
from cute_nvfp4.sim.tcgen05.product import operand_bits

_BLOCKS = {
    "mxf8f6f4": {"": 32, "scale_vec::1X": 32, "block32": 32},
    "mxf4": {"": 32, "scale_vec::2X": 32, "block32": 32},
    "mxf4nvf4": {"scale_vec::2X": 32, "block32": 32, "scale_vec::4X": 16, "block16": 16},
}
"""Number of elements that share a scale factor, by kind and qualifier."""
_USES = ("fill", "use", "lastuse", "discard")


def build(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds tcgen05.mma."""
    ws = m.flag("ws")
    if m.flag("sp"):
        raise m.refuse("sparse tcgen05.mma is not modelled")
    group = int(m.take("cta_group::1", "cta_group::2", required=True)[-1])
    kinds = ("f16", "tf32", "f8f6f4", "i8") if ws else tuple(instruction.INPUTS)
    kind = m.take(*(f"kind::{x}" for x in kinds), required=True)[6:]
    block = 0
    if kind in _BLOCKS:
        m.take("block_scale", required=True)
        qualifier = m.take(*_BLOCKS[kind])
        if qualifier not in _BLOCKS[kind]:
            raise m.refuse(f"kind::{kind} needs a scale vector size")
        block = _BLOCKS[kind][qualifier]
    ashift = not block and not ws and m.flag("ashift")
    buffers = [f"collector::b{j}" for j in range(4)] if ws else ["collector::a"]
    collector = m.take(*(f"{b}::{u}" for b in buffers for u in _USES))
    if ashift and collector.endswith(("::fill", "::use")):
        raise m.refuse(".ashift does not go with this collector usage")
    if ws and group != 1:
        raise m.refuse(".ws exists for .cta_group::1 only")
    return _op(i, m, kind, block, group, ws, ashift)


def _op(i: Instruction, m: Mods, kind: str, block: int, group: int, ws: bool, ashift: bool) -> Op:
    """Builds the operation from the operand list, whose middle and end depend on the kind."""
    given = i.operands
    in_tensor_memory = len(given) > 1 and isinstance(given[1], Address)
    if ashift and not in_tensor_memory:
        raise m.refuse(".ashift needs A in tensor memory")
    src: list[Any] = ["addr", "addr" if in_tensor_memory else "b64", "b64", "b32"]
    masked, scale_d = False, 0
    rest = given[4:]
    if block:
        src += ["addr", "addr"]
        rest = rest[2:]
    elif rest and isinstance(rest[0], Vector):
        if ws or len(rest[0].items) != 4 * group:
            raise m.refuse(f"disable-output-lane has {4 * group} words with .cta_group::{group}")
        masked = True
        src.append(("b32",) * (4 * group))
        rest = rest[1:]
    src.append("pred")
    if len(rest) == 2 and not block:
        scale_d = _trailing(rest[1], m, kind, ws)
        src.append("static")

    def fn(g, mask, d, d_off, a, *more):
        more = list(more)
        a_off = more.pop(0) if in_tensor_memory else 0
        b, idesc = more.pop(0), more.pop(0)
        scales = [(more.pop(0), more.pop(0)) for _ in range(2)] if block else []
        words = more.pop(0) if masked else ()
        bases = [s for s, _ in scales]
        warps, _, rows = issue_rows(g, mask, d, a, b, idesc, more.pop(0), *bases, *words)
        issue = Issue(i, g.wave, kind, block, group, ws, ashift, scale_d, in_tensor_memory)
        offsets = (d_off, a_off, *(o for _, o in scales))
        issue(warps, rows[:5], rows[5 : 5 + len(bases)], rows[5 + len(bases) :], offsets)

    return Op(fn, (), tuple(src), "tensor", context=True)


def _trailing(operand: Any, m: Mods, kind: str, ws: bool) -> int:
    """Returns scale-input-d, the last operand. With .ws, that is the zero-column mask, which must be 0."""
    value = operand.value if isinstance(operand, Imm) and operand.kind == "int" else None
    if ws and value != 0:
        raise m.refuse("a zero-column mask other than the constant 0 is not modelled")
    if ws:
        return 0
    if value is None or not 0 <= value <= 15 or kind not in ("f16", "tf32"):
        raise m.refuse("scale-input-d is a constant from 0 to 15, for kind::f16 and kind::tf32")
    return value


class Issue:
    """Turns the rows (threads) that issue a tcgen05.mma into ``Mma`` operations, one for each set of equal
    descriptors."""

    def __init__(self, i, wave, kind, block, group, ws, ashift, scale_d, in_tensor_memory) -> None:
        self.i, self.wave, self.kind, self.block, self.group = i, wave, kind, block, group
        self.ws, self.ashift, self.scale_d, self.in_tensor_memory = ws, ashift, scale_d, in_tensor_memory

    def __call__(self, warps, rows, scales, words, offsets) -> None:
        d, a, b, idesc, enable = rows
        self.wave.tensor_memory.same_group(self.i.where(), self.group)
        lane, d_column = tensor_address(d, offsets[0])
        a_key = a & ~a.dtype.type(0xFFFF) if self.in_tensor_memory else descriptor.alike(a)
        keys = [idesc, lane, a_key, descriptor.alike(b), *words, *(s >> np.uint32(30) for s in scales)]
        for at in alike(*keys):
            first = at[0]
            decoded = self.descriptor(int(idesc[first]), [int(s[first]) for s in scales])
            columns = [tensor_address(s[at], o)[1] for s, o in zip(scales, offsets[2:])]
            spec, ids = self.spec(decoded, int(lane[first]), int(a[first]), int(b[first]), words, first)
            start = tensor_address(a[at], offsets[1])[1] if spec.a is None else descriptor.start_of(a[at])
            one = Mma(
                self.i, self.wave, warps[at], spec, a=start, b=descriptor.start_of(b[at]), d=d_column[at],
                enable=enable[at], sf_ids=ids, scale_d=self.scale_d,
                **dict(zip(("sfa", "sfb"), columns)),
            )  # fmt: skip
            self.check(one)
            self.wave.engines.submit(one)

    def descriptor(self, idesc: int, scales: list[int]) -> instruction.InstructionDescriptor:
        """Returns the decoded instruction descriptor. Raises ``DescriptorError`` if its scale factor ids are not those
        of the scale addresses ``scales``, unless the addresses have ids 0."""
        d = named(self.i, instruction.decode, idesc, self.kind, self.block, self.group, self.ws)
        if scales and (scales[0] >> 30, scales[1] >> 30) not in ((d.a_sf_id, d.b_sf_id), (0, 0)):
            raise DescriptorError(
                f"{self.i.where()}: the scale addresses {scales[0]:#x}, {scales[1]:#x} and the ids {d.a_sf_id}, "
                f"{d.b_sf_id} of the instruction descriptor disagree"
            )
        return d

    def spec(self, d, lane: int, a: int, b: int, words, row: int) -> tuple[Spec, tuple[int, int]]:
        """Returns the ``Spec`` and the scale factor ids of A and B, after it has checked matrix descriptors and lanes.
        ``words`` are the words of disable-output-lane, from which it takes ``row``."""
        matrix_a = None if self.in_tensor_memory else named(self.i, descriptor.decode, a)
        matrix_b = named(self.i, descriptor.decode, b)
        self.check_long(d, (matrix_a, matrix_b))
        off = tuple(int(w[row]) for w in words)
        ids = d.a_sf_id, d.b_sf_id
        d = replace(d, a_sf_id=0, b_sf_id=0) if any(ids) else d
        for matrix, mn, t in ((matrix_a, d.a_mn_major, d.a), (matrix_b, d.b_mn_major, d.b)):
            self.check_majorness(matrix, mn, t)
        half = d.m == 64 and not self.ws
        if lane not in ((0, 16) if half else (0,)):
            raise TensorMemoryError(f"{self.i.where()}: D cannot begin at lane {lane} for M = {d.m}")
        if matrix_a is None:
            if a >> 16 & 0x3FFF != lane:
                raise TensorMemoryError(f"{self.i.where()}: A and D must begin at the same lane")
            if self.ws and d.m < 128:
                raise UnsupportedInstruction(f"{self.i.where()}: .ws with A in tensor memory and M < 128")
            if d.a_mn_major:
                raise DescriptorError(f"{self.i.where()}: A in tensor memory is K-major")
        if self.ashift and d.m < 128:
            raise DescriptorError(f"{self.i.where()}: .ashift needs M = 128 or 256")
        off = off if any(off) else ()
        return shared_spec(d, self.group, self.ws, matrix_a, matrix_b, lane, off, self.ashift), ids

    def check_long(self, d: instruction.InstructionDescriptor, matrices) -> None:
        """Refuses K = 96 where it does not exist (it needs sm_103a) or is not modelled, and an address as leading
        dimension where K is not 96."""
        where = self.i.where()
        if d.k != 96:
            if any(m is not None and m.absolute for m in matrices):
                raise UnsupportedInstruction(f"{where}: an address as leading dimension is modelled for K = 96 only")
            return
        if self.wave.run.target.startswith("sm_100"):
            raise DescriptorError(f"{where}: K = 96 needs sm_103a, this is {self.wave.run.target}")
        if "block16" not in self.i.mods and "block32" not in self.i.mods:
            raise UnsupportedInstruction(f"{where}: K = 96 is modelled for .block16 and .block32 only")
        if matrices[0] is None:
            raise UnsupportedInstruction(f"{where}: K = 96 with A in tensor memory")
        if d.m != 128 * self.group:
            raise UnsupportedInstruction(f"{where}: K = 96 with M = {d.m} and .cta_group::{self.group}")

    def check_majorness(self, matrix, mn_major: bool, t: str) -> None:
        """Refuses a layout that the type and major-ness cannot have (PTX ISA, "Valid Combinations of Type-Size,
        Major-ness and Swizzling")."""
        if matrix is None:
            return
        atomic = matrix.layout == "128B_BASE32B"
        if (mn_major and t == "tf32") != atomic:
            major = "MN" if mn_major else "K"
            raise DescriptorError(
                f"{self.i.where()}: a {major}-major operand of {t} cannot have layout {matrix.layout}"
            )

    def check(self, one: Mma) -> None:
        """Raises an error unless MN-major rows are whole chunks and all columns of tensor memory are allocated."""
        memory, where, spec = self.wave.tensor_memory, self.i.where(), one.spec
        d = spec.idesc
        for mn, rows, t in ((d.a_mn_major, d.m // spec.cta_group, d.a), (d.b_mn_major, d.n // spec.cta_group, d.b)):
            if mn and rows * operand_bits(t) % 128:
                raise DescriptorError(f"{where}: {rows} MN-major elements of {t} are not whole 16-byte chunks")
        columns = [(one.d, one.width)] + ([(one.a, 8)] if spec.a is None else [])
        columns += one.scale_spans()
        for cta in pair(self.wave, one.ctas, spec.cta_group).T:
            for first, count in columns:
                memory.require(where, cta, first, count)


def tensor_address(address: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (lane, column) of tensor memory addresses, from bits 29-16 and 15-0; bits 31-30 select scale factors."""
    value = address.astype(np.int64) + offset
    return value >> 16 & 0x3FFF, value & 0xFFFF


def alike(*keys: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the indices of each set of rows that agree in all keys, in the order of the first rows."""
    if all((k == k[0]).all() for k in keys):
        yield np.arange(len(keys[0]))
        return
    sets: dict[tuple, list[int]] = {}
    for row, key in enumerate(zip(*(k.tolist() for k in keys))):
        sets.setdefault(key, []).append(row)
    for rows in sets.values():
        yield np.array(rows)


def named(i: Instruction, function: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of ``function``, whose errors are raised again with the position of the instruction."""
    try:
        return function(*args)
    except (DescriptorError, UnsupportedInstruction) as error:
        raise type(error)(f"{i.where()}: {error}") from None
