"""What the drivers of public libraries share: a program is a function, called by its command line.

``cute-nvfp4 sim quack_programs.py softmax m=17 n=512`` calls ``softmax(m=17, n=512)`` of that file, inside the
simulated session. A driver makes inputs, calls the library, and compares with a reference in torch; it returns nothing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable

import torch


def main(programs: dict[str, object], arguments: list[str] | None = None) -> None:
    """Calls the function of ``programs`` that the command line names; a word that is no Python literal is a string."""
    name, *given = sys.argv[1:] if arguments is None else arguments
    program = programs[name]
    if not isinstance(program, Callable):
        raise TypeError(f"{name} is not a program")
    torch.manual_seed(0)
    program(**dict(map(_argument, given)))
    print(f"PASS {name} {' '.join(given)}")


def _argument(word: str) -> tuple[str, object]:
    key, _, text = word.partition("=")
    try:
        return key, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return key, text


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-2, what: str = "result") -> None:
    """Every element within ``tolerance`` of the reference, relative to the largest one of it."""
    assert got.shape == want.shape, f"{what}: got shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    alike = torch.isfinite(want)
    assert torch.equal(got[~alike].nan_to_num(7.0), want[~alike].nan_to_num(7.0)), f"{what}: other infinities or nans"
    worst = (got - want)[alike].abs().max().item() if alike.any() else 0.0
    scale = max(want[alike].abs().max().item(), 1e-6) if alike.any() else 1.0
    assert worst <= tolerance * scale, f"{what}: off by {worst:.3g}, largest element {scale:.3g}"


def tensor(*shape: int, dtype: str = "float32", scale: float = 1.0, grad: bool = False) -> torch.Tensor:
    """Normal values on the device, drawn on the host."""
    return (torch.randn(shape) * scale).to(getattr(torch, dtype)).cuda().requires_grad_(grad)
