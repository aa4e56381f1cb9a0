"""The basic blocks of a kernel, their order, and the registers that are live on entry to each.

Blocks are numbered in reverse post-order. The executor always advances the group of warps in the lowest-numbered
block, so diverged lanes reconverge at the first block where they can meet, without a reconvergence stack.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cute_nvfp4.sim.errors import UnsupportedInstruction
from cute_nvfp4.sim.frontend.model import Address, Instruction, Kernel, Operand, Pair, Reg, Special, Symbol, Vector
from cute_nvfp4.sim.frontend.opcodes import WARPGROUP, Op, lookup
from cute_nvfp4.sim.frontend.special import TIMED

EXIT = -1
"""The block index that stands for the end of the kernel."""
_OTHERS_WRITE = {"load.global", "load.shared", "load.cluster", "load.generic"}
"""The classes (``Op.klass``) of loads from memory that other threads may write."""


@dataclass
class Block:
    """A basic block: instructions that control enters only at the first one. Blocks name one another by index."""

    index: int
    code: list[tuple[Instruction, Op]]
    next: int = EXIT  #: the block that control falls through to
    targets: tuple[int, ...] = ()  #: the blocks that the last instruction may branch to
    live_in: frozenset[str] = frozenset()  #: registers whose values on entry are still needed
    reads: set[str] = field(default_factory=set)  #: registers that it reads before it writes them
    writes: set[str] = field(default_factory=set)
    spins: int | None = None  #: if the block polls an mbarrier: the successor that leads straight back to it
    polls: int | None = None  #: if it is in a loop that only reads memory until it changes: the head of that loop

    @property
    def last(self) -> Op:
        return self.code[-1][1]

    @property
    def control(self) -> str:
        return self.last.control if self.code else ""

    @property
    def converge(self) -> int | None:
        """The ``Op.converge`` of the first instruction: which lanes must meet before the block runs."""
        return self.code[0][1].converge if self.code else None


def registers(operand: Operand) -> list[str]:
    """Returns the names of the registers in an operand."""
    if isinstance(operand, Reg):
        return [operand.name]
    if isinstance(operand, Vector):
        return [n for o in operand.items for n in registers(o)]
    if isinstance(operand, Pair):
        return registers(operand.first) + registers(operand.second)
    if isinstance(operand, Address):
        return registers(operand.base) + [n for o in operand.extra for n in registers(o)]
    return []


def build_blocks(kernel: Kernel) -> list[Block]:
    """Cuts ``kernel`` into blocks and returns those that control can reach; may insert branches into ``kernel.code``.

    Raises ``UnsupportedInstruction`` for any instruction that is not modelled, and for a branch to an unknown label.
    """
    ops = _unguard(kernel, [lookup(i, kernel) for i in kernel.code])
    leaders = _leaders(kernel, ops)
    starts = sorted(leaders)
    index_of = {s: i for i, s in enumerate(starts)}
    raw: dict[int, Block] = {}
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else len(kernel.code)
        code = [(kernel.code[j], ops[j]) for j in range(start, end)]
        block = Block(i, code, index_of.get(end, EXIT))
        if code and code[-1][1].control in ("branch", "table"):
            block.targets = tuple(index_of[t] for t in _targets(kernel, code[-1][0]))
        raw[i] = block
    order = _reverse_post_order(raw, index_of.get(0, EXIT))
    number = {old: new for new, old in enumerate(order)}
    blocks = []
    for old in order:
        block = raw[old]
        block.index, block.next = number[old], number.get(block.next, EXIT)
        block.targets = tuple(number[t] for t in block.targets)
        blocks.append(block)
    _liveness(blocks)
    for block in blocks:
        block.spins = _spins(block, blocks)
    _find_polls(blocks)
    return blocks


def _only_thinks(block: Block, start: int = 0) -> bool:
    """Returns whether the code affects only registers, so that running it again changes nothing else."""
    return all(not op.context or i.base == "nanosleep" for i, op in block.code[start:])


def _spins(block: Block, blocks: list[Block]) -> int | None:
    """Returns the successor through which a polling ``block`` comes straight back to itself, or None."""
    if not (block.code and block.code[0][1].poll and block.control == "branch" and _only_thinks(block, 1)):
        return None
    for first in successors(block):
        s = first
        for _ in range(4):
            if s == block.index:
                return first
            onward = successors(blocks[s])
            if len(onward) != 1 or not _only_thinks(blocks[s]):
                break
            s = onward[0]
    return None


def _only_reads(block: Block) -> bool:
    """Returns whether the code affects only registers and reads only registers and memory. It may have an atomic:
    the executor notices at run time whether that changes memory."""
    return all(
        not op.context or i.base == "nanosleep" or op.klass == "atomic" or op.klass.startswith("load.")
        for i, op in block.code
    ) and not any(isinstance(o, Special) and o.name in TIMED for i, _ in block.code for o in i.operands)


def _find_polls(blocks: list[Block]) -> None:
    """Marks the loops that poll memory: cycles of blocks that only read, with a head where no register that they write
    is live. Another round on the same memory then does the same. In a cycle without such a head, as when it goes from
    one flag to the next, a block that is its own successor may poll alone."""
    pure = {b.index for b in blocks if _only_reads(b)}
    onward = {k: [s for s in successors(blocks[k]) if s in pure] for k in pure}
    for loop in _cycles(onward):
        if not _polls(blocks, loop):
            for k in loop:
                if k in onward[k]:
                    _polls(blocks, {k})


def _polls(blocks: list[Block], loop: set[int]) -> bool:
    """Marks the blocks of ``loop`` if one of them can be its head; returns whether one can."""
    written = set().union(*(blocks[k].writes for k in loop))
    heads = [k for k in sorted(loop) if asks(blocks[k]) and not written & blocks[k].live_in]
    for k in loop if heads else ():
        blocks[k].polls = heads[0]
    return bool(heads)


def asks(block: Block) -> Instruction | None:
    """Returns the first instruction that reads memory which other threads may write, or None."""
    return next((i for i, op in block.code if op.klass == "atomic" or op.klass in _OTHERS_WRITE), None)


def _cycles(onward: dict[int, list[int]]) -> list[set[int]]:
    """Returns the strongly connected components of a graph that contain a cycle."""
    back: dict[int, list[int]] = {k: [] for k in onward}
    for k, targets in onward.items():
        for s in targets:
            back[s].append(k)
    out, left = [], {s for k, targets in onward.items() for s in targets if s <= k}
    while left:
        head = left.pop()
        loop = _reached(head, onward) & _reached(head, back)
        left -= loop
        if loop:
            out.append(loop)
    return out


def loop_around(blocks: list[Block], index: int) -> list[Block]:
    """Returns the blocks of a shortest loop through a block, in reverse order; empty if there is none."""
    todo, before = [index], dict[int, int]()
    for k in todo:
        for s in successors(blocks[k]):
            if s == index:
                loop = [k]
                while loop[-1] != index:
                    loop.append(before[loop[-1]])
                return [blocks[j] for j in loop]
            if s not in before:
                before[s] = k
                todo.append(s)
    return []


def _reached(start: int, onward: dict[int, list[int]]) -> set[int]:
    """Returns the nodes that a walk of one or more steps from ``start`` can reach."""
    seen: set[int] = set()
    todo = list(onward[start])
    while todo:
        k = todo.pop()
        if k not in seen:
            seen.add(k)
            todo += onward[k]
    return seen


def _unguard(kernel: Kernel, ops: list[Op]) -> list[Op]:
    """Inserts a branch before every predicated barrier, wait, branch through a table, or trap, so that only the lanes
    that execute the instruction reach it. Returns the ops of the new ``kernel.code``."""
    code, out, moved = [], [], {}
    for j, (i, op) in enumerate(zip(kernel.code, ops)):
        moved[j] = len(code)
        if i.guard is not None and op.control in ("barrier", "wait", "table", "trap"):
            label = f"after@{i.line}.{j}"
            skip = Instruction("bra", (Symbol(label),), Reg(i.guard.name, not i.guard.negated), i.text, i.line, i.loc)
            code += [skip, Instruction(i.opcode, i.operands, None, i.text, i.line, i.loc)]
            out += [lookup(skip, kernel), op]
            kernel.labels[label] = -len(code)
        else:
            code.append(i)
            out.append(op)
    if len(code) > len(kernel.code):
        moved[len(kernel.code)] = len(code)
        kernel.labels = {n: -p if p < 0 else moved[p] for n, p in kernel.labels.items()}
        kernel.code = code
    return out


def _leaders(kernel: Kernel, ops: list[Op]) -> set[int]:
    leaders = {0} if kernel.code else set()
    leaders.update(p for p in kernel.labels.values() if p < len(kernel.code))
    together = False  # whether the block began where a warpgroup meets, and the warpgroup is still together
    for j, op in enumerate(ops):
        together = together and j not in leaders
        if op.poll or (op.converge is not None and not (together and op.converge == WARPGROUP)):
            leaders.add(j)
            together = op.converge == WARPGROUP
        if op.control and j + 1 < len(ops):
            leaders.add(j + 1)
    return leaders


def _targets(kernel: Kernel, instruction: Instruction) -> list[int]:
    symbol = instruction.operands[-1]
    if not isinstance(symbol, Symbol):
        raise UnsupportedInstruction(f"a branch to something that is no label: {instruction.where()}")
    names = kernel.branch_tables.get(symbol.name, (symbol.name,))
    missing = [n for n in names if n not in kernel.labels]
    if missing:
        raise UnsupportedInstruction(f"label {missing[0]} is not defined: {instruction.where()}")
    return [min(kernel.labels[n], len(kernel.code)) for n in names]


def successors(block: Block) -> list[int]:
    """Returns the blocks that can follow ``block``, without ``EXIT``."""
    unguarded = bool(block.code) and block.code[-1][0].guard is None
    ends = block.control in ("branch", "exit", "table", "trap") and unguarded
    out = [] if ends else [block.next]
    return [s for s in [*out, *block.targets] if s != EXIT]


def _reverse_post_order(blocks: dict[int, Block], entry: int) -> list[int]:
    """Returns the blocks in reverse post-order. The depth-first search visits branch targets first, so that the
    fall-through comes before them in the order."""
    if entry == EXIT:
        return []
    seen, post, stack = {entry}, [], [(entry, iter(successors(blocks[entry])[::-1]))]
    while stack:
        node, rest = stack[-1]
        for s in rest:
            if s not in seen:
                seen.add(s)
                stack.append((s, iter(successors(blocks[s])[::-1])))
                break
        else:
            post.append(node)
            stack.pop()
    return post[::-1]


def _liveness(blocks: list[Block]) -> None:
    for block in blocks:
        for instruction, op in block.code:
            count = len(op.dst)
            used = [n for o in instruction.operands[count:] for n in registers(o)]
            written = [n for o in instruction.operands[:count] for n in registers(o)]
            if instruction.guard is not None:
                used.append(instruction.guard.name)
                used.extend(written)
            block.reads.update(n for n in used if n not in block.writes)
            block.writes.update(written)
    names = sorted({n for b in blocks for n in b.reads | b.writes})
    bit = {n: 1 << i for i, n in enumerate(names)}
    gen = [sum(bit[n] for n in b.reads) for b in blocks]
    kill = [sum(bit[n] for n in b.writes) for b in blocks]
    live, changed = list(gen), True
    while changed:
        changed = False
        for b in reversed(blocks):
            out = 0
            for s in successors(b):
                out |= live[s]
            new = gen[b.index] | (out & ~kill[b.index])
            if new != live[b.index]:
                live[b.index], changed = new, True
    for b in blocks:
        packed = np.frombuffer(live[b.index].to_bytes(len(names) // 8 + 1, "little"), np.uint8)
        b.live_in = frozenset(names[k] for k in np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist())
