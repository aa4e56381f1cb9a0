"""What a compiled kernel costs, read from its cubin and PTX without a GPU.

Registers, stack and memory come from ``cuobjdump --dump-resource-usage``, the instruction mix and the widths of loads
from ``nvdisasm``, and the requested cache policies from the PTX. Counts are static: each instruction in the code counts
once, however often it runs.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import CompileError

_WHEELS = {"nvdisasm": "nvidia-cuda-nvdisasm", "cuobjdump": "nvidia-cuda-cuobjdump", "ptxas": "nvidia-cuda-nvcc"}
_TIMEOUT_S = 120

# Class -> opcodes, up to their first dot. The names are those of nvdisasm for sm_90 to sm_103.
_CLASSES = {
    "global memory": "LDG STG LD ST RED REDG ATOM ATOMG LDGSTS CCTL CCTLL",
    "shared memory": "LDS STS LDSM STSM ATOMS LDGDEPBAR",
    "local memory": "LDL STL",
    "constant memory": "LDC LDCU ULDC",
    "tma": "UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP UBLKPF UBLKRED",
    "conversion": "F2FP F2F F2I F2IP I2F I2FP I2I I2IP FRND UF2FP",
    "half": "HFMA2 HADD2 HMUL2 HSET2 HSETP2 HMNMX2 HFMA2_MMA",
    "float": "FFMA FADD FMUL FFMA2 FADD2 FMUL2 FSEL FSET FSETP FMNMX FMNMX3 FCHK FSWZADD MUFU UFADD UFFMA UFMUL",
    "double": "DFMA DADD DMUL DSETP DMNMX",
    "prmt": "PRMT UPRMT",
    "integer": "IADD IADD3 IADD32I IMAD IMUL ISETP IMNMX IABS ISCADD LEA LOP LOP3 LOP32I SHF SHL SHR SEL BREV POPC FLO "
    "IDP IDP4A VIADD VIADDMNMX VIMNMX VIMNMX3 BMSK SGXT PLOP3 XMAD VABSDIFF VABSDIFF4 LEPC VHMNMX "
    "UIADD3 UIMAD UISETP ULEA ULOP ULOP3 USHF USEL UPOPC UFLO UBREV UBMSK USGXT UPLOP3 UIMNMX UIABS UVIADD UVIMNMX "
    "UVIRTCOUNT",
    "move": "MOV MOV32I UMOV S2R S2UR R2UR CS2R MOVM R2P P2R R2B B2R UP2UR UR2UP UMOV32I",
    "warp": "SHFL VOTE VOTEU REDUX CREDUX MATCH ELECT",
    "tensor": "HMMA IMMA QMMA OMMA DMMA BMMA HGMMA QGMMA IGMMA BGMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA UTCMXQMMA UTCCP "
    "LDTM STTM LDT STT UTCBAR UTCSHIFT UTCATOMSWS WARPGROUP WARPGROUPSET",
    "control": "BRA BRX JMP JMX CALL RET EXIT BSSY BSYNC BREAK BMOV WARPSYNC YIELD NANOSLEEP KILL BPT RPCMOV PREEXIT "
    "BAR UBAR MEMBAR ERRBAR DEPBAR SYNCS ACQBULK ARRIVES FENCE UCGABAR_ARV UCGABAR_WAIT CGAERRBAR ENDCOLLECTIVE "
    "COLLECTIVE WARPSYNCALL UGETNEXTWORKID ACQSHMINIT USETMAXREG USETSHMSZ BRXU JMXU UBRA PMTRIG",
}
_CLASS_OF = {opcode: name for name, opcodes in _CLASSES.items() for opcode in opcodes.split()}

_SASS_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)
_SASS_LABEL = re.compile(r"^(\.L_\w+):\s*$", re.MULTILINE)
_SASS_BRANCH = re.compile(r"\bBRA[.\w]*\s[^`;]*`\((\.L_\w+)\)")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,]+),", re.MULTILINE)
_RESOURCES = re.compile(r"Function ([^\s:]+):\s*\n\s*(.*)")
_PTX_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_PTX_ACCESS = re.compile(r"\b(ld|st)((?:\.[A-Za-z0-9_:]+)+)\s")
# cp.async [shared], [global], bytes; bulk copies have a class of their own, and get their size at run time
_PTX_COPY = re.compile(r"\bcp\.async\.(c[ag](?:\.[A-Za-z0-9_:]+)*)\s+\[[^\]]*\],\s*\[[^\]]*\],\s*(\d+)")
_PTX_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
_SASS_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_SASS_SPACES = {
    "LDG": ("load", "global"), "STG": ("store", "global"), "LD": ("load", "generic"), "ST": ("store", "generic"),
    "LDS": ("load", "shared"), "STS": ("store", "shared"), "LDL": ("load", "local"), "STL": ("store", "local"),
    "LDGSTS": ("copy", "global"),
}  # fmt: skip


@dataclass(frozen=True)
class Access:
    """Equal accesses, counted: ``bits`` a thread and instruction, ``policy`` as written in the code.

    A ``copy`` goes from global to shared memory without passing through registers (``cp.async``, ``LDGSTS``).
    """

    kind: str  # load | store | copy
    space: str
    bits: int
    policy: str
    count: int


@dataclass(frozen=True)
class KernelReport:
    """What one kernel costs. Memory is in bytes; spill_loads, spill_stores: the number of local-memory instructions."""

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    local_bytes: int
    spill_loads: int
    spill_stores: int
    instructions: int
    mix: dict[str, int]  # by class, largest first
    opcodes: dict[str, int]  # by full opcode, largest first
    sass_accesses: tuple[Access, ...]
    ptx_accesses: tuple[Access, ...]

    def count(self, opcode: str) -> int:
        """How many instructions are ``opcode`` or ``opcode.something``."""
        return _count(self.opcodes, opcode)


@dataclass(frozen=True)
class Loop:
    """The code from a label to a branch back to it: what one iteration executes, except for code that it skips."""

    instructions: int
    opcodes: dict[str, int]  # by full opcode

    def count(self, opcode: str) -> int:
        """How many instructions are ``opcode`` or ``opcode.something``."""
        return _count(self.opcodes, opcode)


@dataclass(frozen=True)
class Report:
    """Every kernel of a cubin, and its disassembly."""

    kernels: tuple[KernelReport, ...]
    sass: str

    @property
    def kernel(self) -> KernelReport:
        """The only kernel of the cubin."""
        if len(self.kernels) != 1:
            names = ", ".join(kernel.name for kernel in self.kernels)
            raise CompileError(f"the cubin holds {len(self.kernels)} kernels ({names}), not one")
        return self.kernels[0]

    def to_dict(self) -> dict:
        """The report for JSON, without the disassembly."""
        return {"kernels": [asdict(kernel) for kernel in self.kernels]}


def _count(opcodes: dict[str, int], opcode: str) -> int:
    return sum(n for name, n in opcodes.items() if name == opcode or name.startswith(opcode + "."))


def find_tool(name: str) -> Path:
    """The CUDA binary utility ``name`` (``nvdisasm``, ``cuobjdump`` or ``ptxas``): from its wheel, else from ``PATH``.

    Raises:
        CompileError: it is in neither; the message says which wheel to install.
    """
    namespace = importlib.util.find_spec("nvidia")
    for folder in (namespace.submodule_search_locations if namespace else None) or ():
        for path in sorted(Path(folder).glob(f"*/bin/{name}"), reverse=True):
            return path
    on_path = shutil.which(name)
    if on_path is None:
        raise CompileError(f"{name} was not found; install it with: pip install {_WHEELS.get(name, name)}")
    return Path(on_path)


def _run_tool(name: str, cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(find_tool(name)), *options, file.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"{name} did not run: {error}") from error
    # nvdisasm warns on stderr about some cubins; only its status says whether it failed
    if done.returncode:
        raise CompileError(f"{name} failed with exit code {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin, as nvdisasm prints it."""
    return _run_tool("nvdisasm", cubin, "-c")


