"""interleave: two weights of a gated GEMM in one operand; and what such weights must be."""

from __future__ import annotations

import torch

from ..errors import OperandError
from ..formats import as_bytes
from ..kernels.gemm.config import INTERLEAVED_ROWS
from ..operand import BlockScaledTensor
from ..scale_layout import blocked_flat, blocked_view
from .checks import check_formats, check_product


def interleave(b1: BlockScaledTensor, b2: BlockScaledTensor) -> BlockScaledTensor:
    """Makes one weight of 2N rows from two of N: blocks of 128 rows of b1 and b2 in turn. A copy; for loading a model.

    Both have N rows, a multiple of 128, blocked scales, and equal global scales or none. On a GPU nothing waits for the
    device: global scales that differ make the result's global scale, and so every value, NaN.

    Raises:
        OperandError: operands that do not fit together; on the CPU also global scales that differ.
    """
    check_weights(b1, {"b1": b1, "b2": b2})
    for name, b in (("b1", b1), ("b2", b2)):
        check_halves(f"rows of {name}", b.rows, INTERLEAVED_ROWS)
    global_scale = _common_global_scale(b1.global_scale, b2.global_scale)
    block = (-1, INTERLEAVED_ROWS)
    data = torch.stack([as_bytes(b.data).unflatten(-2, block) for b in (b1, b2)], -3).flatten(-4, -2)
    # (32, 4, rest_m, 4, rest_k, L): whole atoms along the rows, which are the slowest but the batch
    scale = torch.stack([as_bytes(b.blocked_scale()) for b in (b1, b2)], 3).flatten(2, 3)
    flat = blocked_flat(scale)
    columns = b1.format.scale_columns(b1.k)
    return BlockScaledTensor(data, blocked_view(flat, 2 * b1.rows, columns, b1.batch), global_scale, b1.format)


def _common_global_scale(one: torch.Tensor | None, two: torch.Tensor | None) -> torch.Tensor | None:
    """The global scale of two weights that become one, both of which have one or neither."""
    if one is None or one.data_ptr() == two.data_ptr():
        return one
    if one.device.type != "cpu":
        return torch.where(one.reshape(()) == two.reshape(()), one.reshape(()), torch.nan)
    if float(one) != float(two):
        raise OperandError.of(
            "global scales of b1 and b2",
            got=f"{float(one)} and {float(two)}",
            expected="equal ones",
            hint="Quantize both with the larger amax's: quantize(…, global_scale=…).",
        )
    return one


def check_halves(what: str, rows: int, multiple: int) -> None:
    """Raises unless ``rows`` are whole blocks of the weights that they are made of."""
    if rows % multiple:
        expected = f"a multiple of {multiple}: scales come in atoms of {INTERLEAVED_ROWS} rows"
        raise OperandError.of(what, got=rows, expected=expected, hint="Give b1 and b2 as two tensors.")


def check_weights(a: BlockScaledTensor, weights: dict[str, BlockScaledTensor]) -> None:
    """Raises unless the one or two weights can be multiplied with ``a``, and are alike."""
    check_product(a, weights)
    first, last = weights.values() if len(weights) == 2 else [*weights.values()] * 2
    both = {
        "rows": [b.rows for b in (first, last)],
        "formats": [b.format.name for b in (first, last)],
        "global scales": ["none" if b.global_scale is None else "one" for b in (first, last)],
    }
    for what, (one, two) in both.items():
        if one != two:
            raise OperandError.of(f"{what} of b1 and b2", got=f"{one} and {two}", expected="the same")
    check_formats("a", a, "b1" if len(weights) == 2 else "b", first)
