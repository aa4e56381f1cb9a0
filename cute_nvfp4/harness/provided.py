"""The modules ``task`` and ``utils`` that the public evaluator gives to a submission, written from their
description."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def install(folder: Path, aliases: bool, simulate: bool) -> None:
    """Makes both modules importable, except those that the submission's ``folder`` has.

    aliases: whether to add names that the DSL has dropped since 4.2 (``dsl_compat``). simulate: whether this is the
    simulated GPU, where a stand-in replaces Triton if it is not installed (``triton_stand_in``).
    """
    for module in (_task(), _utils()):
        if not (folder / f"{module.__name__}.py").exists():
            sys.modules[module.__name__] = module
    if aliases:
        from . import dsl_compat

        dsl_compat.install()
    if simulate and importlib.util.find_spec("triton") is None:
        from . import triton_stand_in

        triton_stand_in.install()


def _task() -> types.ModuleType:
    module = types.ModuleType("task", "Type names of the problem, provided by the harness.")
    module.input_t, module.output_t, module.TestSpec = tuple, torch.Tensor | list, dict
    return module


def _utils() -> types.ModuleType:
    module = types.ModuleType("utils", "Helpers of the public evaluator, provided by the harness.")
    own = (set_seed, get_device, clear_l2_cache, verbose_allclose, verbose_allequal, match_reference)
    for item in (*own, make_match_reference, DeterministicContext):
        setattr(module, item.__name__, item)
    return module


def set_seed(seed: int = 42) -> None:
    """Seeds Python's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)


def get_device(use_cuda: bool = True) -> torch.device:
    """The CUDA device, or the CPU if there is none or ``use_cuda`` is False."""
    return torch.device("cuda" if use_cuda and torch.cuda.is_available() else "cpu")


def clear_l2_cache() -> None:
    """Writes more bytes than a GPU's L2 cache holds."""
    torch.empty(64 << 20, dtype=torch.int64, device="cuda").fill_(42)


def verbose_allclose(
    received: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-05, atol: float = 1e-08, max_print: int = 5
) -> tuple[bool, list[str]]:
    """Whether the tensors are close, NaN and infinities in place, and lines that say where they differ."""
    if received.shape != expected.shape:
        return False, [f"SIZE MISMATCH: got {tuple(received.shape)}, expected {tuple(expected.shape)}"]
    got, wanted = received.double(), expected.double()
    return _verdict(~torch.isclose(got, wanted, rtol=rtol, atol=atol, equal_nan=True), got, wanted, max_print)


def verbose_allequal(received: torch.Tensor, expected: torch.Tensor, max_print: int = 5) -> tuple[bool, list[str]]:
    """Whether the tensors are equal, and lines that say where they differ."""
    if received.shape != expected.shape:
        return False, [f"SIZE MISMATCH: got {tuple(received.shape)}, expected {tuple(expected.shape)}"]
    return _verdict(received != expected, received, expected, max_print)


def _verdict(bad: torch.Tensor, got: torch.Tensor, wanted: torch.Tensor, most: int) -> tuple[bool, list[str]]:
    places = bad.nonzero().tolist()
    if not places:
        return True, []
    shown = [f"ERROR AT {tuple(at)}: {got[tuple(at)].item()} {wanted[tuple(at)].item()}" for at in places[:most]]
    return False, [f"Number of mismatched elements: {len(places)}", *shown]


def match_reference(
    data: Any, output: Any, reference: Callable[[Any], Any], rtol: float = 1e-05, atol: float = 1e-08
) -> tuple[bool, str]:
    """Whether ``output`` is close to ``reference(data)``, and a message that says where it is not."""
    expected = reference(data)
    outputs, wanted_outputs = ([*x] if isinstance(x, (list, tuple)) else [x] for x in (output, expected))
    if len(outputs) != len(wanted_outputs):
        return False, f"got {len(outputs)} outputs, expected {len(wanted_outputs)}"
    pairs = zip(outputs, wanted_outputs)
    lines = [line for got, wanted in pairs for line in verbose_allclose(got, wanted, rtol, atol)[1]]
    return not lines, "\n".join(lines)


def make_match_reference(reference: Callable[[Any], Any], **tolerances: float) -> Callable[[Any, Any], Any]:
    """``match_reference`` with a given reference and given tolerances."""

    def check_implementation(data: Any, output: Any) -> tuple[bool, str]:
        return match_reference(data, output, reference, **tolerances)

    return check_implementation


class DeterministicContext(contextlib.ContextDecorator):
    """A context in which torch uses deterministic algorithms only."""

    def __enter__(self) -> DeterministicContext:
        self._before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        return self

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self._before[0])
        torch.backends.cudnn.deterministic = self._before[1]