def inspect_cubin(cubin: bytes, ptx: str) -> Report:
    """Reads what each kernel of ``cubin`` uses and does; ``ptx`` is the PTX it was assembled from.

    Raises:
        CompileError: a tool is missing or refuses the cubin, or its output is not understood.
    """
    resources = _parse_resources(_run_tool("cuobjdump", cubin, "--dump-resource-usage"))
    sass = disassemble(cubin)
    code, entries = _split(_SECTION, sass), _split(_PTX_ENTRY, ptx)
    if not code or set(code) - set(resources):
        raise CompileError(f"no resource usage for the kernels {sorted(code)}: cuobjdump knows {sorted(resources)}")
    return Report(tuple(_kernel(name, code[name], entries.get(name, ""), resources[name]) for name in code), sass)


def innermost_loop(sass: str, opcode: str) -> Loop:
    """The shortest loop of a kernel's disassembly that contains ``opcode``.

    Raises:
        CompileError: no loop contains it.
    """
    lines, found = sass.splitlines(), []
    labels = {match.group(1): n for n, line in enumerate(lines) if (match := _SASS_LABEL.match(line))}
    for n, line in enumerate(lines):
        branch = _SASS_BRANCH.search(line)
        start = labels.get(branch.group(1), n) if branch else n
        if start < n:
            opcodes = Counter(name for name, _ in _instructions("\n".join(lines[start : n + 1])))
            if _count(opcodes, opcode):
                found.append(Loop(opcodes.total(), dict(opcodes.most_common())))
    if not found:
        raise CompileError(f"no loop of the kernel contains {opcode}")
    return min(found, key=lambda loop: loop.instructions)


