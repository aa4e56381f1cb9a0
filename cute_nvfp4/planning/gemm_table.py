"""The user's table of GEMM plans that were measured to be fastest: a JSON file that ``choose`` reads first.

It is ``gemm.json`` in the user's configuration folder, or the file that ``CUTE_NVFP4_GEMM_TABLE`` names;
``cute-nvfp4 tune`` writes it, and users may edit it. An entry holds for one problem (sizes, formats and output, with
any bias, factors and gate), one architecture and one number of multiprocessors; a later entry for the same wins. Its
"family" is "gemm" (the default), or "packed" for a prepared weight. A file that cannot be read is an error that says
what is wrong: a plan that is silently ignored would look like a slow kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from ..errors import CuteNvfp4Error, OperandError
from ..runtime.cache import write_whole
from ..target import ARCHITECTURES, Architecture
from .table_families import FAMILIES, KERNELS, AnyPlan, Family, Problem, family_of

TABLE_VARIABLE = "CUTE_NVFP4_GEMM_TABLE"
VERSION = 1
_NEEDED = {"device", "arch", "sm_count", "problem", "plan", "us", "note"}


class TableError(CuteNvfp4Error, ValueError):
    """The user's table of plans cannot be read or written, or an entry of it is not a plan."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A measured winner. device: the GPU's name. us: its median time there. note: when and how it was measured."""

    device: str
    arch: str
    sm_count: int
    problem: Problem
    plan: AnyPlan
    us: float
    note: str

    @property
    def family(self) -> Family:
        return FAMILIES[family_of(self.problem)]

    def fits(self, problem: Problem, arch: Architecture, sm_count: int) -> bool:
        """Whether the entry is for this device and this problem, without what does not matter to its tiling."""
        if type(problem) is not type(self.problem):
            return False
        tiled = self.family.tiled
        return (tiled(self.problem), self.arch, self.sm_count) == (tiled(problem), arch.name, sm_count)


def path() -> Path:
    """The file of the table, which may not exist."""
    override = os.environ.get(TABLE_VARIABLE)
    return Path(override) if override else user_config_path("cute_nvfp4", appauthor=False) / "gemm.json"


def stamp() -> object:
    """A value that changes with the table: its path, time of change and size, or its path alone if it is missing."""
    file = path()
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return str(file)
    except OSError as error:
        raise TableError(f"cannot read the table of GEMM plans {file}: {error}") from error
    return str(file), found.st_mtime_ns, found.st_size


def lookup(problem: Problem, arch: Architecture, sm_count: int, device: str = "") -> AnyPlan | None:
    """The table's plan, or None. device: if it is given, only entries made on a GPU of that name count.

    Raises:
        TableError: the file is not a table, or an entry is not a plan that a kernel can run.
    """
    for entry in reversed(entries()):
        if entry.fits(problem, arch, sm_count) and device in ("", entry.device):
            return _applied(entry, problem)
    return None


def _applied(entry: Entry, problem: Problem) -> AnyPlan:
    """The entry's plan, with the bias, factors and gate of ``problem``."""
    plan = entry.family.applied(entry.plan, problem)
    if reason := entry.family.can_plan(plan, problem):
        raise TableError(f"the plan of {path()} for {problem} cannot run: {reason}")
    return plan


def entries() -> tuple[Entry, ...]:
    """All entries of the table, oldest first; empty if there is no file."""
    found = stamp()
    return () if isinstance(found, str) else _read(found)


@functools.lru_cache(maxsize=4)
def _read(found: tuple) -> tuple[Entry, ...]:
    file = Path(found[0])
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise TableError(f"cannot read the table of GEMM plans {file}: {error}") from error
    if (
        not isinstance(content, dict)
        or content.get("version") != VERSION
        or not isinstance(content.get("entries"), list)
    ):
        raise TableError(f'{file} is not a table of GEMM plans: expected {{"version": {VERSION}, "entries": [...]}}')
    return tuple(_entry(raw, f"{file}, entry {index}") for index, raw in enumerate(content["entries"]))


