"""The report of quantizing a model, layer by layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from cute_nvfp4.nn.divergence import Divergence


@dataclass(frozen=True)
class LayerReport:
    """The report of one layer.

    error: |W − W'| / |W|. output_error: the same for its products with the calibration's activations, or None. bytes,
    bytes_before: those of its weight. backend, kernel, reason: what one row of x runs, and why
    (``NVFP4Linear.explain_backend``). method: "nearest" or "gptq", after "awq, " if columns were scaled.
    """

    name: str
    rows: int
    k: int
    method: str
    error: float
    output_error: float | None
    bytes: int
    bytes_before: int
    backend: str
    kernel: str
    reason: str


@dataclass
class ModelReport:
    """The reports of all layers, and the reasons why others stayed as they were.

    divergence: that of the model's predictions from those before, if ``quantize_model`` got batches to judge by.
    """

    layers: list[LayerReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    divergence: Divergence | None = None

    @property
    def bytes(self) -> int:
        """The bytes of the quantized weights."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def bytes_before(self) -> int:
        """The bytes of the same weights before."""
        return sum(layer.bytes_before for layer in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """The report, ready for JSON."""
        layers = [asdict(layer) for layer in self.layers]
        found = {"bytes": self.bytes, "bytes_before": self.bytes_before, "layers": layers, "skipped": self.skipped}
        return found | {"divergence": None if self.divergence is None else self.divergence._asdict()}

    def __str__(self) -> str:
        """One line for each layer, and the sums."""
        width = max((len(layer.name) for layer in self.layers), default=0)
        wide = max((len(layer.method) for layer in self.layers), default=0)
        lines = []
        for x in self.layers:
            products = "" if x.output_error is None else format(x.output_error, ".4f")
            sizes = f"{x.rows:>7} x {x.k:<6} {x.method:{wide}} {x.error:8.4f} {products:>8} {x.bytes:>12}"
            lines.append(f"{x.name:{width}} {sizes}  {x.backend}, {x.kernel}")
        lines += [f"{name:{width}} as it was: {reason}" for name, reason in self.skipped.items()]
        lines.append(f"{self.bytes_before} bytes became {self.bytes}")
        if self.divergence is not None:
            x = self.divergence
            lines.append(f"KL {x.mean:.4f} ± {x.error:.4f} nats a row, {x.agreement:.1%} the same first, {x.rows} rows")
        return "\n".join(lines)
