"""Summaries of the reference that the repository stores, for readers on GitHub: names, commands, gates."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import cute_nvfp4

SECTIONS = {
    "cute_nvfp4": "`from cute_nvfp4 import …`",
    "cute_nvfp4.nn": "`from cute_nvfp4.nn import …`",
    "cute_nvfp4.display": "`from cute_nvfp4.display import …`",
}
"""The modules of docs/reference/api.md."""


def first_sentence(value: Any) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    sentence = text.split(". ")[0].rstrip(".:")
    sentence = re.sub(r":\w+:`([^`]*)`", r"`\1`", sentence)
    return sentence.replace("|", "\\|").replace("``", "`")


def call_of(name: str, value: Any) -> str:
    """The name with its parameters: positional ones by name, and "…" for keyword-only ones."""
    if not inspect.isfunction(value):
        return name
    parameters = inspect.signature(value).parameters.values()
    shown = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    shown += [f"*{p.name}" for p in parameters if p.kind is p.VAR_POSITIONAL]
    more = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    return f"{name}({', '.join([*shown, *['…'] * bool(more)])})"


def names(module: str) -> Iterator[tuple[str, Any]]:
    """Yields the public names of a module and their values; names of the package itself only for the package."""
    found = importlib.import_module(module)
    own = [n for n, v in vars(found).items() if not n.startswith("_") and getattr(v, "__module__", "") == module]
    for name in getattr(found, "__all__", own):
        if not (name.startswith("__") or inspect.ismodule(getattr(found, name))) and (
            module == "cute_nvfp4" or name not in cute_nvfp4.__all__
        ):
            yield name, getattr(found, name)


def summary(*modules: str) -> str:
    """A table of the names of modules: how each is called or what it is, and the first sentence of its docstring."""
    lines = []
    for module in modules:
        head = SECTIONS.get(module, f"`from {module} import …`")
        lines += [f"| {head} | what it is |", "|---|---|"]
        for name, value in names(module):
            constant = not (inspect.isfunction(value) or inspect.isclass(value))
            said = f"`{type(value).__name__}`" if constant else first_sentence(value)
            lines.append(f"| `{call_of(name, value)}` | {said} |")
        lines.append("")
    return "\n".join(lines)


def _default(value: Any) -> str:
    """A default as a reader writes it."""
    text = repr(value)
    name = next((n for n in cute_nvfp4.__all__ if n.isupper() and getattr(cute_nvfp4, n) is value), "")
    return name or (text if len(text) <= 40 and not text.startswith("<") else "…")


def _default_of(value: Any, parameter: inspect.Parameter) -> Any:
    """The default of a parameter. For a dataclass field with a factory, it is what the factory makes, if that never
    changes."""
    field = getattr(value, "__dataclass_fields__", {}).get(parameter.name)
    made = getattr(field, "default_factory", dataclasses.MISSING)
    if made is dataclasses.MISSING:
        return parameter.default
    # other callables, such as a counter's next, give a new value each time
    return made() if inspect.isclass(made) or inspect.isfunction(made) else _Text("…")


def signatures(*modules: str) -> str:
    """The signatures of all functions, and of all classes that users call, with all arguments and defaults."""
    lines = ["```text"]
    for module in modules:
        lines.append(f"# from {module} import …")
        for name, value in names(module):
            error = inspect.isclass(value) and issubclass(value, Exception)
            if error or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            parameters = inspect.signature(value).parameters.values()
            bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
            shown = [
                p if p.default is p.empty else p.replace(default=_Text(_default(_default_of(value, p)))) for p in bare
            ]
            lines.append(f"{name}{inspect.Signature(shown)}")
    return "\n".join([*lines, "```"]) + "\n"


class _Text(str):
    """A text that a signature shows without quotes."""

    __repr__ = str.__str__


def commands() -> str:
    """The help of every command: its usage, its purpose, and a table of its arguments and options."""
    import typer

    from cute_nvfp4.cli.main import app

    lines = []
    for name, found in typer.main.get_command(app).commands.items():
        context = found.make_context(name, [], resilient_parsing=True, parent=None)
        usage = " ".join(found.collect_usage_pieces(context))
        lines += [f"## {name}", "", "```text", f"cute-nvfp4 {name} {usage}", "```", ""]
        lines += [inspect.cleandoc(found.help or ""), "", "| option | default | what it does |", "|---|---|---|"]
        lines += [*(_option(parameter, context) for parameter in found.params), ""]
    return "\n".join(lines)


def _option(parameter: Any, context: Any) -> str:
    """A row of the table of a command's options."""
    argument = parameter.param_type_name == "argument"
    shown = [parameter.name.upper()] if argument else [*parameter.opts, *parameter.secondary_opts]
    default = parameter.get_default(context, call=False)
    value = "" if default in (None, False, (), "") or callable(default) else f"`{default}`"
    said = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|").replace("<", "&lt;")
    return f"| {', '.join(f'`{one}`' for one in shown)} | {value} | {said} |"


def gates() -> str:
    """The names that ``gate=`` takes, with the first sentence of each."""
    from cute_nvfp4.kernels.gemm.gates import GATES

    lines = ["| `gate=` | what it computes |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {first_sentence(gate)} |" for name, gate in GATES.items())]) + "\n"


def api() -> str:
    """The public names of docs/reference/api.md."""
    return summary("cute_nvfp4", "cute_nvfp4.nn", "cute_nvfp4.display")


SIM_ROOMS = ("cute_nvfp4.sim.session", "cute_nvfp4.sim.equivalence", "cute_nvfp4.sim.observe.inspect_memory",
             "cute_nvfp4.sim.observe.barriers", "cute_nvfp4.sim.machine.events")  # fmt: skip


def all_arguments() -> str:
    """All arguments of the package's functions and classes."""
    return signatures("cute_nvfp4", "cute_nvfp4.nn", "cute_nvfp4.weight_shards")


def sim_api() -> str:
    """The public names of the simulator."""
    return summary("cute_nvfp4.sim", *SIM_ROOMS)


def sim_arguments() -> str:
    """All arguments of the simulator's functions and classes."""
    return signatures("cute_nvfp4.sim", *SIM_ROOMS)


def harness_api() -> str:
    """The public names of the harness."""
    rooms = ("problem", "schema", "evaluation", "results", "errors")
    return summary(*(f"cute_nvfp4.harness.{room}" for room in rooms))
