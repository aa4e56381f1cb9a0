"""export: writes a planned operation to a file, which ``runtime.exported`` loads."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import OperandError
from ..runtime.exported import VERSION, described
from .prepare import preparation


def export(path: str | Path, operation: Callable[..., Any], *operands: Any, **options: Any) -> None:
    """Writes the kernel that ``operation(*operands, **options)`` would run, and its plan, to ``path``.

    Args:
        path: the file, which is replaced.
        operation: ``gemv``, ``gemm`` or ``quantize``.
        operands, options: the operation's arguments. The file keeps their shapes, strides, dtypes and alignments, and
            numbers such as alpha. Tensors for alpha and bias are refused, because the file has no memory of its own.
            A number for quantize's global scale is kept; a tensor is not: each call brings its own in ``out``.

    Nothing runs. Without a GPU, use CPU tensors in a block of ``simulating(arch)``: the file is then for GPUs of that
    architecture, and for the simulator.

    Raises:
        OperandError, OperandTypeError, TargetError: what ``prepare`` raises.
    """
    made = preparation(operation, *operands, **options)
    if isinstance(made.operands["out"], list):
        expected = "one product, or quantize"
        raise OperandError.of("call to export", got="a list of groups", expected=expected)
    kernel, template = made.launch.kernel, made.launch.template
    varying = {index for slots in made.slots.values() for _, index in slots}
    constants = {i: value for i, value in enumerate(made.values) if i not in varying}
    if any(isinstance(value, int) and value for value in constants.values()):
        raise OperandError.of(
            "call to export",
            got="one that reads tensors besides its operands",
            expected="alpha and bias as numbers, and no rows that another launch decodes",
            hint="Use up to 16 block-scaled rows, or bfloat16 or float16.",
        )
    plan = {
        "version": VERSION,
        "operation": operation.__name__,
        "kernel": {"name": kernel.name, "arch": kernel.arch, "entry": kernel.entry},
        "launches": [_launch_record(launch) for launch in template.launches],
        "patches": [dataclasses.asdict(patch) for patch in template.patches],
        "values": template.values,
        "constants": list(constants.items()),
        "slots": made.slots,
        "sizes": list(made.apart.sizes.items()),
        "written": made.apart.written,
        "operands": {name: described(x) for name, x in made.operands.items()},
        "global_scale": _kept_scale(options),
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("plan.json", json.dumps(plan, indent=1))
        archive.writestr("kernel.cubin", kernel.cubin)
        archive.writestr("kernel.ptx", kernel.ptx)


def _kept_scale(options: Mapping[str, Any]) -> float | None:
    """The number that the caller gave as the global scale of a new quantized result; 0 if the launch computes it."""
    if options.get("out") is not None:
        return None
    given = [options.get(name) for name in ("global_scale", "out_global_scale")]
    return 0.0 if "auto" in given else next((float(x) for x in given if isinstance(x, (int, float))), None)


def _launch_record(launch: Any) -> dict[str, Any]:
    record = {name: getattr(launch, name) for name in ("kernel", "grid", "block", "cluster", "dynamic_smem")}
    record |= {"cooperative": launch.cooperative, "programmatic": launch.programmatic}
    record["params"] = [param.hex() for param in launch.params]
    record["attributes"] = [(number, value.hex()) for number, value in launch.attributes]
    return record
