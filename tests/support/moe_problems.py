"""Random mixtures of experts, and the layer in float64 by its definition: slot for slot, without maps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_nvfp4 import BlockScaledTensor, moe, prepare_experts, quantize
from cute_nvfp4.formats import FORMATS
from cute_nvfp4.ops.moe.experts import Experts
from cute_nvfp4.ops.moe.product import in_16_bits
from cute_nvfp4.row_scaled import by_rows
from cute_nvfp4.runtime.session import simulated_gpu
from support import backends

GUARD = 64
"""Elements around an output that nobody may write."""


@dataclass(frozen=True)
class Layer:
    """A mixture of ``experts`` experts of (hidden, inner), and ``tokens`` tokens that choose ``top`` of them.

    routing: "random"; "crowded": all tokens choose among one or two experts; "same": a token chooses one expert several
        times.
    elsewhere: ids also name this many experts before and after the ones here.
    quantized: whether each call quantizes x. fp8: whether weights are prepared for FP8, and rows quantized unless few.
    """

    tokens: int
    top: int
    experts: int
    hidden: int
    inner: int
    format: str = "nvfp4"
    activation: str = "silu"
    biases: bool = False
    interleaved: bool = False
    routing: str = "random"
    elsewhere: int = 0
    ids: torch.dtype = torch.int64
    weights: torch.dtype = torch.float32
    dtype: torch.dtype = torch.bfloat16
    quantized: bool = False
    fp8: bool = False
    listed: bool = False
    seed: int = 0

    def __str__(self) -> str:
        words = [f"{self.tokens}x{self.top} of {self.experts}", f"{self.hidden}x{self.inner}", self.format]
        words += [self.activation, self.routing, f"elsewhere{self.elsewhere}"]
        words += [name for name in ("biases", "interleaved", "quantized", "fp8", "listed") if getattr(self, name)]
        return "-".join(words)


class Problem:
    """The tensors of a layer, its experts, and its result by the definition."""

    def __init__(self, layer: Layer) -> None:
        self.layer, generator = layer, torch.Generator().manual_seed(layer.seed)
        self._device = backends.device()

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self._device)

        e, h, i = layer.experts, layer.hidden, layer.inner
        self.halves = 1 if layer.activation == "relu2" else 2
        self.gate_up = self._weight(normal(e, self.halves * i, h) / h**0.5)
        self.down = self._weight(normal(e, h, i) / i**0.5)
        self.biases = (normal(e, self.halves * i), normal(e, h)) if layer.biases else (None, None)
        self.x = (normal(layer.tokens, h) * 2).to(layer.dtype)
        self.topk_weights = torch.rand(layer.tokens, layer.top, generator=generator).to(layer.weights)
        self.topk_weights = self.topk_weights.to(self._device)
        self.offset = layer.elsewhere
        self.ids = self._ids(generator).to(layer.ids).to(self._device)
        self.experts = self._experts()
        slots = layer.tokens * layer.top
        stays = layer.fp8 and all(in_16_bits(x, slots) for x in (self.experts.gate_up, self.experts.down))
        self.rounds_rows = layer.quantized or (layer.fp8 and not stays)

    def _weight(self, values: torch.Tensor) -> Any:
        """A stack of weights, or with ``listed`` a matrix for each expert with its own global scale."""
        if not self.layer.listed:
            return quantize(values, self.layer.format, backend="reference")
        return [
            quantize(x * (n + 1) / len(values), self.layer.format, backend="reference") for n, x in enumerate(values)
        ]

    def _ids(self, generator: torch.Generator) -> torch.Tensor:
        layer = self.layer
        shape, every = (layer.tokens, layer.top), layer.experts + 2 * layer.elsewhere
        if layer.routing == "crowded":
            return torch.randint(0, min(2, layer.experts), shape, generator=generator) + layer.elsewhere
        ids = torch.randint(0, every, shape, generator=generator)
        if layer.elsewhere:
            # the id that vLLM and transformers write for a missing expert
            ids[torch.rand(shape, generator=generator) < 0.1] = -1
            ids[torch.rand(shape, generator=generator) < 0.1] = 2**31 - 1
        return ids[:, :1].expand(shape).contiguous() if layer.routing == "same" else ids

    def _experts(self) -> Experts:
        layer = self.layer
        return prepare_experts(
            self.gate_up,
            self.down,
            activation=layer.activation,
            gate_up_bias=self.biases[0],
            down_bias=self.biases[1],
            interleaved=layer.interleaved,
            dtype=None if layer.quantized else torch.float8_e4m3fn if layer.fp8 else layer.dtype,
        )

    def run(self, **options: Any) -> torch.Tensor:
        """The operation's result, in memory that is poisoned and guarded."""
        tokens, hidden = self.x.shape
        room = torch.full((tokens * hidden + 2 * GUARD,), float("nan"), dtype=self.x.dtype, device=self._device)
        out = room[GUARD:-GUARD].view(tokens, hidden)
        found = moe(self.x, self.ids, self.topk_weights, self.experts, offset=self.offset, out=out, **options)
        assert found is out and room[:GUARD].isnan().all() and room[-GUARD:].isnan().all()
        return out

    def run_in_stream_order(self) -> torch.Tensor:
        """The result on a simulated sm_90a whose checks know the launches of a stream, including those that start
        before others have ended. Weights are not listed."""

        def there(x: Any) -> Any:
            if isinstance(x, BlockScaledTensor):
                return replace(x, **{name: there(getattr(x, name)) for name in ("data", "scale", "global_scale")})
            return None if x is None else x.cuda()

        kept = self.gate_up, self.down, self.biases
        with simulated_gpu("sm_90a", checks=True):
            self.gate_up, self.down, self.biases = there(kept[0]), there(kept[1]), tuple(map(there, kept[2]))
            try:
                experts = self._experts()
            finally:
                self.gate_up, self.down, self.biases = kept
            given = there(self.x), there(self.ids), there(self.topk_weights)
            return moe(*given, experts, offset=self.offset).cpu()

    def _values(self, weight: Any) -> torch.Tensor:
        if isinstance(weight, BlockScaledTensor):
            return weight.dequantize(torch.float64)
        return torch.stack([x.dequantize(torch.float64) for x in weight])

    def _rounded_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The values that weights prepared for FP8 have: gate, up, and then down."""
        e = self.experts
        found = [w.dequantize(torch.float64) if self.rounds_rows else w.unrounded() for w in (e.gate_up, e.down)]
        found = [
            w * (1.0 if f is None else f.double().view(-1, *[1] * (w.ndim - 1)))
            for w, f in zip(found, (e.gate_up_factor, e.down_factor))
        ]
        first = found[0].flatten(1, 2) if e.gated else found[0]
        if self.layer.interleaved:
            first = torch.stack(first.chunk(2, dim=1), dim=2).flatten(1, 2)
        return first, found[1]

    def _rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """The values that the products read, of rows in float64."""
        rows = rows.to(self.layer.dtype)
        if self.layer.quantized:
            return quantize(rows, self.layer.format, backend="reference").dequantize(torch.float64)
        if self.layer.fp8 and self.rounds_rows:
            return by_rows(rows).dequantize(torch.float64)
        return rows.double()

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result (T, H) in float64, and for each element the sum of the magnitudes of all terms.

        Rows are rounded where the operation rounds them, and nowhere else.
        """
        gate_up, down = self._values(self.gate_up), self._values(self.down)
        if self.layer.fp8:
            gate_up, down = self._rounded_weights()
        chosen = self.ids.long() - self.offset
        tokens, places = torch.where((chosen >= 0) & (chosen < self.layer.experts))
        out = torch.zeros(self.x.shape, dtype=torch.float64, device=self._device)
        magnitudes = out.clone()
        if not len(tokens):
            return out, magnitudes
        expert = chosen[tokens, places]
        rows = self._rounded(self.x[tokens].double())
        product = _products(rows, gate_up, expert)
        if self.layer.quantized:
            product = product.to(self.layer.dtype).double()
        if self.biases[0] is not None:
            product = product + self.biases[0][expert].double()
        inner = self._rounded(self._activation(product))
        y, size = _products(inner, down, expert), _products(inner.abs(), down.abs(), expert)
        if self.biases[1] is not None:
            bias = self.biases[1][expert].double()
            y, size = y + bias, size + bias.abs()
        weight = self.topk_weights[tokens, places].double()[:, None]
        return out.index_add(0, tokens, y * weight), magnitudes.index_add(0, tokens, size * weight.abs())

    def _activation(self, product: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        if layer.activation == "relu2":
            return product.clamp(min=0) ** 2
        gate, up = (product[:, 0::2], product[:, 1::2]) if layer.interleaved else product.chunk(2, dim=-1)
        if layer.activation == "silu":
            return gate * torch.sigmoid(gate) * up
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    def right(self, out: torch.Tensor, roundings: int = 0) -> bool:
        """Whether a result is near enough. Without quantized rows each element counts, by the sum of its terms'
        magnitudes. With them each row counts, by its norm: where a sum is a tie, a code may be another one, and that
        changes an element by up to an eighth of a term, however near to 0 the row is. roundings: further roundings of
        sums than in the deterministic way."""
        want, magnitudes = self.exact()
        error = (out.double() - want).abs()
        if self.rounds_rows:
            most = 0.03 * want.norm(dim=1) + magnitudes.norm(dim=1) / 64
            return bool((error.norm(dim=1) <= most + 1e-6).all())
        unit = 2.0 ** (-9 if self.layer.dtype is torch.bfloat16 else -11)
        return bool((error <= magnitudes * (4 + roundings) * unit + 1e-6).all())


def _products(rows: torch.Tensor, weights: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """The product of each row with the matrix of its expert."""
    out = rows.new_empty(len(rows), weights.shape[1])
    for e in expert.unique().tolist():
        out[expert == e] = rows[expert == e] @ weights[e].T
    return out


def random_layer(seed: int, arch: str) -> Layer:
    """A random layer: every remainder of H and I that the format has, empty and crowded experts. On sm_100a x is
    quantized to the weights' format, on sm_90a sometimes to FP8."""
    quantized = arch == "sm_100a"
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(0, len(choices), (1,), generator=generator))]

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    format = pick("nvfp4", "mxfp4")
    block = 32 if quantized else FORMATS[format].block
    experts = pick(1, number(2, 32), number(2, 32), number(33, 300))
    most = 224 if experts <= 32 else 96
    activation = pick("silu", "silu", "clamped_swiglu", "relu2")
    return Layer(
        tokens=pick(1, 2, number(3, 40)),
        top=pick(number(1, 6), number(1, 10)),
        experts=experts,
        hidden=block * number(2, most // block),
        inner=block * number(2, most // block),
        format=format,
        activation=activation,
        biases=activation == "clamped_swiglu" or pick(True, False, False),
        interleaved=activation != "relu2" and pick(True, False),
        routing=pick("random", "random", "crowded", "same"),
        elsewhere=pick(0, 3),
        ids=pick(torch.int32, torch.int64),
        weights=pick(torch.float32, torch.bfloat16),
        quantized=quantized,
        fp8=arch == "sm_90a" and pick(True, False, False),
        listed=pick(True, False),
        seed=seed,
    )
