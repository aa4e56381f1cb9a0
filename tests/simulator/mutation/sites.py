"""Where PTX can be broken, and how: every synchronising or asynchronous instruction is a site."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMMENT = re.compile(r"\s*//.*$")
_PREDICATED = re.compile(r"^(@!?\S+\s+)?(.*)$", re.S)


@dataclass(frozen=True)
class Mutant:
    """One change of one instruction. ``line`` counts from 1; ``new`` replaces the whole line; ``ordinal`` counts the
    mutants of the kind in the kernel. ``also``: further lines (number, text) that are changed."""

    kind: str
    line: int
    old: str
    new: str
    ordinal: int = 1
    also: tuple[tuple[int, str], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind} {self.ordinal} (line {self.line})"

    def apply(self, ptx: str) -> str:
        lines = ptx.split("\n")
        assert self.old in lines[self.line - 1]
        lines[self.line - 1] = self.new
        for line, text in self.also:
            lines[line - 1] = text
        return "\n".join(lines)


def mutants(ptx: str) -> Iterator[Mutant]:
    """Every mutant of every site, in the order of the text."""
    seen: dict[str, int] = {}
    for number, line in enumerate(ptx.split("\n"), 1):
        text = _COMMENT.sub("", line).strip()
        if not text.endswith(";") or text.startswith("."):
            continue
        for rule in _RULES:
            found = rule.pattern.search(text)
            if found:
                for kind, new in rule.change(text, found):
                    seen[kind] = seen.get(kind, 0) + 1
                    yield Mutant(kind, number, text, new, seen[kind])
    yield from _meetings(ptx)
    yield from _late_waits(ptx)


def _meetings(ptx: str) -> Iterator[Mutant]:
    """A meeting of the cluster left out: an arrival at its barrier, and the wait that follows in the text."""
    arrived, count = 0, 0
    lines = ptx.split("\n")
    for number, line in enumerate(lines, 1):
        if re.search(r"barrier\.cluster\.arrive", line):
            arrived = number
        elif arrived and re.search(r"barrier\.cluster\.wait", line):
            count += 1
            old = _COMMENT.sub("", lines[arrived - 1]).strip()
            yield Mutant("drop cluster meeting", arrived, old, "", count, ((number, ""),))
            arrived = 0


def _late_waits(ptx: str) -> Iterator[Mutant]:
    """A tcgen05.wait::ld behind the next arrival at an mbarrier; where one lane arrives, behind the label at which the
    others meet it."""
    lines, count = ptx.split("\n"), 0
    for number, line in enumerate(lines, 1):
        if "tcgen05.wait::ld" not in line:
            continue
        later = range(number, len(lines))
        arrival = next((j for j in later if re.search(r"mbarrier\.arrive\.(?!expect_tx)", lines[j])), None)
        if arrival is None:
            continue
        if re.match(r"\s*\S+:", lines[arrival + 1]):
            arrival += 1
        count += 1
        old = _COMMENT.sub("", line).strip()
        yield Mutant("wait::ld behind the arrival", number, old, "", count, ((arrival + 1, f"{lines[arrival]} {old}"),))


def unfolded(ptx: str) -> str:
    """``ptx`` with every block that is written in one line, ``{ .reg …; …; }``, on lines of its own: a site each."""
    lines = []
    for line in ptx.split("\n"):
        text = line.strip()
        if text.startswith("{ ") and text.endswith("; }"):
            lines += ["{", *(f"{part};" for part in text[2:-3].split("; ")), "}"]
        else:
            lines.append(line)
    return "\n".join(lines)


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    change: Callable[[str, re.Match[str]], Iterator[tuple[str, str]]]


def _drop(kind: str, instead: str = "") -> Callable[[str, re.Match[str]], Iterator[tuple[str, str]]]:
    def change(text: str, found: re.Match[str]) -> Iterator[tuple[str, str]]:
        yield f"drop {found.expand(kind)}", found.expand(instead) if instead else ""

    return change


def _operand(kind: str, index: int, bits: int, how: str) -> Callable[[str, re.Match[str]], Iterator[tuple[str, str]]]:
    """Puts ``how`` of operand ``index`` in its place: an instruction with {old} and {new}."""

    def change(text: str, found: re.Match[str]) -> Iterator[tuple[str, str]]:
        guard, rest = _PREDICATED.match(text).groups()
        opcode, _, tail = rest.rstrip(";").partition("\t")
        if not tail:
            opcode, _, tail = rest.rstrip(";").partition(" ")
        parts = split(tail.strip())
        if index >= len(parts):
            return
        old = parts[index]
        inner = re.fullmatch(r"\[(%?[\w$]+)(\+\d+)?\]", old)
        register = inner.group(1) if inner else old
        if not inner and not re.fullmatch(r"%?[\w$-]+", old):
            return
        parts[index] = f"[MT{inner.group(2) or ''}]" if inner else "MT"
        compute = how.format(old=register, new="MT")
        yield kind, f"{{ .reg .b{bits} MT; {compute} {guard or ''}{opcode} {', '.join(parts)}; }}"

    return change


def split(text: str) -> list[str]:
    """Operands: split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def _swap(kind: str, first: int, second: int) -> Callable[[str, re.Match[str]], Iterator[tuple[str, str]]]:
    def change(text: str, found: re.Match[str]) -> Iterator[tuple[str, str]]:
        opcode, _, tail = text.rstrip(";").partition("\t")
        if not tail:
            opcode, _, tail = text.rstrip(";").partition(" ")
        parts = split(tail.strip())
        if second < len(parts):
            parts[first], parts[second] = parts[second], parts[first]
            yield kind, f"{opcode} {', '.join(parts)};"

    return change


