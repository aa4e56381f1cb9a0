"""What a recorded launch is: a kernel's text, the memory and arguments it is given, and what it leaves in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

Expected = Callable[[list[np.ndarray]], dict[int, np.ndarray]]


@dataclass(frozen=True)
class TensorMap:
    """The arguments of cuTensorMapEncodeTiled (CUDA driver API, "Tensor Map Object Managment").

    ``kind`` is a name of ``KINDS`` in :mod:`descriptor`; ``dims``, ``box`` and ``steps`` (element strides) have one
    entry a dimension, innermost first; ``strides`` are the bytes of dimensions 1 and up. ``buffer`` and ``offset``
    say where the tensor begins. ``swizzle``, ``interleave``, ``l2`` and ``fill`` are the driver's enumerators.

    With ``pixels`` it is an im2col map (cuTensorMapEncodeIm2col): ``box`` has the channels of a pixel alone, ``lower``
    and ``upper`` the corners of the bounding box.
    """

    kind: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    swizzle: int = 0
    interleave: int = 0
    l2: int = 0
    fill: int = 0
    buffer: int = 0
    offset: int = 0
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    pixels: int = 0

    def __post_init__(self) -> None:
        if not self.steps:
            object.__setattr__(self, "steps", (1,) * len(self.dims))
        if not len(self.dims) == len(self.strides) + 1 == len(self.steps):
            raise ValueError(f"a tensor map of {len(self.dims)} dimensions: {self}")

    @staticmethod
    def restore(values: dict[str, Any]) -> TensorMap:
        return TensorMap(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


@dataclass(frozen=True)
class Pointer:
    """A 64-bit parameter: the address of byte ``offset`` of a buffer."""

    buffer: int
    offset: int = 0


@dataclass(frozen=True)
class Scalar:
    """A 32-bit parameter."""

    value: int


Argument = TensorMap | Pointer | Scalar


@dataclass(frozen=True)
class Placed:
    """A tensor map that lies in global memory, at byte ``offset`` of a buffer, when the kernel starts."""

    map: TensorMap
    buffer: int
    offset: int = 0


@dataclass
class Case:
    """One launch.

    ``buffers`` are bytes of global memory, each aligned to 512; every one is compared after the launch.
    ``compare`` is "exact", "approximate" (the ISA leaves some bits open), "opaque" (it leaves all of them open), or
    "refused": the launch ends in an error, which is what is recorded.
    ``expected`` maps buffer numbers to what the ISA says they hold afterwards.
    """

    name: str
    ptx: str
    buffers: list[np.ndarray]
    arguments: list[Argument]
    grid: int = 1
    block: int = 128
    cluster: int = 1
    smem: int = 0
    placed: list[Placed] = field(default_factory=list)
    compare: str = "exact"
    programmatic: bool = False
    expected: Expected | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return self.name.split()[0]

    def header(self) -> dict[str, Any]:
        """Everything but the buffers and the text, for JSON."""
        plain = ("name", "grid", "block", "cluster", "smem", "compare", "programmatic", "notes")
        arguments = [{"is": type(a).__name__, **asdict(a)} for a in self.arguments]
        return {k: getattr(self, k) for k in plain} | {
            "arguments": arguments,
            "placed": [asdict(p) for p in self.placed],
        }

    @staticmethod
    def restore(header: dict[str, Any], ptx: str, buffers: list[np.ndarray]) -> Case:
        header = dict(header)
        arguments: list[Argument] = []
        for values in header.pop("arguments"):
            values = dict(values)
            kind = values.pop("is")
            arguments.append(
                TensorMap.restore(values)
                if kind == "TensorMap"
                else {"Pointer": Pointer, "Scalar": Scalar}[kind](**values)
            )
        placed = [Placed(TensorMap.restore(p["map"]), p["buffer"], p["offset"]) for p in header.pop("placed")]
        return Case(ptx=ptx, buffers=buffers, arguments=arguments, placed=placed, **header)