def _split(header: re.Pattern, text: str) -> dict[str, str]:
    """The sections of ``text``, by the name in the header that starts each."""
    found = list(header.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return {match.group(1): text[match.end() : end] for match, end in zip(found, ends)}


def _parse_resources(text: str) -> dict[str, dict[str, int]]:
    found = {}
    for name, line in _RESOURCES.findall(text):
        found[name] = {key: int(value) for key, value in re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", line)}
        missing = {"REG", "STACK", "SHARED", "LOCAL"} - set(found[name])
        if missing:
            raise CompileError(f"cuobjdump gives no {sorted(missing)} for {name}: {line}")
    return found


def _instructions(code: str) -> list[tuple[str, str]]:
    """(opcode, operands) of each instruction, without the padding at the end (a branch to itself, NOPs)."""
    label_at = {match.end(): match.group(1) for match in _SASS_LABEL.finditer(code)}
    found = []
    for match in _SASS_LINE.finditer(code):
        opcode, operands = match.group(1), match.group(2).strip()
        before = code[: match.start()].rstrip()
        own_label = label_at.get(len(before))
        if opcode == "NOP" or (opcode == "BRA" and own_label is not None and f"({own_label})" in operands):
            continue
        found.append((opcode, operands))
    return found


def _class(opcode: str, operands: str) -> str:
    base, *modifiers = opcode.split(".")
    if base == "HADD2" and "F32" in modifiers:
        return "conversion"  # f16 to f32
    if base in ("HFMA2", "HFMA2_MMA") and ", -RZ, RZ," in operands:
        return "move"  # a constant
    if base == "IMAD" and "MOV" in modifiers:
        return "move"
    return _CLASS_OF.get(base, "other")


def _sass_accesses(instructions: list[tuple[str, str]]) -> tuple[Access, ...]:
    counts: Counter = Counter()
    for opcode, _ in instructions:
        base, *modifiers = opcode.split(".")
        if base not in _SASS_SPACES:
            continue
        bits = next((_SASS_WIDTHS[m] for m in reversed(modifiers) if m in _SASS_WIDTHS), 32)
        policy = ".".join(m for m in modifiers if m not in _SASS_WIDTHS and m not in ("E", "ENL2"))
        counts[(*_SASS_SPACES[base], bits, policy)] += 1
    return _accesses(counts)


def _ptx_accesses(text: str) -> tuple[Access, ...]:
    counts: Counter = Counter()
    for operation, suffix in _PTX_ACCESS.findall(text):
        parts = suffix.strip(".").split(".")
        space = next((part for part in parts if part in _PTX_SPACES), "generic")
        if space == "param" or not re.fullmatch(r"[busf]\d+|f16x2", parts[-1]):
            continue
        element = 32 if parts[-1] == "f16x2" else int(parts[-1][1:])
        lanes = next((int(part[1:]) for part in parts if re.fullmatch(r"v[248]", part)), 1)
        policy = ".".join(p for p in parts[:-1] if p != space and not re.fullmatch(r"v[248]", p))
        counts[("load" if operation == "ld" else "store", space, element * lanes, policy)] += 1
    for suffix, size in _PTX_COPY.findall(text):
        policy = ".".join(part for part in suffix.split(".") if part not in _PTX_SPACES)
        counts[("copy", "global", 8 * int(size), policy)] += 1
    return _accesses(counts)


def _accesses(counts: Counter) -> tuple[Access, ...]:
    order = sorted(counts.items(), key=lambda item: (item[0][0], item[0][1], -item[0][2], item[0][3]))
    return tuple(Access(*key, count=count) for key, count in order)


def _kernel(name: str, code: str, ptx: str, resources: dict[str, int]) -> KernelReport:
    instructions = _instructions(code)
    if not instructions:
        raise CompileError(f"nvdisasm shows no instructions of kernel {name}")
    opcodes = Counter(opcode for opcode, _ in instructions)
    bases = Counter(opcode.split(".")[0] for opcode, _ in instructions)
    return KernelReport(
        name=name,
        registers=resources["REG"],
        stack_bytes=resources["STACK"],
        shared_bytes=resources["SHARED"],
        local_bytes=resources["LOCAL"],
        spill_loads=bases["LDL"],
        spill_stores=bases["STL"],
        instructions=len(instructions),
        mix=dict(Counter(_class(*instruction) for instruction in instructions).most_common()),
        opcodes=dict(opcodes.most_common()),
        sass_accesses=_sass_accesses(instructions),
        ptx_accesses=_ptx_accesses(ptx),
    )