def _twice(kind: str) -> Callable[[str, re.Match[str]], Iterator[tuple[str, str]]]:
    def change(text: str, found: re.Match[str]) -> Iterator[tuple[str, str]]:
        yield kind, f"{text} {text}"

    return change


def _coordinate(kind: str, index: int, by: int) -> Callable[[str, re.Match[str]], Iterator[tuple[str, str]]]:
    """Moves coordinate ``index`` of a tensor copy."""

    def change(text: str, found: re.Match[str]) -> Iterator[tuple[str, str]]:
        inner = re.search(r"\{([^{}]*)\}", text)
        names = split(inner.group(1))
        if index >= len(names):
            return
        names_new = [*names]
        names_new[index] = "MT"
        new = text.replace(inner.group(0), "{" + ", ".join(names_new) + "}", 1)
        yield kind, f"{{ .reg .b32 MT; add.s32 MT, {names[index]}, {by}; {new} }}"

    return change


def _selector(kind: str, index: int) -> Callable[[str, re.Match[str]], Iterator[tuple[str, str]]]:
    """Another thread-id in operand ``index``, {byte-id, thread-id}."""

    def change(text: str, found: re.Match[str]) -> Iterator[tuple[str, str]]:
        opcode, _, tail = text.rstrip(";").partition(" ")
        parts = split(tail.strip())
        byte, _, thread = parts[index].strip("{}").partition(", ")
        if not thread.isdigit():
            return
        parts[index] = f"{{{byte}, {int(thread) ^ 1}}}"
        yield kind, f"{opcode} {', '.join(parts)};"

    return change


def _text(kind: str, old: str, new: str) -> Callable[[str, re.Match[str]], Iterator[tuple[str, str]]]:
    def change(text: str, found: re.Match[str]) -> Iterator[tuple[str, str]]:
        if re.search(old, text):
            yield kind, re.sub(old, new, text, count=1)

    return change


