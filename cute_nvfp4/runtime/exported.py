"""Loads and calls exported operations, without the compiler and without the DSL.

The file is a zip archive: ``plan.json`` (launches, positions of what varies, what each operand must be),
``kernel.cubin`` for a GPU, and ``kernel.ptx`` for the simulator. ``ops.export`` writes it.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import OperandError, TargetError
from ..formats import FORMATS
from ..operand import BlockScaledTensor, OperandKey
from ..prepared_weight import PreparedWeight
from ..row_scaled import FP8, RowScaledTensor
from ..scale_layout import blocked_shape, blocked_stride
from ..tensors import check_dense
from .backend import device_index, resolve
from .cache import CompiledKernel
from .launch import CudaLauncher, Launcher, SimLauncher
from .overlap import OverlapCheck
from .template import Patch, Template

VERSION = 1
# the widest load of any kernel, in bytes, on any architecture
_WIDEST_LOAD = 32
_OPERANDS = (BlockScaledTensor, PreparedWeight, RowScaledTensor)


def load_exported(path: str | Path) -> Exported:
    """Loads the operation that ``export`` wrote to ``path``, as a callable that takes the same operands.

    Raises:
        OperandError: the file is missing, or is not one of this version.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            plan = json.loads(archive.read("plan.json"))
            cubin, ptx = archive.read("kernel.cubin"), archive.read("kernel.ptx").decode()
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise OperandError.of(
            "exported operation", got=f"{path}: {error}", expected="a file that export wrote"
        ) from error
    if plan.get("version") != VERSION:
        got = f"version {plan.get('version')}"
        raise OperandError.of(f"exported operation {path}", got=got, expected=VERSION, hint="Export it again.")
    return Exported(plan, CompiledKernel(ptx=ptx, cubin=cubin, host_ir="", **plan["kernel"]))


class Exported:
    """A loaded operation. Call it with its operands by name; without ``out`` it makes a result.

    operation: its name. arch: the architecture that it was compiled for. operands: what each operand must be, by name.
    """

    def __init__(self, plan: Mapping[str, Any], kernel: CompiledKernel) -> None:
        self.operation, self.arch, self.operands = plan["operation"], kernel.arch, plan["operands"]
        self._plan, self._kernel = plan, kernel
        self._launchers: dict[torch.device, Launcher] = {}
        launches = tuple(_launch_from(record) for record in plan["launches"])
        self._apart = OverlapCheck(dict(plan["sizes"]), plan["written"])
        self._template = Template(launches, tuple(Patch(**patch) for patch in plan["patches"]), plan["values"])

    def __repr__(self) -> str:
        return f"Exported({self.operation} for {self.arch}: {self.operands})"

    def __call__(self, **given: Any) -> Any:
        """Runs the operation on the operands ``given`` and returns the result.

        A new quantized result has the exported global scale. If that was a tensor, the caller must give ``out``, which
        has its own.

        Raises:
            OperandError, OperandTypeError: operands are unlike the exported ones, or overlap the output.
            TargetError: the kernel was not compiled for the device of the tensors.
        """
        missing = [name for name in self.operands if name not in given and name != "out"]
        unknown = [name for name in given if name not in self.operands]
        if missing or unknown:
            got = f"{'no ' + missing[0] if missing else unknown[0]}"
            raise OperandError.of(f"operands of {self.operation}", got=got, expected=", ".join(self.operands))
        for name, x in given.items():
            if not (isinstance(x, _OPERANDS) or (name == "out" and x is None)):
                check_dense(name, x)
        device = next(x.device for x in given.values() if x is not None)
        if given.get("out") is None:
            given["out"] = self._new(device)
        for name, expected in self.operands.items():
            if not _fits(found := described(given[name]), expected):
                raise OperandError.of(name, got=found, expected=expected)
            if given[name].device != device:
                raise OperandError.of(f"device of {name}", got=given[name].device, expected=device)
        values: list[Any] = [0] * self._plan["values"]
        for index, value in self._plan["constants"]:
            values[index] = value
        for name, slots in self._plan["slots"].items():
            for part, index in slots:
                values[index] = (given[name] if part is None else getattr(given[name], part)).data_ptr()
        self._apart.check(values)
        self._launcher(device)(tuple(values), (given,))
        return given["out"]

    def _new(self, device: torch.device) -> Any:
        """A new result; raises if it needs a global scale and the file has none."""
        expected, scale = self.operands["out"], self._plan.get("global_scale")
        if expected.get("has_global_scale") and scale is None:
            raise OperandError.of(
                f"out of {self.operation}", got="none", expected="one with the global scale to quantize with",
                hint="Or export it with a global scale that is a number.",
            )  # fmt: skip
        return _new(expected, device, scale)

    def _launcher(self, device: torch.device) -> Launcher:
        found = self._launchers.get(device)
        if found is None:
            if device.type == "cpu":
                found = SimLauncher(self._kernel, self._template, lambda kernel: self._template, self._touched)
            else:
                target = resolve("cuda", device)
                if target.arch.name != self.arch:
                    raise TargetError.of(
                        f"architecture of {device} ({torch.cuda.get_device_name(device)})",
                        got=target.arch.name,
                        expected=f"{self.arch}, which the exported {self.operation} was compiled for",
                        hint="Export it again for this GPU.",
                    )
                found = CudaLauncher(self._kernel, self._template, device_index(device))
            self._launchers[device] = found
        return found

    def _touched(self, given: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, bool]]:
        found = {}
        for name, x in given.items():
            parts = {name: x}
            if isinstance(x, PreparedWeight):
                names = ("packed", "global_scale", "up_global_scale", "row_factor")
                parts = {f"{name}.{part}": getattr(x, part) for part in names}
            if isinstance(x, RowScaledTensor):
                parts = {f"{name}.{part}": getattr(x, part) for part in ("data", "scale")}
            if isinstance(x, BlockScaledTensor):
                parts = {f"{name}.{part}": getattr(x, part) for part in ("data", "scale", "global_scale")}
            found |= {key: (tensor, name == "out") for key, tensor in parts.items() if tensor is not None}
        return found


