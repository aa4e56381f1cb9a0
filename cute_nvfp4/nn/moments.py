"""Calibration data: magnitudes and second moments of the inputs of linear layers, for one block of a model at a time.

The blocks of a transformer run one after the other on all batches, on the outputs of the earlier blocks, which are
quantized by then. So each layer is fitted to the activations that it will see. Only the hidden state of each batch and
the moments of one block are in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn.calibration import AmaxObserver
from cute_nvfp4.nn.input_rules import FP8_RULES
from cute_nvfp4.nn.training import fake_quantize
from cute_nvfp4.row_scaled import by_rows

_CACHES = ("past_key_values", "cache")
"""The arguments of transformers' blocks that hold keys and values of earlier tokens."""


SAMPLED = 512
"""The number of rows of x that are kept for choosing column factors."""


class Moments:
    """The largest magnitude of the inputs x (…, K) of a layer, and xᵀx in float32.

    input_rule: quantizes x first, unless it is None. columns: the largest magnitude of each column, (K,). sample: some
    rows of each batch, at most ``SAMPLED``. factors: None, or (K,): multiply the columns of the weights of all layers
    with this input (``nn.awq``).
    """

    def __init__(self, input_rule: str | None) -> None:
        self.input_rule = input_rule
        self.amax = AmaxObserver()
        self.rows = 0
        self.hessian: torch.Tensor | None = None
        self.columns: torch.Tensor | None = None
        self.sample: torch.Tensor | None = None
        self.factors: torch.Tensor | None = None

    def add(self, x: torch.Tensor) -> None:
        """Adds a batch."""
        x = x.detach().reshape(-1, x.shape[-1])
        self.rows += x.shape[0]
        largest = x.abs().amax(0).float()
        self.columns = largest if self.columns is None else self.columns.maximum(largest)
        some = x[:: max(1, x.shape[0] // 64)][:64].float()
        self.sample = some if self.sample is None else torch.cat((self.sample, some))[:SAMPLED]
        if self.input_rule is None:
            x = x.float()
        elif self.input_rule in FP8_RULES:
            x = by_rows(x).dequantize()
        else:
            x = fake_quantize(self.amax.observe(x).float(), rule=self.input_rule)
        square = x.T @ x
        self.hessian = square if self.hessian is None else self.hessian.add_(square)


@contextlib.contextmanager
def inputs_of(layers: Mapping[str, torch.nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """A context that collects the last input of each layer that is called in it, by name."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable:
        return lambda module, arguments: found.__setitem__(name, arguments[0])

    handles = [layer.register_forward_pre_hook(keep(name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def call(model: torch.nn.Module, batch: Any) -> Any:
    """The model's result for a batch, which is a tensor, a tuple of arguments, or a dict of named arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def main_blocks(model: torch.nn.Module, names: Iterable[str]) -> tuple[str, list[torch.nn.Module]]:
    """The name and the modules of the block list with most of the layers ``names``; ("", []) without such a list."""
    names, best, found = list(names), 0, ("", [])
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList):
            inside = sum(x.startswith(f"{name}.") for x in names)
            # of equals take the outermost: experts are a list within a block
            if inside > best:
                best, found = inside, (name, list(module))
    return found


class Run:
    """The arguments of the blocks for each batch, and the hidden states that the next block gets."""

    def __init__(self, model: torch.nn.Module, blocks: list[torch.nn.Module], batches: Iterable[Any]) -> None:
        self.hidden: list[torch.Tensor] = []
        self._arguments: list[list[tuple[tuple, dict[str, Any]]]] = []
        index_of = {id(block): i for i, block in enumerate(blocks)}

        def keep(block: torch.nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
            if not arguments:
                raise OperandError.of("block", got="hidden states by name", expected="the first positional argument")
            if index_of[id(block)] == 0:
                self.hidden.append(arguments[0].detach())
                self._arguments.append([])
            # a block that runs again would find its own keys there
            named = {name: None if name in _CACHES else value for name, value in named.items()}
            self._arguments[-1].append((arguments[1:], named))

        handles = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks]
        try:
            for batch in batches:
                call(model, batch)
        finally:
            for handle in handles:
                handle.remove()
        if any(len(kept) != len(blocks) for kept in self._arguments):
            raise OperandError.of("blocks of the model", got="some that are not called once", expected="one call each")

    def collect(
        self, index: int, block: torch.nn.Module, layers: Mapping[str, torch.nn.Module], make: Callable[[], Moments]
    ) -> dict[str, Moments]:
        """The moments of the inputs of ``layers`` when block ``index`` runs; layers with one input share theirs."""
        moments: dict[str, Moments] = {}
        for batch, hidden in enumerate(self.hidden):
            with inputs_of(layers) as found:
                self._call(index, block, batch, hidden)
            shared: dict[int, Moments] = {}
            for name, x in found.items():
                if id(x) not in shared:
                    shared[id(x)] = moments.get(name) or make()
                    shared[id(x)].add(x)
                moments[name] = shared[id(x)]
        return moments

    def advance(self, index: int, block: torch.nn.Module) -> None:
        """Runs block ``index`` as it is now, for the hidden states of the next one."""
        self.hidden = [self._call(index, block, batch, x) for batch, x in enumerate(self.hidden)]

    def _call(self, index: int, block: torch.nn.Module, batch: int, hidden: torch.Tensor) -> torch.Tensor:
        arguments, named = self._arguments[batch][index]
        result = block(hidden, *arguments, **named)
        return (result[0] if isinstance(result, tuple) else result).detach()
