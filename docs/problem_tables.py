"""The tables of docs/reference/problems.md: the content of ``data``, and the shapes, from the problems themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from table_cells import table

from cute_nvfp4.harness.problem import get_problem, known_problems
from cute_nvfp4.harness.schema import Case, load_task

SIZES = {"m": 256, "n": 384, "k": 512, "l": 2}
"""The sizes of the tensors that are shown; all differ, so that a reader can tell them apart."""


def _views(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor of ``data``, and its place there."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _views(part, f"{name}[{i}]")


def _dtype(view: torch.Tensor) -> str:
    return f"`{str(view.dtype).removeprefix('torch.')}`"


def data() -> str:
    """The tensors that ``custom_kernel`` gets for one case of each problem, in order."""
    parts = []
    for name in known_problems():
        problem = get_problem(name)
        task = load_task(problem.folder / "task.yml")
        grouped = isinstance(task.tests[0]["m"], list)
        case: Case = {key: [SIZES[key]] if grouped else SIZES[key] for key in task.parameters} | {"seed": 0}
        stored = {b.name: torch.zeros(b.shape, dtype=getattr(torch, b.dtype)) for b in problem.buffers(case)}
        names = {tensor.data_ptr(): buffer for buffer, tensor in stored.items()}
        rows = [
            [f"`{where}`", f"`{names[view.data_ptr()]}`", _dtype(view), str(tuple(view.shape)), str(view.stride())]
            for where, view in _views(problem.views(stored), "data")
        ]
        sizes = ", ".join(f"{key} = {SIZES[key]}" for key in task.parameters)
        head = ["", "name", "dtype", "shape", "strides"]
        parts += [f"`{name}`, {sizes}{' (one group)' if grouped else ''}:\n", table(head, rows)]
    return "\n".join(parts)


def _sizes(case: Case) -> str:
    return "; ".join(f"{key} {_size(value)}" for key, value in case.items() if key != "seed")


def _size(value: int | list[int]) -> str:
    """A size, or the sizes of all groups: "8 times 4096" if they are equal."""
    if isinstance(value, int):
        return str(value)
    equal = len(set(value)) == 1 and len(value) > 1
    return f"{len(value)} times {value[0]}" if equal else "/".join(map(str, value))


def benchmarks() -> str:
    """The benchmark shapes, with the bound and the public results that ``task.yml`` quotes."""
    rows = []
    for name in known_problems():
        task = load_task(get_problem(name).folder / "task.yml")
        bounds, best = task.speed_of_light, task.public_results
        for i, case in enumerate(task.benchmarks):
            rows.append([f"`{name}`", str(i), _sizes(case), f"{bounds.microseconds[i]:g}", f"{best.microseconds[i]:g}"])
    head = ["problem", "`--case`", "shape", "bound, published, µs", "best public result, µs"]
    return table(head, rows)


def tests() -> str:
    """The correctness shapes."""
    rows = []
    for name in known_problems():
        task = load_task(get_problem(name).folder / "task.yml")
        rows += [[f"`{name}`", str(i), _sizes(case)] for i, case in enumerate(task.tests)]
    return table(["problem", "`--case`", "shape"], rows)
