"""What a kernel is compiled from: its configuration, the DSL, and the source of its host function and of all imports of
that. A digest of these tells whether a stored kernel equals the one that would be compiled now."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from cute_nvfp4.lazy import ByGeneration, Lazily
from cute_nvfp4.runtime.kernel import Kernel

from . import import_graph
from .ptx_fingerprints import versions

DECIDES = ("kernels", "ptx", "scale_layout", "formats", "target")
"""Rooms whose modules decide what is traced. Outside them, only the compiler's invocation decides:"""
COMPILING = {"runtime.compile": ("build",), "runtime.kernel": ("Kernel",), "runtime.signature": ("*",)}

Symbol = tuple[str, str]
"""A module, and a name at its top level; an empty name stands for all statements that are neither a function nor a
class."""


@functools.cache
def text_of(module: str) -> str:
    return import_graph.package()[module].read_text(encoding="utf-8")


def digest(kernel: Kernel, config: Any, text_of: Callable[[str], str] = text_of) -> str:
    """A digest of all that ``kernel`` is compiled from, for configurations of ``config``'s type, without their
    values."""
    return _digest(host_of(kernel, config), kernel.arguments, type(config), text_of)


def host_of(kernel: Kernel, config: Any) -> Callable:
    """The host function of a configuration."""
    return kernel.host.of(config) if isinstance(kernel.host, ByGeneration) else kernel.host


_versions = functools.cache(versions)


@functools.cache
def _digest(host: Callable, arguments: type, config: type, text_of: Callable[[str], str]) -> str:
    texts = [repr(host) if isinstance(host, Lazily) else inspect.getsource(host), json.dumps(_versions())]
    for module, name in sorted(sources(host, arguments, config, text_of)):
        texts.append(f"{module}\0{name}\0{module_of(module, text_of).text(name)}")
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


@functools.cache
def sources(
    host: Callable, arguments: type, config: type, text_of: Callable[[str], str] = text_of
) -> frozenset[Symbol]:
    """The functions and classes, and the other statements of their modules, that decide what a host function traces."""
    found: set[Symbol] = set()
    left = [(x.__module__, x.__name__) for x in (arguments, config)] + [*_named_by(host)]
    left += [(f"{import_graph.NAME}.{x}", name) for x, names in COMPILING.items() for name in names]
    while left:
        module, name = symbol = left.pop()
        if symbol not in found and (module.split(".")[1] in DECIDES or module.split(".", 1)[1] in COMPILING):
            found.add(symbol)
            left += [(module, ""), *module_of(module, text_of).uses(name)]
    return frozenset(found)


def _named_by(host: Callable) -> set[Symbol]:
    """What a host function imports, and the globals that it names."""
    if isinstance(host, Lazily):
        return {(f"{import_graph.NAME}.{host.module}", host.name)}
    node, package = ast.parse(textwrap.dedent(inspect.getsource(host))), import_graph.package()
    named = {x.id: host.__globals__.get(x.id) for x in ast.walk(node) if isinstance(x, ast.Name)}
    found = {(getattr(x, "__module__", None), getattr(x, "__name__", name)) for name, x in named.items()}
    return {x for x in found if x[0] in package} | _imported(ast.walk(node), host.__module__, False).keys()


def _imported(nodes: Iterable[ast.AST], module: str, is_package: bool) -> dict[Symbol, str]:
    """What the imports among ``nodes`` bring, (module, name) or "*" for a whole module, and its name there."""
    package, found = import_graph.package(), {}
    for x in nodes:
        if isinstance(x, ast.ImportFrom):
            base = module.split(".")
            base = base[: len(base) - x.level + is_package] if x.level else []
            source = ".".join([*base, *([x.module] if x.module else [])])
            for alias in x.names:
                whole = f"{source}.{alias.name}"
                if whole in package or source in package:
                    found[(whole, "*") if whole in package else (source, alias.name)] = alias.asname or alias.name
    return found


class Module:
    """The top level of a module: its functions and classes, what each of them uses, and the rest."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._lines, self._used = name, text.splitlines(), dict[str, set[Symbol]]()
        tree = ast.parse(text)
        said = [x for x in ast.walk(tree) if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
        self._said = {line for x in said for line in range(x.lineno, x.end_lineno + 1)}
        nodes = [x for x in tree.body if x not in said]
        self._is_package = import_graph.package()[name].name == "__init__.py"
        self._defined = {x.name: x for x in nodes if isinstance(x, (ast.FunctionDef, ast.ClassDef))}
        imports = [x for x in nodes if isinstance(x, (ast.ImportFrom, ast.Import, ast.If)) and _only_imports(x)]
        self._rest = [x for x in nodes if x not in imports and x not in self._defined.values()]
        found = [_imported(ast.walk(x), name, self._is_package) for x in imports]
        self._names = {called: symbol for one in found for symbol, called in one.items()}

    def _nodes(self, name: str) -> list[ast.AST]:
        if name == "*":
            return [*self._defined.values()]
        return [self._defined[name]] if name in self._defined else [] if name else self._rest

    def text(self, name: str) -> str:
        """The source of a function or a class; for an empty name, of all other statements except imports. Comments and
        docstrings are left out."""
        numbers = [n for x in self._nodes(name) for n in range(_first_line(x), x.end_lineno + 1) if n not in self._said]
        lines = [self._lines[n - 1] for n in numbers]
        return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))

    def at(self, line: int) -> str:
        """The function or class that has this line, or an empty name."""
        found = (name for name, x in self._defined.items() if _first_line(x) <= line <= x.end_lineno)
        return next(found, "")

    def uses(self, name: str) -> set[Symbol]:
        """What ``name`` uses, of this module and of others. Imported names are resolved to where they are defined."""
        if name not in self._used:
            found = {self._names[name]} if name in self._names else set()
            for node in self._nodes(name):
                inside = list(ast.walk(node))
                names = {x.id for x in inside if isinstance(x, ast.Name)}
                # annotations of dataclasses, and names in strings
                names |= {x.value for x in inside if isinstance(x, ast.Constant) and isinstance(x.value, str)}
                found |= {(self._name, x) for x in names & self._defined.keys()}
                found |= {self._names[x] for x in names & self._names.keys()}
                found |= _imported(inside, self._name, self._is_package).keys()
            self._used[name] = found
        return self._used[name]


def _first_line(node: Any) -> int:
    return min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])


def _only_imports(node: ast.AST) -> bool:
    """Whether a statement is an import, or a block of imports for annotations."""
    return not isinstance(node, ast.If) or all(isinstance(x, (ast.Import, ast.ImportFrom)) for x in node.body)


@functools.cache
def module_of(name: str, text_of: Callable[[str], str]) -> Module:
    return Module(name, text_of(name))