def described(x: Any) -> dict[str, Any]:
    """What an operand must be, as JSON: everything but its device and addresses."""
    if isinstance(x, BlockScaledTensor):
        key = {field.name: getattr(x.key, field.name) for field in dataclasses.fields(OperandKey)}
        for name in ("device", "on_cpu", "plain", "format"):
            del key[name]
        if x.scale_layout == "blocked":
            # kernels read all blocked scales in the same way
            del key["scale_alignment"]
        key |= {name: list(key[name]) for name in ("strides", "scale_strides")}
        return {"format": x.format.name, **key}
    if isinstance(x, RowScaledTensor):
        return {"rows in": FP8, "rows": x.rows, "k": x.k, "stride": x.key.stride, "alignment": x.key.alignment}
    if isinstance(x, PreparedWeight):
        dtype = str(x.dtype).removeprefix("torch.")
        found = {"prepared": dtype, "rows": x.rows, "k": x.k, "has_global_scale": x.global_scale is not None}
        return found | {"gated": x.gated, "packing": x.packing, "promoted": x.promoted}
    bits = x.data_ptr() | _WIDEST_LOAD
    return {
        "dtype": str(x.dtype).removeprefix("torch."),
        "shape": list(x.shape),
        "strides": list(x.stride()),
        "alignment": bits & -bits,
    }


def _fits(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether an operand is what it must be; more alignment is fine."""
    if found.keys() != expected.keys():
        return False
    return all(x >= expected[name] if name.endswith("alignment") else x == expected[name] for name, x in found.items())


def _new(expected: Mapping[str, Any], device: torch.device, global_scale: float | None) -> Any:
    """A new output that fits the description."""
    if "dtype" in expected:
        dtype = getattr(torch, expected["dtype"])
        return torch.empty_strided(expected["shape"], expected["strides"], dtype=dtype, device=device)
    rows, batch, format = expected["rows"], expected["batch"], FORMATS[expected["format"]]
    lead = (batch, rows) if expected["batched"] else (rows,)
    columns = format.scale_columns(expected["k"])
    data = torch.empty((*lead, format.data_columns(expected["k"])), dtype=torch.uint8, device=device)
    if expected["scale_layout"] == "blocked":
        sizes = rows, columns, batch
        scale = torch.empty_strided(blocked_shape(*sizes), blocked_stride(*sizes), dtype=torch.uint8, device=device)
    else:
        scale = torch.empty((*lead, columns), dtype=torch.uint8, device=device)
    factor = None
    if expected["has_global_scale"]:
        factor = torch.full((), global_scale, dtype=torch.float32, device=device)
    return BlockScaledTensor(data, scale, factor, format)


def _launch_from(record: Mapping[str, Any]) -> Any:
    from ..sim.machine.launch import Launch

    fields = dict(record)
    fields |= {name: tuple(record[name]) for name in ("grid", "block", "cluster")}
    fields["params"] = tuple(bytes.fromhex(param) for param in record["params"])
    fields["attributes"] = tuple((number, bytes.fromhex(value)) for number, value in record["attributes"])
    return Launch(**fields)
