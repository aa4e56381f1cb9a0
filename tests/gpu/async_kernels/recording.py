"""A recording of launches: one ``.npz`` with a JSON header, the PTX of every kernel (LZMA), and each array once.

``replay`` runs a case again, in the simulator, from the recorded PTX, tensor maps and memory.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .case import Case, Pointer, Scalar, TensorMap

_ALIGN = 512


class Writer:
    """Collects cases with what a device made of them."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.places: dict[str, int] = {}
        self.entries: list[dict[str, Any]] = []
        self.ptx: dict[str, str] = {}

    def _place(self, data: np.ndarray) -> int:
        key = hashlib.sha256(data.tobytes()).hexdigest()
        if key not in self.places:
            self.places[key] = len(self.arrays)
            self.arrays.append(np.frombuffer(data.tobytes(), np.uint8))
        return self.places[key]

    def add(self, case: Case, after: list[np.ndarray], maps: list[list]) -> None:
        sha = hashlib.sha256(case.ptx.encode()).hexdigest()
        self.ptx[sha] = case.ptx
        after = masked(case, after)
        entry = {"case": case.header(), "ptx": sha, "maps": maps}
        entry["before"] = [self._place(b) for b in case.buffers]
        entry["after"] = [self._place(a) for a in after]
        self.entries.append(entry)

    def save(self, path: Path, about: dict[str, Any], descriptors: list[list] | None = None) -> None:
        header = {"about": about, "entries": self.entries, "descriptors": descriptors or []}
        header["sizes"] = [len(a) for a in self.arrays]
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            path,
            header=_packed(json.dumps(header).encode()),
            ptx=_packed(json.dumps(self.ptx).encode()),
            data=_packed(b"".join(a.tobytes() for a in self.arrays)),
        )


def _packed(data: bytes) -> np.ndarray:
    return np.frombuffer(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME), np.uint8)


class Recording:
    """A recording read back: ``cases``, and for each ``after`` and ``maps``; ``descriptors`` as [map, address, code of
    the driver's error or 0, bytes in hexadecimal]."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as archive:
            parts = {name: lzma.decompress(archive[name].tobytes()) for name in archive.files}
        header, ptx = json.loads(parts["header"]), json.loads(parts["ptx"])
        flat = np.frombuffer(parts["data"], np.uint8)
        arrays = np.split(flat, np.cumsum(header["sizes"])[:-1])
        self.about: dict[str, Any] = header["about"]
        self.cases = [
            Case.restore(e["case"], ptx[e["ptx"]], [arrays[i] for i in e["before"]]) for e in header["entries"]
        ]
        self.after = [[arrays[i] for i in e["after"]] for e in header["entries"]]
        self.maps: list[list[list]] = [e["maps"] for e in header["entries"]]
        self.descriptors = [
            (TensorMap.restore(m), a, code, bytes.fromhex(b)) for m, a, code, b in header["descriptors"]
        ]


def masked(case: Case, buffers: list[np.ndarray]) -> list[np.ndarray]:
    """The buffers with the addresses in tensor maps, which differ from run to run, made zero."""
    buffers = [b.copy() for b in buffers]
    for placed in case.placed:
        buffers[placed.buffer][placed.offset : placed.offset + 8] = 0
    return buffers


def describe(spec: TensorMap, address: int, code: int, data: bytes) -> list:
    """One recorded descriptor."""
    return [asdict(spec), address, code, data.hex()]


def replay(case: Case, maps: list[list], **options: Any) -> list[np.ndarray]:
    """The buffers when the simulator has executed the launch. ``maps``: [bytes in hexadecimal, address] of its tensor
    maps, whose addresses are changed to where the buffers are now."""
    from cute_nvfp4.sim import GlobalMemory, Launch, Program, run

    # A replay compares values; some recorded kernels break rules on purpose.
    options.setdefault("checks", False)
    memory, buffers = GlobalMemory(), []
    for i, data in enumerate(case.buffers):
        raw = np.zeros(len(data) + _ALIGN, np.uint8)
        at = -raw.ctypes.data % _ALIGN
        buffers.append(raw[at : at + len(data)])
        buffers[i][:] = data
        memory.add(buffers[i], name=f"buffer{i}")

    def moved(spec: TensorMap, descriptor: str, address: int) -> bytes:
        raw = bytes.fromhex(descriptor)
        delta = buffers[spec.buffer].ctypes.data + spec.offset - address
        return (int.from_bytes(raw[:8], "little") + delta).to_bytes(8, "little") + raw[8:]

    specs = [a for a in case.arguments if isinstance(a, TensorMap)] + [p.map for p in case.placed]
    descriptors = [moved(spec, *given) for spec, given in zip(specs, maps, strict=True)]
    for placed, descriptor in zip(case.placed, descriptors[len(specs) - len(case.placed) :]):
        buffers[placed.buffer][placed.offset : placed.offset + 128] = np.frombuffer(descriptor, np.uint8)
    parameters = []
    for argument in case.arguments:
        if isinstance(argument, Pointer):
            parameters.append((buffers[argument.buffer].ctypes.data + argument.offset).to_bytes(8, "little"))
        elif isinstance(argument, Scalar):
            parameters.append(argument.value.to_bytes(4, "little"))
        else:
            parameters.append(descriptors.pop(0))
    launch = Launch(
        "kernel",
        (case.grid, 1, 1),
        (case.block, 1, 1),
        tuple(parameters),
        cluster=(case.cluster, 1, 1),
        dynamic_smem=case.smem,
        programmatic=case.programmatic,
    )
    run(Program.parse(case.ptx), launch, memory, **options)
    return masked(case, buffers)
