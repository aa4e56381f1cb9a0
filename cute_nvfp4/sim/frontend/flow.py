"""Basic blocks, their order, and which registers are live where they begin.

Blocks are numbered in reverse post-order. The executor always advances the group of warps in the lowest-numbered
block, which brings diverged lanes together again at the first place they can meet: no reconvergence stack is needed.
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
"""Loads of what other threads may change."""


@dataclass
class Block:
    """A run of instructions entered at its head only.

    ``next`` is where control falls through to, ``targets`` where its last instruction may jump; ``live_in`` has the
    registers whose values are still needed on entry. ``converge`` is set when the first instruction needs lanes to
    meet before it runs. ``spins`` is the successor that leads straight back here, for a block that polls an mbarrier;
    ``polls`` is the head of the loop around a block, for a loop that only reads memory until it changes.
    """

    index: int
    code: list[tuple[Instruction, Op]]
    next: int = EXIT
    targets: tuple[int, ...] = ()
    live_in: frozenset[str] = frozenset()
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    spins: int | None = None
    polls: int | None = None

    @property
    def last(self) -> Op:
        return self.code[-1][1]

    @property
    def control(self) -> str:
        return self.last.control if self.code else ""

    @property
    def converge(self) -> int | None:
        return self.code[0][1].converge if self.code else None


def registers(operand: Operand) -> list[str]:
    """Names of the registers an operand mentions."""
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
    """Cuts ``kernel`` into blocks; raises ``UnsupportedInstruction`` for unknown instructions that can be reached."""
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
    """Whether the code has no effect but on registers, so that running it again changes nothing."""
    return all(not op.context or i.base == "nanosleep" for i, op in block.code[start:])


def _spins(block: Block, blocks: list[Block]) -> int | None:
    """The successor through which a polling ``block`` comes straight back to itself, if there is one."""
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
    """Whether the code has no effect but on registers, and reads nothing but registers and memory. An atomic that
    changes memory counts as an effect when it does."""
    return all(
        not op.context or i.base == "nanosleep" or op.klass == "atomic" or op.klass.startswith("load.")
        for i, op in block.code
    ) and not any(isinstance(o, Special) and o.name in TIMED for i, _ in block.code for o in i.operands)


def _find_polls(blocks: list[Block]) -> None:
    """Marks the loops that poll memory: cycles of blocks that only read, through a head where no register that they
    write is still needed. Another round with the same memory then does the same. Where a cycle has no such head, as
    when it goes from one flag to the next, a block of it that goes round alone may poll."""
    pure = {b.index for b in blocks if _only_reads(b)}
    onward = {k: [s for s in successors(blocks[k]) if s in pure] for k in pure}
    for loop in _cycles(onward):
        if not _polls(blocks, loop):
            for k in loop:
                if k in onward[k]:
                    _polls(blocks, {k})


def _polls(blocks: list[Block], loop: set[int]) -> bool:
    """Marks the loop if it has a head."""
    written = set().union(*(blocks[k].writes for k in loop))
    heads = [k for k in sorted(loop) if asks(blocks[k]) and not written & blocks[k].live_in]
    for k in loop if heads else ():
        blocks[k].polls = heads[0]
    return bool(heads)


def asks(block: Block) -> Instruction | None:
    """The first instruction that reads what other threads may write."""
    return next((i for i, op in block.code if op.klass == "atomic" or op.klass in _OTHERS_WRITE), None)


def _cycles(onward: dict[int, list[int]]) -> list[set[int]]:
    """The strongly connected components of a graph that have a cycle: what reaches a block and is reached by it."""
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
    """The shortest loop through a block; empty where there is none."""
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
    """What a walk of one step or more from ``start`` comes to."""
    seen: set[int] = set()
    todo = list(onward[start])
    while todo:
        k = todo.pop()
        if k not in seen:
            seen.add(k)
            todo += onward[k]
    return seen


def _unguard(kernel: Kernel, ops: list[Op]) -> list[Op]:
    """Puts a branch before every predicated instruction that ends a block, so that only those lanes reach it that
    execute it."""
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
    together = False  # whether a warpgroup has met since the block began, and is still together
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
    """Where control can go after ``block``, without the exit."""
    unguarded = bool(block.code) and block.code[-1][0].guard is None
    ends = block.control in ("branch", "exit", "table", "trap") and unguarded
    out = [] if ends else [block.next]
    return [s for s in [*out, *block.targets] if s != EXIT]


def _reverse_post_order(blocks: dict[int, Block], entry: int) -> list[int]:
    """Iterative depth-first search that visits the branch target first, so that the fall-through comes before it in
    the order."""
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
