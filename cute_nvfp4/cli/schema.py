"""``cute-nvfp4 schema``: the JSON Schema of what each ``--json`` writes."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import fail, stdout


def schema(
    output: Annotated[
        str, typer.Argument(help="Which output: eval, comparison, sim, doctor, …; none lists them.", show_default=False)
    ] = "",
) -> None:
    """Prints the JSON Schema of an output for programs, or says which outputs there are (docs/reference/json.md)."""
    import json

    from .json_schema import SCHEMAS, schema_of

    if not output:
        for name, (command, _) in SCHEMAS.items():
            stdout().print(f"{name:11} cute-nvfp4 {command}", markup=False, soft_wrap=True)
        return
    if output not in SCHEMAS:
        fail(f"unknown output {output!r}; expected one of {', '.join(SCHEMAS)}", 2)
    print(json.dumps(schema_of(output), indent=2))
