"""Reads PTX text into a ``Module`` (PTX ISA, "Syntax" and "State Spaces, Types, and Variables").

Statements are cut at ``;`` first; braces open a scope when a statement has not begun and a vector otherwise.
Scopes are kept as nested lists until their end, because a label may be used before it is declared.
"""

from __future__ import annotations

import math
import re
import struct

from cute_nvfp4.sim.errors import PtxSyntaxError
from cute_nvfp4.sim.frontend.model import (
    TYPE_BITS,
    Address,
    Imm,
    Instruction,
    Kernel,
    Module,
    Operand,
    Pair,
    Param,
    Reg,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from cute_nvfp4.sim.frontend.special import BITS

_TOKEN = re.compile(r"[;{}]|[^;{}]+")
_DIRECTIVE = re.compile(r"\.(version|target|address_size|file|loc|section)\b\s*(.*)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_INLINE = re.compile(r"// begin inline asm.*?// end inline asm", re.S)
_LOC = re.compile(r"^\s*\.loc\b[^\n]*", re.M)
_HEADER = re.compile(r"(?:\.\w+\s+)*\.(entry|func)\b")
_NAME = r"[A-Za-z_$%][\w$]*"
_LABEL = re.compile(rf"\s*({_NAME})\s*:(?!:)\s*")
_PARAM = re.compile(
    rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)((?:\s+\.ptr(?:\s+\.(?:global|shared|const|local))?(?:\s+\.align\s+\d+)?)?)"
    rf"\s+({_NAME})(?:\[(\d+)\])?$"
)
_VARIABLE = re.compile(
    rf"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?(?:\.v([24])\s+)?\.(\w+)"
    rf"\s+({_NAME})((?:\[\d*\])*)(?:\s*=\s*(.+))?$"
)
_INSTRUCTION = re.compile(rf"(?:@(!?)({_NAME})\s+)?([a-z][\w]*(?:\.[\w]+(?:::[\w]+)*)*)(?:\s+(.*))?$", re.S)
_INT = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT = re.compile(r"-?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)$")
_PERFORMANCE = re.compile(r"\.(\w+)(?:\s+([\d\s,]+))?")


def parse_module(text: str) -> Module:
    """Parses a whole module; raises ``PtxSyntaxError`` with the line of what it cannot read."""
    # .file directives come after the .loc lines that use them.
    module = Module(files={int(n): path for n, path in _FILE.findall(text)})
    for header, line, body in _toplevel(text, module):
        if body is None:
            _module_variable(module, header, line)
            continue
        kind = _HEADER.match(header).group(1)
        if kind == "func":
            # Device functions are read only to be skipped: a call to one is refused where it is executed.
            continue
        kernel = _kernel_header(header, line)
        _resolve(kernel, body, {}, [0])
        kernel.variables = {**module.variables, **kernel.variables}
        module.kernels[kernel.name] = kernel
    return module


def _strip_comments(text: str) -> str:
    # Inside inline assembly the compiler counts lines of the assembly's own text: those .loc lines name nothing.
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
                    loc = _location(rest, module)
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
                if buffer.strip():
                    stack[-1].append((" ".join(buffer.split()), start, loc))
                    buffer = ""
                if not stack:
                    raise PtxSyntaxError(f"line {number}: `}}` closes nothing")
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
        raise PtxSyntaxError(
            f"the module ends inside a statement or scope begun on line {start}: `{buffer.strip()[:80]}`"
        )


def _opens_scope(buffer: str, inside: bool) -> bool:
    text = buffer.strip()
    return not text or text.endswith(":") or (not inside and _HEADER.match(text) is not None)


def _location(rest: str, module: Module) -> str:
    file, line, *_ = rest.replace(",", " ").split()
    return f"{module.files.get(int(file), 'file ' + file)}:{line}"


def _module_directive(module: Module, name: str, rest: str) -> None:
    if name == "version":
        module.version = rest.strip()
    elif name == "target":
        module.target = rest.split(",")[0].strip()


def _module_variable(module: Module, statement: str, line: int) -> None:
    if re.match(r"(?:\.\w+\s+)*\.(func|entry|pragma|alias)\b", statement):
        return
    variable = _variable(statement, line)
    module.variables[variable.name] = variable


def _variable(statement: str, line: int) -> Variable:
    found = _VARIABLE.match(statement)
    if not found:
        raise PtxSyntaxError(f"line {line}: cannot read the declaration `{statement}`")
    space, align, vector, kind, name, dims, init = found.groups()
    if kind not in TYPE_BITS:
        raise PtxSyntaxError(f"line {line}: unknown type .{kind} in `{statement}`")
    element = TYPE_BITS[kind] // 8
    size = element * int(vector or 1)
    count = math.prod(int(d) if d else 0 for d in re.findall(r"\[(\d*)\]", dims))
    data = b""
    if init:
        numbers = [_immediate(v.strip(), line) for v in init.strip("{} ").split(",")]
        data = b"".join((v.value & ((1 << 8 * element) - 1)).to_bytes(element, "little") for v in numbers)
    return Variable(name, space, size * count, int(align or size), data)


def _kernel_header(header: str, line: int) -> Kernel:
    found = re.match(rf"(?:\.\w+\s+)*\.entry\s+({_NAME})\s*(?:\((.*?)\))?\s*(.*)$", header, re.S)
    if not found:
        raise PtxSyntaxError(f"line {line}: cannot read the kernel header `{header[:120]}`")
    name, params, tail = found.groups()
    kernel = Kernel(name)
    offset, out = 0, []
    for text in filter(None, (p.strip() for p in (params or "").split(","))):
        read = _PARAM.match(text)
        if not read or read.group(2) not in TYPE_BITS:
            raise PtxSyntaxError(f"line {line}: cannot read the parameter `{text}`")
        align, kind, _, pname, count = read.groups()
        element = TYPE_BITS[kind] // 8
        size, align = element * int(count or 1), int(align or element)
        offset = -(-offset // align) * align
        out.append(Param(pname, kind, size, align, offset))
        offset += size
    kernel.params = tuple(out)
    for key, values in _PERFORMANCE.findall(tail):
        kernel.directives[key] = tuple(int(v) for v in values.replace(",", " ").split())
    return kernel


def _resolve(kernel: Kernel, body: list, outer: dict[str, Operand], counter: list[int]) -> None:
    """Flattens a scope into ``kernel``; ``outer`` maps visible names of registers and labels to operands."""
    suffix = f"@{counter[0]}" if counter[0] else ""
    counter[0] += 1
    names = dict(outer)
    statements = []
    for item in body:
        if isinstance(item, list):
            statements.append(item)
            continue
        text, line, loc = item
        while (found := _LABEL.match(text)) is not None:
            label = found.group(1)
            names[label] = Symbol(label + suffix)
            text = text[found.end() :]
            if text.startswith((".branchtargets", ".calltargets")):
                targets = tuple(t.strip() for t in text.split(None, 1)[1].split(","))
                kernel.branch_tables[label + suffix] = targets
                text = ""
            else:
                statements.append(label + suffix)
        if text.startswith(".reg"):
            _registers(kernel, text, line, names, suffix)
        elif text.startswith(".param"):
            _call_parameter(kernel, text, line, names, suffix)
        elif text.startswith((".shared", ".local", ".extern", ".global", ".const")):
            variable = _variable(text, line)
            kernel.variables[variable.name] = variable
        elif text.startswith(".pragma") or not text:
            continue
        else:
            statements.append((text, line, loc))
    for item in statements:
        if isinstance(item, list):
            _resolve(kernel, item, names, counter)
        elif isinstance(item, str):
            kernel.labels[item] = len(kernel.code)
        else:
            kernel.code.append(_instruction(*item, names))
    for table, targets in list(kernel.branch_tables.items()):
        kernel.branch_tables[table] = tuple(names[t].name if t in names else t for t in targets)


def _registers(kernel: Kernel, text: str, line: int, names: dict[str, Operand], suffix: str) -> None:
    found = re.match(r"\.reg\s+(?:\.v[24]\s+)?\.(\w+)\s+(.*)$", text, re.S)
    if not found or found.group(1) not in TYPE_BITS:
        raise PtxSyntaxError(f"line {line}: cannot read the register declaration `{text}`")
    kind, rest = found.groups()
    for name in rest.split(","):
        name = name.strip()
        many = re.match(rf"({_NAME})<(\d+)>$", name)
        for each in [f"{many.group(1)}{i}" for i in range(int(many.group(2)))] if many else [name]:
            names[each] = Reg(each + suffix)
            kernel.regs[each + suffix] = kind


def _call_parameter(kernel: Kernel, text: str, line: int, names: dict[str, Operand], suffix: str) -> None:
    """A parameter or result of a call, declared in the scope around it: a register that ``st.param`` and ``ld.param``
    move to and from."""
    read = _PARAM.match(text)
    if not read or read.group(5) or read.group(2) not in TYPE_BITS:
        raise PtxSyntaxError(f"line {line}: cannot read the parameter `{text}` of a call")
    name = f"[{read.group(4)}]{suffix}"
    names[read.group(4)] = Reg(name)
    kernel.regs[name] = read.group(2)


def _call_move(found: Instruction) -> Instruction:
    """``st.param`` and ``ld.param`` on a call's parameter, as a move."""
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
        raise PtxSyntaxError(f"line {line}: cannot read the instruction `{text}`")
    negated, guard, opcode, rest = found.groups()
    operands = tuple(_operand(o, names, line) for o in _split(rest or ""))
    predicate = None
    if guard:
        if not isinstance(names.get(guard), Reg):
            raise PtxSyntaxError(f"line {line}: predicate {guard} is not declared")
        predicate = Reg(names[guard].name, bool(negated))
    read = Instruction(opcode, operands, predicate, text, line, loc)
    return _call_move(read) if ".param." in opcode and operands else read


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    if not any(c in text for c in "{[("):
        return [p.strip() for p in text.split(",")] if text.strip() else []
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return parts


def _operand(text: str, names: dict[str, Operand], line: int) -> Operand:
    if text in names:
        return names[text]
    head = text[:1]
    if head in ("{", "("):
        return Vector(tuple(_operand(p, names, line) for p in _split(text[1:-1])))
    if head == "[":
        return _address(text[1:-1], names, line)
    if head == "!":
        return Reg(_operand(text[1:].strip(), names, line).name, negated=True)
    if text == "_":
        return Sink()
    if "|" in text:
        first, second = text.split("|")
        return Pair(_operand(first.strip(), names, line), _operand(second.strip(), names, line))
    if head == "%" or text == "WARP_SZ":
        if text in BITS:
            return Special(text)
        raise PtxSyntaxError(f"line {line}: register or special register {text} is not declared")
    if head.isdigit() or head == "-":
        return _immediate(text, line)
    found = re.match(rf"({_NAME})\s*(?:\+\s*(-?\d+))?$", text)
    if not found:
        raise PtxSyntaxError(f"line {line}: cannot read the operand `{text}`")
    return Symbol(found.group(1), int(found.group(2) or 0))


def _address(text: str, names: dict[str, Operand], line: int) -> Address:
    first, *extra = _split(text)
    found = re.match(r"([^+\s]+)\s*(?:\+\s*(-?\w+))?$", first)
    if not found:
        raise PtxSyntaxError(f"line {line}: cannot read the address `[{text}]`")
    base = _operand(found.group(1), names, line)
    offset = _immediate(found.group(2), line).value if found.group(2) else 0
    if isinstance(base, Symbol):
        base, offset = Symbol(base.name), offset + base.offset
    return Address(base, offset, tuple(_operand(e, names, line) for e in extra))


def _immediate(text: str, line: int) -> Imm:
    if text[:2] in ("0f", "0F") and len(text) == 10:
        return Imm(int(text[2:], 16), "f32")
    if text[:2] in ("0d", "0D") and len(text) == 18:
        return Imm(int(text[2:], 16), "f64")
    found = _INT.match(text)
    if found:
        sign, digits = found.groups()
        octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
        value = int(digits, 8) if octal else int(digits, 0)
        return Imm(-value if sign else value)
    if _FLOAT.match(text):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], "f64")
    raise PtxSyntaxError(f"line {line}: cannot read the constant `{text}`")
