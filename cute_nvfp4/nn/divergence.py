"""Measures how far a quantized model's predictions are from the original's: the divergence of distributions by row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn.moments import call


class Divergence(NamedTuple):
    """How far two models' predictions are apart.

    mean: KL(before ‖ after) of the distributions given by the logits, in nats a row. error: its standard error over
    batches; 0 for one batch. agreement: the share of rows with the same most likely entry. rows: their number.
    """

    mean: float
    error: float
    agreement: float
    rows: int


def log_probabilities(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The logarithms (rows, entries), in float32, of the probabilities that a model gives for a batch.

    Raises:
        OperandError: the model returns no tensor, no ``logits`` and no tuple that begins with a tensor.
    """
    found = call(model, batch)
    found = getattr(found, "logits", found)
    found = found[0] if isinstance(found, tuple) else found
    if not torch.is_tensor(found):
        expected = "a tensor of logits, an object that has them, or a tuple that begins with them"
        raise OperandError.of("result of the model", got=type(found).__name__, expected=expected)
    return found.detach().reshape(-1, found.shape[-1]).float().log_softmax(-1)


def divergence(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float]:
    """The mean of KL(before ‖ after), and the share of rows with the same most likely entry.

    before, after: logarithms of probabilities (rows, entries).
    """
    before, after = before.float(), after.float()
    # an entry of probability zero adds nothing, whatever its other probability is
    terms = torch.where(before > -torch.inf, before.exp() * (before - after), 0.0)
    return float(terms.sum(-1).mean()), float((before.argmax(-1) == after.argmax(-1)).float().mean())


class Judged:
    """Batches, with the logarithms of probabilities (float32) that a model gives for them when this is made."""

    def __init__(self, model: torch.nn.Module, batches: Iterable[Any]) -> None:
        self.batches = list(batches)
        if not self.batches:
            raise OperandError.of("judge", got="no batch", expected="at least one")
        self.before = [log_probabilities(model, batch) for batch in self.batches]

    def divergence(self, model: torch.nn.Module) -> Divergence:
        """How far the model's predictions are now from those kept here."""
        found = []
        for batch, before in zip(self.batches, self.before):
            after = log_probabilities(model, batch)
            found.append((len(after), *divergence(before, after)))
        rows = sum(count for count, _, _ in found)
        mean, agreement = (sum(x[0] * x[i] for x in found) / rows for i in (1, 2))
        each = [x[1] for x in found]
        error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0
        return Divergence(mean, error, agreement, rows)
