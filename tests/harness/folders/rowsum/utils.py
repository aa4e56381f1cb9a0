"""A check of the folder's own, with another name than that of the public evaluator."""

import torch


def near(got: torch.Tensor, wanted: torch.Tensor) -> tuple[bool, str]:
    error = (got.double() - wanted).abs().max().item()
    return error < 1e-3, f"an error of {error:.3g}"