def _rules() -> Iterator[Rule]:
    def rule(pattern: str, *changes: Callable) -> Iterator[Rule]:
        return (Rule(re.compile(pattern), c) for c in changes)

    add, xor = "add.s32 {{new}}, {{old}}, {};".format, "xor.b64 {{new}}, {{old}}, {};".format
    yield from rule(r"mbarrier\.try_wait\S* (\w+|%\w+),", _drop("wait", r"setp.eq.u32 \1, 0, 0;"))
    yield from rule(
        r"mbarrier\.try_wait",
        _operand("wait for the next barrier", 1, 32, add(8)),
        _operand("wait for the other parity", 2, 32, "xor.b32 {new}, {old}, 1;"),
    )
    yield from rule(r"mbarrier\.arrive\.expect_tx", _drop("expect_tx"))
    yield from rule(
        r"mbarrier\.arrive\.expect_tx",
        _operand("expect 1024 bytes more", 2, 32, add(1024)),
        _operand("expect 1024 bytes less", 2, 32, add(-1024)),
    )
    yield from rule(
        r"mbarrier\.arrive\.(?!expect_tx)",
        _drop("arrive"),
        _operand("arrive at the next barrier", 1, 32, add(8)),
        _twice("arrives twice"),
    )
    yield from rule(
        r"mbarrier\.init",
        _drop("init"),
        _operand("one arrival more", 1, 32, add(1)),
        _operand("one arrival less", 1, 32, add(-1)),
    )
    yield from rule(r"^(@\S+\s+)?fence\.", _drop("fence"))
    yield from rule(
        r"fence\.proxy\.async[.;]",
        _text("the other space", r"async\.shared::\w+;", "async.global;"),
        _text("the other space", r"async\.global;", "async.shared::cta;"),
        _text("global memory only", r"async;", "async.global;"),
        _text("shared memory only", r"async;", "async.shared::cta;"),
    )
    yield from rule(r"^(@\S+\s+)?bar\.(sync|arrive)|^(@\S+\s+)?barrier\.sync", _drop("barrier"))
    yield from rule(r"^bar\.sync\s+\S+, \S+;", _operand("a warp more at the barrier", 1, 32, add(32)))
    counted = r"^(@\S+\s+)?(bar|barrier)(\.cta)?\.(sync|arrive)\S*\s+\S+, \S+;"
    yield from rule(counted, _operand("a warp less at the barrier", 1, 32, add(-32)))
    yield from rule(counted, _operand("one warp at the barrier", 1, 32, "mov.u32 {new}, 32;"))
    yield from rule(
        r"^(@\S+\s+)?(bar|barrier)(\.cta)?\.sync\S*\s+[^,]+;",
        _text("one warp at the barrier of all", ";$", ", 32;"),
    )
    yield from rule(r"bar\.warp\.sync", _drop("warp barrier"))
    yield from rule(
        r"bar\.warp\.sync\s+(-1|0xffffffff|4294967295);",
        _text("lane 0 alone at the warp barrier", r"\s\S+;$", " 1;"),
        _text("half of the lanes at the warp barrier", r"\s\S+;$", " 0xffff;"),
    )
    yield from rule(r"barrier\.cluster\.(arrive|wait)", _drop(r"cluster \1"))
    yield from rule(r"cp\.async\.bulk\.(tensor|shared|global)|cp\.reduce\.async", _drop("copy"))
    yield from rule(
        r"cp\.async\.bulk\.tensor",
        _coordinate("first coordinate", 0, 16),
        _coordinate("second coordinate", 1, 8),
        _coordinate("last coordinate", 2, 1),
    )
    yield from rule(
        r"cp\.async\.bulk\.tensor.*mbarrier",
        _operand("destination 128 bytes on", 0, 32, add(128)),
        _operand("signals the next barrier", 2, 32, add(8)),
    )
    yield from rule(
        r"multicast::cluster.*\], (%rs\d+)", _text("no multicast to the others", r"(\], )(%rs\d+)", r"\g<1>1")
    )
    yield from rule(r"cp\.async\.bulk\.commit_group", _drop("commit_group"))
    yield from rule(r"cp\.async\.bulk\.wait_group", _drop("wait_group"))
    yield from rule(r"cp\.async\.bulk\.wait_group\S*\s+(\d+);", _text("wait for one group less", r"\s\d+;", " 3;"))
    yield from rule(r"cp\.async\.(wait_group|wait_all)", _drop("cp.async wait"))
    yield from rule(r"cp\.async\.mbarrier", _drop("cp.async arrive"))
    yield from rule(r"tcgen05\.(cp|mma|commit|wait|relinquish\w*|dealloc|fence\S*|shift)\b", _drop(r"tcgen05.\1"))
    yield from rule(
        r"tcgen05\.cp",
        _operand("scales one column on", 0, 32, add(1)),
        _operand("copy from 512 bytes on", 1, 64, "add.s64 {new}, {old}, 32;"),
        _operand("stride of the scales", 1, 64, xor(1 << 33)),
    )
    yield from rule(
        r"tcgen05\.mma",
        _swap("A and B swapped", 1, 2),
        _operand("no swizzle in A", 1, 64, xor(2 << 61)),
        _operand("no swizzle in B", 2, 64, xor(2 << 61)),
        _operand("stride of B", 2, 64, xor(1 << 36)),
        _operand("A 32 bytes on", 1, 64, "add.s64 {new}, {old}, 2;"),
        _operand("accumulator a column on", 0, 32, add(1)),
    )
    yield from rule(
        r"tcgen05\.mma.*block_scale",
        _swap("scales of A and B swapped", 4, 5),
        _operand("scale format", 3, 32, "xor.b32 {new}, {old}, 8388608;"),
        _operand("scales of A 4 columns on", 4, 32, add(4)),
        _operand("scale id of A", 4, 32, "xor.b32 {new}, {old}, 0x80000000;"),
        _operand("scale id of B", 5, 32, "xor.b32 {new}, {old}, 0x40000000;"),
        _operand("scale id of A in the descriptor", 3, 32, f"xor.b32 {{new}}, {{old}}, {1 << 29};"),
        _operand("scale id of B in the descriptor", 3, 32, f"xor.b32 {{new}}, {{old}}, {1 << 4};"),
    )
    yield from rule(r"tcgen05\.mma.*, (%?p\d*);", _text("accumulates the other way", r", (%?p\d*);", r", !\1;"))
    yield from rule(r"tcgen05\.commit", _operand("commits to the next barrier", 0, 32, add(8)), _twice("commits twice"))
    yield from rule(r"tcgen05\.commit.*multicast", _text("commit to one CTA only", r", (%rs\d+);", ", 1;"))
    yield from rule(r"tcgen05\.alloc", _operand("half of the columns", 1, 32, "shr.u32 {new}, {old}, 1;"))
    yield from rule(r"tcgen05\.ld\b", _operand("a column on", 1, 32, add(1)), _operand("a lane on", 1, 32, add(65536)))
    yield from rule(r"mapa\.", _operand("rank of another CTA", 2, 32, "xor.b32 {new}, {old}, 1;"))
    yield from rule(r"^st\.shared", _operand("store 16 bytes on", 0, 32, add(16)), _drop("shared store"))
    yield from rule(r"^red\.|^atom\.", _drop("atomic"))
    yield from rule(
        r"^st\.async",
        _drop("remote store"),
        _operand("remote store 16 bytes on", 0, 32, add(16)),
        _operand("remote store signals the next barrier", 2, 32, add(8)),
    )
    yield from rule(r"^(@\S+\s+)?ld\.global\.", _text("load as constant", r"ld\.global\.", "ld.global.nc."))
    only = r"^(?!.*(?:mbarrier_init|sync_restrict))(@\S+\s+)?"
    scoped = only + r"(fence|membar|ld|st|red|atom|mbarrier|tensormap)\.\S*\.(cluster|gpu|gl|sys)(?=[\s.;])"
    yield from rule(scoped, _text("scope of the CTA", r"\.(cluster|gpu|gl|sys)(?=[\s.;])", ".cta"))
    yield from rule(r"^ld\.acquire", _text("load without acquire", r"ld\.acquire", "ld.relaxed"))
    yield from rule(r"^st\.release", _drop("flag"), _text("flag without release", r"st\.release", "st.relaxed"))
    yield from rule(r"tensormap\.(replace|cp_fenceproxy)", _drop(r"tensormap.\1"))
    yield from rule(r"^wgmma\.(\w+)", _drop(r"wgmma.\1"))
    yield from rule(r"^wgmma\.wait_group\S*\s+\d+;", _text("wait for a wgmma less", r"\s\d+;", " 7;"))
    yield from rule(r"^griddepcontrol\.wait", _drop("dependency wait"))
    yield from rule(r"^setmaxnreg", _drop("setmaxnreg"))
    yield from rule(r"^(ldmatrix|stmatrix)", _drop(r"\1"))
    yield from rule(r"^ldmatrix", _operand("matrix 512 bytes on", 1, 32, add(512)))
    yield from rule(r"^mma\.sync", _drop("mma"))
    yield from rule(r"^mma\.sync.*block_scale", _selector("scales of other rows", 5), _selector("of other columns", 7))


_RULES = tuple(_rules())
