"""The tools ptxas and nvdisasm: where they are, and how the clock calls them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from cute_nvfp4.sim.errors import ClockError

_SECONDS = 300


def found(name: str) -> bool:
    """Returns whether this computer has the CUDA tool ``name``."""
    try:
        return bool(tool(name))
    except ClockError:
        return False


@cache
def tool(name: str) -> str:
    """Returns the path of a CUDA tool: ``CUTE_NVFP4_PTXAS`` and the like, or else the first one of NVIDIA's wheels, the
    search path and /usr/local/cuda. Raises ``ClockError`` if there is none."""
    if given := os.environ.get(f"CUTE_NVFP4_{name.upper()}"):
        return given
    wheels = [Path(place) / "nvidia" / "cu13" / "bin" / name for place in sys.path]
    for path in (*wheels, shutil.which(name), Path("/usr/local/cuda/bin") / name):
        if path and Path(path).is_file():
            return str(path)
    hint = "pip install nvidia-cuda-nvcc has ptxas" if name == "ptxas" else f"pip install nvidia-cuda-{name}"
    raise ClockError.of("the clock", got=f"no {name}", expected="one of CUDA 13", hint=hint)


def assemble(ptx: str, target: str) -> tuple[bytes, int]:
    """Compiles PTX. Returns a cubin with line numbers, and the registers of a thread (the most of all kernels)."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        said = _run([tool("ptxas"), "-v", "-lineinfo", f"-arch={target}", "-o", str(cubin), str(source)])
        used = map(int, re.findall(r"Used (\d+) registers", said))
        return cubin.read_bytes(), max(used, default=0)


def disassemble(cubin: bytes) -> str:
    """Returns nvdisasm's text of a cubin, with line numbers and encodings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run([tool("nvdisasm"), "-c", "-g", "-hex", file.name], errors=False)


def _run(command: list[str], errors: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise ClockError.of(Path(command[0]).name, got=done.stderr.strip()[-2000:], expected="no errors")
    return done.stdout + (done.stderr if errors else "")
