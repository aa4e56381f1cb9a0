"""``Program``: a PTX module whose kernels the simulator can execute."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cute_nvfp4.sim import isa
from cute_nvfp4.sim.errors import LaunchError
from cute_nvfp4.sim.frontend.model import Kernel, Module
from cute_nvfp4.sim.frontend.parse import parse_module
from cute_nvfp4.sim.machine.global_memory import GlobalMemory
from cute_nvfp4.sim.machine.kernel import CompiledKernel

MOST_BYTES = 8 << 30
"""The largest size in bytes of one module-scope variable, because the simulator keeps its value in host memory."""
assert isa.OPCODES, "the opcode table fills itself when the package is imported"


class Program:
    """A PTX module whose kernels are translated when they are first asked for; ``text`` is the PTX."""

    def __init__(self, module: Module, text: str = "") -> None:
        self.module, self.text = module, text
        self._kernels: dict[str, CompiledKernel] = {}
        self._storage: dict[str, np.ndarray] = {}

    @staticmethod
    @lru_cache(maxsize=64)
    def parse(ptx: str) -> Program:
        """Parses a PTX text; equal texts give the same cached program. Raises ``PtxSyntaxError``."""
        return Program(parse_module(ptx), ptx)

    @property
    def kernels(self) -> dict[str, Kernel]:
        """The parsed kernels, by name."""
        return self.module.kernels

    def kernel(self, name: str) -> CompiledKernel:
        """Returns the translated kernel ``name``. Raises ``LaunchError`` if the PTX has no kernel of that name, and
        ``UnsupportedInstruction`` if the kernel has an instruction that is not modelled."""
        if name not in self.module.kernels:
            raise LaunchError(f"the PTX has no kernel {name!r}; it has {sorted(self.module.kernels)}")
        if name not in self._kernels:
            self._kernels[name] = CompiledKernel(self.module.kernels[name])
        return self._kernels[name]

    def variables(self, memory: GlobalMemory) -> dict[str, int]:
        """Registers the module-scope .global and .const variables in ``memory`` and returns their host addresses.
        Their values last between launches. Raises ``LaunchError`` for a variable of more than ``MOST_BYTES``."""
        out = {}
        for v in self.module.variables.values():
            if v.space not in ("global", "const"):
                continue
            if v.name not in self._storage:
                if v.size > MOST_BYTES:
                    raise LaunchError.of(f"variable {v.name}", got=f"{v.size} bytes", expected=f"at most {MOST_BYTES}")
                data = np.zeros(max(v.size, 1) + v.align, np.uint8)
                at = -data.ctypes.data % v.align
                data[at : at + len(v.init)] = np.frombuffer(v.init, np.uint8)
                self._storage[v.name] = data[at : at + max(v.size, 1)]
            storage = self._storage[v.name]
            out[v.name] = storage.ctypes.data
            if not any(r.base <= storage.ctypes.data < r.end for r in memory.regions):
                memory.add(storage, v.name, writable=v.space == "global")
        return out
