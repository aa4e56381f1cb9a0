"""Reads PTX text into a ``Module`` (PTX ISA, "Syntax" and "State Spaces, Types, and Variables").

The parser first cuts statements at ``;``. A brace opens a scope if no statement has begun, and a vector otherwise.
Scopes stay nested lists until they end, because a label may be used before it is declared.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace

from cute_nvfp4.sim.errors import PtxSyntaxError
from cute_nvfp4.sim.frontend.model import (
    MOST_OF_TEXT,
    TYPE_BITS,
    Address,
    Instruction,
    Kernel,
    Module,
    Operand,
    Param,
    Reg,
    Symbol,
    Variable,
    Vector,
    clipped,
)
from cute_nvfp4.sim.frontend.operands import NAME, Unreadable, immediate, operand, split

_TOKEN = re.compile(r"[;{}]|[^;{}]+")
_DIRECTIVE = re.compile(r"\.(version|target|address_size|file|loc|section)\b\s*(.*)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_INLINE = re.compile(r"// begin inline asm.*?// end inline asm", re.S)
_LOC = re.compile(r"^\s*\.loc\b[^\n]*", re.M)
_HEADER = re.compile(r"(?:\.\w+\s+)*\.(entry|func)\b")
_LABEL = re.compile(rf"\s*({NAME})\s*:(?!:)\s*")
_PARAM = re.compile(
    rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)((?:\s+\.ptr(?:\s+\.(?:global|shared|const|local))?(?:\s+\.align\s+\d+)?)?)"
    rf"\s+({NAME})(?:\[(\d+)\])?$"
)
_VARIABLE = re.compile(
    rf"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?(?:\.v([24])\s+)?\.(\w+)"
    rf"\s+({NAME})((?:\[\d*\])*)(?:\s*=\s*(.+))?$"
)
_INSTRUCTION = re.compile(rf"(?:@(!?)({NAME})\s+)?([a-z][\w]*(?:\.[\w]+(?:::[\w]+)*)*)(?:\s+(.*))?$", re.S)
MOST_REGISTERS = 1 << 20
"""The most registers that one declaration may make."""
_PERFORMANCE = re.compile(r"\.(\w+)(?:\s+([\d\s,]+))?")


def parse_module(text: str) -> Module:
    """Parses a whole module.

    Raises ``PtxSyntaxError``, which names the line and the text that cannot be read, its place in the source if a .loc
    tells it, and what was expected.
    """
    # .file directives come after the .loc lines that use them.
    module = Module(files={int(n): path for n, path in _FILE.findall(text)})
    for header, line, body in _toplevel(text, module):
        try:
            if body is None:
                _module_variable(module, header)
                continue
            # Device functions are skipped; a kernel that calls one is refused when it is translated.
            if (found := _HEADER.match(header)) and found.group(1) == "func":
                continue
            kernel = _kernel_header(header)
        except Unreadable as error:
            raise _refused(error, header, line) from None
        _resolve(kernel, body, {}, itertools.count())
        module.variables |= {n: v for n, v in kernel.variables.items() if v.space in ("global", "const")}
        kernel.variables = {**module.variables, **kernel.variables}
        module.kernels[kernel.name] = kernel
    return module


def _refused(error: Unreadable, text: str, line: int, loc: str = "", kernel: str = "") -> PtxSyntaxError:
    """Returns the error for text that cannot be read, with its place."""
    inside = f" of {clipped(kernel)}" if kernel else ""
    place = f"PTX line {line}{inside}{', ' + loc if loc else ''}: `{clipped(text, MOST_OF_TEXT)}`"
    return PtxSyntaxError.of(place, got=error.got, expected=error.expected)


def _strip_comments(text: str) -> str:
    # In inline assembly, .loc directives count lines of the assembly's own text, so they name no place.
    text = _INLINE.sub(lambda m: _LOC.sub("", m.group()), text)
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def _toplevel(text: str, module: Module):
    """Yields (header, line, body) for functions and (statement, line, None) for module-scope variables."""
    stack: list[list] = []
    buffer, start, vector_depth, loc, header, header_line = "", 0, 0, "", "", 0
    in_section = False
    for number, line in enumerate(_strip_comments(text).split("\n"), 1):
        if in_section:
            in_section = "}" not in line
            continue
        stripped = line.strip()
        # A directive that ends with its line may follow a label, whose statement has not begun.
        if not buffer.strip() or buffer.rstrip().endswith(":"):
            found = _DIRECTIVE.match(stripped)
            if found:
                name, rest = found.groups()
                if name == "loc":
                    loc = _location(rest, module, number)
                elif name == "section":
                    in_section = "}" not in line
                else:
                    _module_directive(module, name, rest)
                continue
        for token in _TOKEN.findall(line + " "):
            if not buffer.strip():
                buffer, start = "", number
            elif token.strip() and buffer.rstrip().endswith(":"):
                start = number  # the statement begins after its label
            if token == ";" and not vector_depth:
                statement = " ".join(buffer.split())
                buffer = ""
                if stack:
                    stack[-1].append((statement, start, loc))
                elif statement:
                    yield statement, start, None
            elif token == "{" and not vector_depth and _opens_scope(buffer, bool(stack)):
                if not stack:
                    header, header_line = " ".join(buffer.split()), start
                elif buffer.strip():
                    stack[-1].append((" ".join(buffer.split()), start, loc))
                buffer = ""
                stack.append([])
            elif token == "}" and not vector_depth:
                if not stack:
                    raise _refused(Unreadable("a `}` that closes nothing", "a kernel or a declaration"), line, number)
                if buffer.strip():
                    stack[-1].append((" ".join(buffer.split()), start, loc))
                    buffer = ""
                body = stack.pop()
                if stack:
                    stack[-1].append(body)
                else:
                    yield header, header_line, body
                    loc = ""
            else:
                vector_depth += (token == "{") - (token == "}")
                buffer += token
    if stack or buffer.strip():
        missing = "`;` after it" if buffer.strip() and not vector_depth else "`}` that closes it"
        raise _refused(Unreadable("the end of the module", missing), buffer.strip() or header, start)


def _opens_scope(buffer: str, inside: bool) -> bool:
    text = buffer.strip()
    return not text or text.endswith(":") or (not inside and _HEADER.match(text) is not None)


def _location(rest: str, module: Module, number: int) -> str:
    found = re.match(r"(\d+)[\s,]+(\d+)", rest)
    if not found:
        raise _refused(Unreadable(f"`{rest}`", "numbers of a file and a line"), f".loc {rest}", number)
    file, line = found.groups()
    return f"{module.files.get(int(file), 'file ' + file)}:{line}"


def _module_directive(module: Module, name: str, rest: str) -> None:
    if name == "version":
        module.version = rest.strip()
    elif name == "target":
        module.target = rest.split(",")[0].strip()


def _module_variable(module: Module, statement: str) -> None:
    if re.match(r"(?:\.\w+\s+)*\.(func|entry|pragma|alias)\b", statement):
        return
    variable = _variable(statement)
    module.variables[variable.name] = variable


def _variable(statement: str) -> Variable:
    found = _VARIABLE.match(statement)
    if not found:
        raise Unreadable("a declaration of another form", ".space {.align n} {.v2, .v4} .type name {[size]} {= value}")
    space, align, vector, kind, name, dims, init = found.groups()
    element = _size_of(kind)
    size = element * int(vector or 1)
    count = math.prod(int(d) if d else 0 for d in re.findall(r"\[(\d*)\]", dims))
    data = b""
    if init:
        numbers = [immediate(v.strip()) for v in init.strip("{} ").split(",")]
        data = b"".join((v.value & ((1 << 8 * element) - 1)).to_bytes(element, "little") for v in numbers)
        if len(data) > size * count:
            raise Unreadable(f"{len(numbers)} values", f"at most {size * count // element}")
    return Variable(name, space, size * count, _alignment(align, size), data)


def _size_of(kind: str) -> int:
    """Returns the size of a type in bytes."""
    if kind not in TYPE_BITS:
        raise Unreadable(f"type .{kind}", f"one of .{' .'.join(TYPE_BITS)}")
    return TYPE_BITS[kind] // 8


def _alignment(text: str | None, size: int) -> int:
    align = int(text or size)
    if align < 1 or align & (align - 1):
        raise Unreadable(f".align {align}", "a power of two")
    return align


def _kernel_header(header: str) -> Kernel:
    found = re.match(rf"(?:\.\w+\s+)*\.entry\s+({NAME})\s*(?:\((.*?)\))?\s*(.*)$", header, re.S)
    if not found:
        raise Unreadable("a header of another form", ".entry name (parameters) {directives}")
    name, params, tail = found.groups()
    kernel = Kernel(name)
    offset, out = 0, []
    for text in filter(None, (p.strip() for p in (params or "").split(","))):
        read = _PARAM.match(text)
        if not read:
            raise Unreadable(f"the parameter `{text}`", ".param {.align n} .type {.ptr …} name {[size]}")
        align, kind, _, pname, count = read.groups()
        element = _size_of(kind)
        size, align = element * int(count or 1), _alignment(align, element)
        offset = -(-offset // align) * align
        out.append(Param(pname, kind, size, align, offset))
        offset += size
    kernel.params = tuple(out)
    for key, values in _PERFORMANCE.findall(tail):
        kernel.directives[key] = tuple(int(v) for v in values.replace(",", " ").split())
    return kernel


def _resolve(kernel: Kernel, body: list, outer: dict[str, Operand], counter: Iterator[int]) -> None:
    """Flattens a scope into ``kernel``; ``outer`` maps the names that are visible in it to operands."""
    number = next(counter)
    suffix = f"@{number}" if number else ""
    names = dict(outer)
    statements = []
    for item in body:
        if isinstance(item, list):
            statements.append(item)
            continue
        text, line, loc = item
        try:
            text = _labels(kernel, text, names, suffix, statements)
            if text and not _declared(kernel, text, names, suffix):
                statements.append((text, line, loc))
        except Unreadable as error:
            raise _refused(error, text, line, loc, kernel.name) from None
    for item in statements:
        if isinstance(item, list):
            _resolve(kernel, item, names, counter)
        elif isinstance(item, str):
            kernel.labels[item] = len(kernel.code)
        else:
            try:
                kernel.code.append(_instruction(*item, names))
            except Unreadable as error:
                raise _refused(error, *item, kernel.name) from None
    for table, targets in list(kernel.branch_tables.items()):
        kernel.branch_tables[table] = tuple(names[t].name if t in names else t for t in targets)


def _labels(kernel: Kernel, text: str, names: dict[str, Operand], suffix: str, statements: list) -> str:
    """Reads the labels before a statement, and a whole branch table; returns the text that is left."""
    while (found := _LABEL.match(text)) is not None:
        label = found.group(1)
        names[label] = Symbol(label + suffix)
        text = text[found.end() :]
        if text.startswith((".branchtargets", ".calltargets")):
            kernel.branch_tables[label + suffix] = tuple(split(text.partition("targets")[2]))
            return ""
        statements.append(label + suffix)
    return text


def _declared(kernel: Kernel, text: str, names: dict[str, Operand], suffix: str) -> bool:
    """Handles a declaration, and a .pragma, which it ignores; returns whether ``text`` is one of them."""
    if text.startswith(".reg"):
        _registers(kernel, text, names, suffix)
    elif text.startswith(".param"):
        _call_parameter(kernel, text, names, suffix)
    elif text.startswith((".shared", ".local", ".extern", ".global", ".const")):
        variable = _variable(text)
        # those of .global and .const become the module's
        owner = f"@{kernel.name}" if variable.space in ("global", "const") else ""
        name = f"{variable.name}{owner}{suffix}"
        names[variable.name], kernel.variables[name] = Symbol(name), replace(variable, name=name)
    else:
        return text.startswith(".pragma")
    return True


def _registers(kernel: Kernel, text: str, names: dict[str, Operand], suffix: str) -> None:
    found = re.match(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)$", text, re.S)
    if not found:
        raise Unreadable("a declaration of another form", ".reg {.v2, .v4} .type names, each with <count> if wanted")
    vector, kind, rest = found.groups()
    if kind not in TYPE_BITS:
        raise Unreadable(f"type .{kind}", f"one of .{' .'.join(TYPE_BITS)}")
    for name in split(rest):
        many = re.match(rf"({NAME})(?:<(\d+)>)?$", name)
        if not many or int(many.group(2) or 0) > MOST_REGISTERS:
            raise Unreadable(f"`{name}`", f"a name, or name<count> with a count of at most {MOST_REGISTERS}")
        base, count = many.groups()
        for each in [base] if count is None else [f"{base}{i}" for i in range(int(count))]:
            if not vector:
                names[each] = Reg(each + suffix)
                kernel.regs[each + suffix] = kind
                continue
            parts = tuple(Reg(f"{each}.{c}{suffix}") for c in "xyzw"[: int(vector)])
            names[each] = Vector(parts)
            for part, position, colour in zip(parts, "xyzw", "rgba"):
                names[f"{each}.{position}"] = names[f"{each}.{colour}"] = part
                kernel.regs[part.name] = kind


def _call_parameter(kernel: Kernel, text: str, names: dict[str, Operand], suffix: str) -> None:
    """Declares a parameter or result of a call, which is a register that ``st.param`` and ``ld.param`` access."""
    read = _PARAM.match(text)
    if not read or read.group(5) or read.group(2) not in TYPE_BITS:
        raise Unreadable("a parameter of a call of another form", ".param .type name, without a size")
    name = f"[{read.group(4)}]{suffix}"
    names[read.group(4)] = Reg(name)
    kernel.regs[name] = read.group(2)


def _call_move(found: Instruction) -> Instruction:
    """Returns ``st.param`` or ``ld.param`` on a call's parameter as a ``mov``, other instructions unchanged."""
    if found.opcode.startswith("st.param.") and _is_call_parameter(found.operands[0]):
        found.operands = (found.operands[0].base, *found.operands[1:])
    elif found.opcode.startswith("ld.param.") and _is_call_parameter(found.operands[-1]):
        found.operands = (*found.operands[:-1], found.operands[-1].base)
    else:
        return found
    return Instruction("mov" + found.opcode[8:], found.operands, found.guard, found.text, found.line, found.loc)


def _is_call_parameter(o: Operand) -> bool:
    return isinstance(o, Address) and isinstance(o.base, Reg) and o.base.name.startswith("[") and not o.offset


def _instruction(text: str, line: int, loc: str, names: dict[str, Operand]) -> Instruction:
    found = _INSTRUCTION.match(text)
    if not found:
        raise Unreadable("a statement of another form", "{@{!}predicate} opcode{.modifiers} {operand, ...}")
    negated, guard, opcode, rest = found.groups()
    operands = tuple(operand(o, names) for o in split(rest or ""))
    predicate = None
    if guard:
        if not isinstance(names.get(guard), Reg):
            raise Unreadable(f"the undeclared predicate {guard}", "one that a .reg .pred of this scope declares")
        predicate = Reg(names[guard].name, bool(negated))
    read = Instruction(opcode, operands, predicate, text, line, loc)
    return _call_move(read) if ".param." in opcode and operands else read
