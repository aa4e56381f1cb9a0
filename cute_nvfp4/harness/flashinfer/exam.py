"""The ``reference.py`` of a definition, in the folder's process: it draws inputs, and compares outputs with ``run``.

The current folder has ``definition.json`` and ``workloads.json``. ``data`` is (inputs, outputs), two lists in the
definition's order. Outputs are full of NaN (85 in integers), for a solution that fills them.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .records import Definition, TensorOf, Workload
from .sizes import DTYPES, shape_of, sizes

RTOL = ATOL = 1e-2
"""FlashInfer-Bench's default tolerances."""
_INTEGERS = 128


@cache
def _definition() -> Definition:
    return Definition.model_validate_json(Path("definition.json").read_text())


@cache
def _run() -> Any:
    """The definition's ``run``."""
    specification = importlib.util.spec_from_file_location("definition_reference", "definition_reference.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.run


def generate_input(workload: str, seed: int, **axes: int) -> tuple[list, list]:
    """The inputs that a workload describes (random, a scalar, or a tensor of a file), and outputs to fill."""
    definition = _definition()
    found = {w["uuid"]: w for w in json.loads(Path("workloads.json").read_text())}
    said = Workload.model_validate(found[workload])
    known, generator = sizes(definition, axes), torch.Generator(device="cuda").manual_seed(seed)
    inputs = []
    for name, tensor in definition.inputs.items():
        source = said.inputs[name]
        if source.type == "scalar":
            inputs.append(source.value)
        elif source.type == "safetensors":
            from safetensors.torch import load_file

            inputs.append(load_file(source.path)[source.tensor_key].to("cuda"))
        else:
            inputs.append(_random(tensor, shape_of(tensor, known), generator))
    outputs = [_unwritten(shape_of(tensor, known), DTYPES[tensor.dtype]) for tensor in definition.outputs.values()]
    return inputs, outputs


def _random(tensor: TensorOf, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    kind = DTYPES[tensor.dtype]
    if kind == torch.bool:
        return torch.randint(0, 2, shape, device="cuda", generator=generator).bool()
    if kind == torch.float4_e2m1fn_x2:
        codes = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8, generator=generator)
        return codes.view(torch.float4_e2m1fn_x2)
    if not kind.is_floating_point:
        return torch.randint(0, _INTEGERS, shape, device="cuda", generator=generator).to(kind)
    return torch.randn(shape, device="cuda", generator=generator).to(kind)


def _unwritten(shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    if kind == torch.float4_e2m1fn_x2:
        return torch.full(shape, 0x55, device="cuda", dtype=torch.uint8).view(kind)
    return torch.full(shape, float("nan") if kind.is_floating_point else 85, device="cuda").to(kind)


def check_implementation(data: tuple[list, list], output: Any) -> tuple[bool, str, dict[str, float]]:
    """Compares outputs with those of ``run``: shapes, dtypes, and values within ``ATOL`` and ``RTOL``. Returns whether
    they match, a message that begins with the status, and the largest errors."""
    names = list(_definition().outputs)
    wanted = _listed(_run()(*data[0]), names)
    errors = {"max_abs": 0.0, "max_rel": 0.0}  # NaN if one of them is not finite
    if not isinstance(output, list) or len(output) != len(names):
        return False, f"INCORRECT_SHAPE: expected {len(names)} outputs: {', '.join(names)}", errors
    for name, got, right in zip(names, output, wanted):
        if got.shape != right.shape:
            return False, f"INCORRECT_SHAPE: {name} is {list(got.shape)}, expected {list(right.shape)}", errors
        if got.dtype != right.dtype:
            return False, f"INCORRECT_DTYPE: {name} is {got.dtype}, expected {right.dtype}", errors
    lines = []
    for name, got, right in zip(names, output, wanted):
        a, b = _values(got), _values(right)
        error = (a - b).abs()
        same = (a == b) | (a.isnan() & b.isnan())
        bad = ~same & ~(error <= ATOL + RTOL * b.abs())
        finite = error[~same & error.isfinite()]
        relative = (error / b.abs().clamp_min(1e-8))[~same & error.isfinite()]
        for key, values in (("max_abs", finite), ("max_rel", relative)):
            errors[key] = max(errors[key], values.max().item() if values.numel() else 0.0)
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            if not error[bad].isfinite().all():
                errors = dict.fromkeys(errors, float("nan"))
            what = f"{int(bad.sum())} of {bad.numel()} elements of {name} are wrong"
            lines.append(f"{what}, at {at}: got {a[at].item():g}, expected {b[at].item():g}")
    return not lines, "INCORRECT_NUMERICAL: " + "; ".join(lines) if lines else "", errors


def _listed(result: Any, names: list[str]) -> list[torch.Tensor]:
    """The result of ``run`` in the order of the outputs."""
    if isinstance(result, dict):
        return [result[name] for name in names]
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in float64; for packed E2M1 the values of its bytes."""
    return (tensor.view(torch.uint8) if tensor.dtype == torch.float4_e2m1fn_x2 else tensor).double()