def _entry(raw: Any, where: str) -> Entry:
    _fields(raw, _NEEDED, _NEEDED | {"family"}, where)
    for name, kind in (("device", str), ("sm_count", int), ("note", str)):
        _check(raw[name], kind, f"{where}: {name}")
    if raw["arch"] not in ARCHITECTURES:
        raise TableError(f"{where}: arch is {raw['arch']!r}, expected one of {', '.join(ARCHITECTURES)}")
    if type(raw["us"]) not in (int, float) or not 0 < raw["us"] < float("inf"):
        raise TableError(f"{where}: us is {raw['us']!r}, expected a positive number")
    name = raw.get("family", "gemm")
    if name not in FAMILIES:
        raise TableError(f"{where}: family is {name!r}, expected one of {', '.join(FAMILIES)}")
    problem = _problem(raw["problem"], FAMILIES[name], f"{where}, problem")
    plan = _plan(raw["plan"], FAMILIES[name], problem, ARCHITECTURES[raw["arch"]], f"{where}, plan")
    return Entry(raw["device"], raw["arch"], raw["sm_count"], problem, plan, float(raw["us"]), raw["note"])


def _problem(raw: Any, family: Family, where: str) -> Problem:
    fields = dataclasses.fields(family.problem)
    _fields(raw, {"m", "n", "k"}, {field.name for field in fields}, where)
    for field in fields:
        if field.name in raw:
            kind = int if field.default is dataclasses.MISSING else type(field.default)
            _check(raw[field.name], kind, f"{where}: {field.name}")
    problem = family.problem(**raw)
    if reason := family.can_run(problem):
        raise TableError(f"{where} cannot run: {reason}")
    return problem


def _plan(raw: Any, family: Family, problem: Problem, arch: Architecture, where: str) -> AnyPlan:
    raw = family.filled(_dictionary(raw, where))
    if str(raw.get("kernel", "wgmma")) not in KERNELS:
        raise TableError(f"{where}: kernel is {raw['kernel']!r}, expected one of {', '.join(KERNELS)}")
    kinds = family.kinds(raw)
    _fields(raw, set(kinds), set(kinds), where)
    for name, kind in kinds.items():
        _check(raw[name], kind, f"{where}: {name}")
    if "cluster" in raw and [type(x) for x in raw["cluster"]] != [int, int]:
        raise TableError(f"{where}: cluster is {raw['cluster']!r}, expected two integers")
    try:
        plan = family.plan(raw, problem, arch)
    except OperandError as error:
        raise TableError(f"{where} cannot run: {error}") from error
    reason = family.can_plan(plan, problem)
    if not reason and raw["workers"] < 1:
        reason = f"workers is {raw['workers']}, expected at least 1"
    if reason:
        raise TableError(f"{where} cannot run: {reason}")
    return plan


def _dictionary(raw: Any, where: str) -> dict:
    if not isinstance(raw, dict):
        raise TableError(f"{where}: got {type(raw).__name__}, expected an object")
    return raw


def _fields(raw: Any, needed: set[str], known: set[str], where: str) -> dict:
    raw = _dictionary(raw, where)
    missing, unknown = sorted(needed - set(raw)), sorted(set(raw) - known)
    if missing or unknown:
        raise TableError(f"{where}: missing {missing}, unknown {unknown}; expected {sorted(known)}")
    return raw


_SAID = {int: "an integer", bool: "true or false", str: "a string", list: "a list"}


def _check(value: Any, kind: type, what: str) -> None:
    if type(value) is not kind:
        raise TableError(f"{what} is {value!r}, expected {_SAID[kind]}")


def store(entry: Entry) -> Path:
    """Adds ``entry`` to the table, in place of an older one for the same problem and GPU; returns the file.

    Raises:
        TableError: the table cannot be read or written; a broken table is never overwritten.
    """
    arch = ARCHITECTURES[entry.arch]
    kept = [e for e in entries() if e.device != entry.device or not e.fits(entry.problem, arch, entry.sm_count)]
    content = {"version": VERSION, "entries": [_raw(e) for e in (*kept, entry)]}
    file = path()
    try:
        write_whole(file, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise TableError(f"cannot write the table of GEMM plans {file}: {error}") from error
    return file


def _raw(entry: Entry) -> dict:
    raw = {"family": family_of(entry.problem), **vars(entry)}
    return raw | {"problem": dataclasses.asdict(entry.problem), "plan": entry.family.written(entry.plan)}
