"""Finds which modules of the package import which, from their sources."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import cute_nvfp4

ROOT = Path(cute_nvfp4.__file__).parent
NAME = ROOT.name


@dataclass(frozen=True)
class Import:
    """One import of a module of the package. when: "import" if it runs when the module is loaded, "call", or
    "types"."""

    source: str
    target: str
    when: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target} ({self.when})"


def module_of(path: Path) -> str:
    parts = [NAME, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(files: Iterable[Path]) -> dict[str, Path]:
    return {module_of(path): path for path in sorted(files)}


@cache
def package() -> dict[str, Path]:
    return modules(ROOT.rglob("*.py"))


def imports(module: str, text: str, is_package: bool, known: Iterable[str]) -> list[Import]:
    """Imports of the package's own modules in the source ``text``."""
    found: list[Import] = []
    known = set(known)

    def visit(node: ast.AST, when: str) -> None:
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            base = base[: len(base) - node.level + is_package] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # an imported name may be a module itself
            targets = [f"{source}.{a.name}" if f"{source}.{a.name}" in known else source for a in node.names]
        else:
            targets = []
        found.extend(Import(module, t, when, node.lineno) for t in dict.fromkeys(targets) if t in known)
        typed = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            inner = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and when == "import"
            visit(child, "types" if typed and child not in node.orelse else "call" if inner else when)

    visit(ast.parse(text), "import")
    return found
