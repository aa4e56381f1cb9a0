"""``cute-nvfp4 quantize``: makes an NVFP4 checkpoint of a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import STDOUT, JsonOption, check_writable, shown_errors, stderr, stdout, write_json

if TYPE_CHECKING:
    from ..nn.report import LayerReport


def quantize(
    model: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to write, or to go on with.", show_default=False)],
    rule: Annotated[str, typer.Option(help="How scales are chosen: max, four_six_mse, optimal, …")] = "max",
    layout: Annotated[str, typer.Option(help="Layout of the checkpoint: modelopt or compressed-tensors.")] = "modelopt",
    ignore: Annotated[
        list[str] | None, typer.Option(help="Layers that stay: names, patterns as in a shell, re:…; may be repeated.")
    ] = None,
    only_ignore: Annotated[
        bool, typer.Option("--only-ignore", help="Ignore nothing but --ignore: no head, embedding or router by itself.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where it is computed: cpu, cuda.")] = "cpu",
    json: JsonOption = "",
) -> None:
    """Quantizes the weights of a model to nearest, a tensor at a time, without memory for the model or its code.

    A run that was stopped goes on where it was when it is started again. Layouts are those of NVIDIA's ModelOpt and of
    LLM Compressor (compressed-tensors); transformers runs both with this package (docs/how-to/models.md).
    """
    from rich.progress import Progress

    check_writable("--json", "" if json == STDOUT else json)
    with shown_errors():
        from ..nn.quantize_files import FileRecipe, default_ignore, quantize_files

        recipe = FileRecipe(rule, layout, default_ignore(ignore or [], only_ignore))
        with Progress(console=stderr()) as bar:
            task = bar.add_task("layers", total=None)

            def show(layer: LayerReport, done: int, of: int) -> None:
                bar.update(task, completed=done, total=of, description=layer.name)

            report = quantize_files(model, out, recipe, device=device, progress=show)
    if json:
        write_json(report.as_dict(), json)
    if json != STDOUT:
        stdout().print(str(report), markup=False)
