"""Keeps what a GPU computed, bit for bit: launches with their PTX, memory before and memory after.

A recording is one ``.npz``: a JSON header (what ran, where, when), the PTX of every kernel (LZMA), and for each launch
the bytes of the tensors it was given and of the one it wrote. :func:`replay` executes a launch again in the simulator,
from the recorded PTX, so that a recording stays valid when kernels change.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cute_nvfp4.runtime.compile import CompiledKernel
from cute_nvfp4.sim import GlobalMemory, Launch, Program, run
from support.gemv_problems import exact_storage

Tensors = Mapping[str, tuple[torch.Tensor, bool]]


@dataclass(frozen=True)
class Tensor:
    """How a tensor lies in its recorded bytes. alignment: the power of two that divides its address."""

    name: str
    dtype: str
    shape: list[int]
    stride: list[int]
    alignment: int
    written: bool

    def restore(self, data: np.ndarray) -> torch.Tensor:
        """The tensor, in memory of exactly its size."""
        dtype = getattr(torch, self.dtype)
        flat = exact_storage(len(data), max(self.alignment, dtype.itemsize), "cpu")
        flat.copy_(torch.from_numpy(data.copy()))
        return flat.view(dtype).as_strided(self.shape, self.stride, flat.storage_offset() // dtype.itemsize)


@dataclass(frozen=True)
class Entry:
    """One launch. pointers: (parameter, tensor) by index; parameters: the bytes of each, in hexadecimal."""

    name: str
    arch: str
    ptx_sha256: str
    kernel: str
    grid: list[int]
    block: list[int]
    dynamic_smem: int
    parameters: list[str]
    pointers: list[list[int]]
    tensors: list[Tensor]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> Tensor:
        (found,) = [x for x in self.tensors if x.written]
        return found


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes from a tensor's first element to its last, including those between."""
    count = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
    flat = tensor.as_strided((count,), (1,))
    return flat.cpu().view(torch.uint8).numpy().copy()


class Recorder:
    """Collects launches."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.ptx: dict[str, str] = {}

    def record(
        self,
        name: str,
        kernel: CompiledKernel,
        found: Launch,
        tensors: Tensors,
        launch: Any,
        **notes: Any,
    ) -> None:
        """Records ``found``, the launch that ``launch()`` makes: its inputs before it and its output after it."""
        places = {tensor.data_ptr(): i for i, (tensor, _) in enumerate(tensors.values())}
        pointers = []
        for i, parameter in enumerate(found.params):
            address = int.from_bytes(parameter, "little")
            if len(parameter) == 8 and address in places:
                pointers.append([i, places[address]])
        if len({place for _, place in pointers}) != len(tensors):
            raise ValueError(f"{name}: not every tensor is a parameter of the kernel")
        described = []
        for i, (label, (tensor, written)) in enumerate(tensors.items()):
            alignment = tensor.data_ptr() & -tensor.data_ptr() & 0xFF or 256
            dtype = str(tensor.dtype).removeprefix("torch.")
            described.append(
                Tensor(label, dtype, list(tensor.shape), list(tensor.stride()), min(alignment, 64), written)
            )
            self.arrays[f"{len(self.entries)}.{i}"] = tensor_bytes(tensor)
        launch()
        for i, (tensor, written) in enumerate(tensors.values()):
            if written:
                self.arrays[f"{len(self.entries)}.{i}.after"] = tensor_bytes(tensor)
        sha = hashlib.sha256(kernel.ptx.encode()).hexdigest()
        self.ptx[sha] = kernel.ptx
        parameters = [p.hex() for p in found.params]
        entry = (name, kernel.arch, sha, found.kernel, list(found.grid), list(found.block), found.dynamic_smem)
        self.entries.append(Entry(*entry, parameters, pointers, described, notes))

    def save(self, path: Path, **about: Any) -> None:
        header = {"about": about, "entries": [asdict(entry) for entry in self.entries]}
        packed = lzma.compress(json.dumps(self.ptx).encode(), preset=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = np.frombuffer(lzma.compress(json.dumps(header).encode(), preset=9), np.uint8)
        np.savez_compressed(path, header=text, ptx=np.frombuffer(packed, np.uint8), **self.arrays)


class Recording:
    """A recording read back."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as archive:
            self.arrays = {name: archive[name] for name in archive.files}
        header = json.loads(lzma.decompress(self.arrays.pop("header").tobytes()))
        self.ptx: dict[str, str] = json.loads(lzma.decompress(self.arrays.pop("ptx").tobytes()))
        self.about: dict[str, Any] = header["about"]
        self.entries = [Entry(**{**e, "tensors": [Tensor(**t) for t in e["tensors"]]}) for e in header["entries"]]

    def tensors(self, entry: Entry) -> list[torch.Tensor]:
        """The tensors of ``entry`` as they were before the launch."""
        index = self.entries.index(entry)
        return [tensor.restore(self.arrays[f"{index}.{i}"]) for i, tensor in enumerate(entry.tensors)]

    def after(self, entry: Entry) -> np.ndarray:
        """The bytes of the output of ``entry`` after the launch."""
        return self.arrays[f"{self.entries.index(entry)}.{entry.tensors.index(entry.output)}.after"]


def replay(recording: Recording, entry: Entry, ptx: str | None = None) -> np.ndarray:
    """The bytes of the output when the simulator executes the launch. ptx: replaces the recorded PTX."""
    tensors = recording.tensors(entry)
    memory = GlobalMemory()
    for described, tensor in zip(entry.tensors, tensors):
        memory.add(tensor, name=described.name, writable=described.written)
    parameters = [bytes.fromhex(p) for p in entry.parameters]
    for i, place in entry.pointers:
        parameters[i] = tensors[place].data_ptr().to_bytes(8, "little")
    launch = Launch(
        entry.kernel, tuple(entry.grid), tuple(entry.block), tuple(parameters), dynamic_smem=entry.dynamic_smem
    )
    run(Program.parse(recording.ptx[entry.ptx_sha256] if ptx is None else ptx), launch, memory)
    return tensor_bytes(tensors[entry.tensors.index(entry.output)])
