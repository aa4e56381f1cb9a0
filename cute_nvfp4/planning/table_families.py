"""The families of problems in the table of plans, and how an entry of the table describes a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..kernels.gemm.config import TILING
from ..kernels.gemm.limits import can_implement as can_gemm
from ..kernels.gemm.packed.stream_config import StreamConfig
from ..kernels.gemm.sm90.config import WgmmaConfig
from ..target import Architecture
from .gemm_problem import GemmProblem, Plan, can_run
from .packed_problem import (
    PackedPlan,
    PackedProblem,
    can_implement,
    decided,
    default_tiling,
    refused,
    tiling_of,
)

Problem = GemmProblem | PackedProblem
AnyPlan = Plan | PackedPlan
_GEMM_KINDS = dict.fromkeys(TILING, int) | {"pair": bool, "scheduler": str, "raster": str, "store": str}
KERNELS = {"stream": StreamConfig, "wgmma": WgmmaConfig}


class Family(NamedTuple):
    """What the table needs to know of a family.

    problem: the type of its problems. tiled: the part of a problem that its tiling depends on, which is the key of
        entries.
    can_run: the reason why a problem is impossible, or "". can_plan: the reason why a plan cannot run one, or "".
    filled: an entry of the file with the fields that are newer than it. kinds: the type of each field of an entry.
    written: the fields of a plan. plan: the plan from such fields.
    applied: an entry's plan, for another problem with the same tiling.
    """

    problem: type
    tiled: Callable[[Any], Problem]
    can_run: Callable[[Any], str]
    can_plan: Callable[[Any, Any], str]
    filled: Callable[[Mapping[str, Any]], dict[str, Any]]
    kinds: Callable[[Mapping[str, Any]], dict[str, type]]
    written: Callable[[Any], dict[str, Any]]
    plan: Callable[[Mapping[str, Any], Any, Architecture], AnyPlan]
    applied: Callable[[Any, Any], AnyPlan]


def _gemm_written(plan: Plan) -> dict[str, Any]:
    tiling = plan.config.tiling
    return tiling | {"cluster": list(plan.config.cluster), "swap": plan.swap, "workers": plan.workers}


def _gemm_plan(raw: Mapping[str, Any], problem: GemmProblem, arch: Architecture) -> Plan:
    tiling = {name: raw[name] for name in TILING} | {"cluster": tuple(raw["cluster"])}
    return Plan(problem.config(arch, raw["swap"], **tiling), raw["swap"], raw["workers"])


def _gemm_applied(plan: Plan, problem: GemmProblem) -> Plan:
    return replace(plan, config=problem.config(plan.config.arch, plan.swap, **plan.config.tiling))


def _packed_kinds(raw: Mapping[str, Any]) -> dict[str, type]:
    default = default_tiling(KERNELS[str(raw.get("kernel", "wgmma"))])
    return {name: type(x) for name, x in default.items()} | {"kernel": str, "workers": int}


def _packed_filled(raw: Mapping[str, Any]) -> dict[str, Any]:
    # older entries lack these fields
    later = {"programmatic": ""} | ({"overlap": 0, "decodes_x": False} if raw.get("kernel", "wgmma") == "wgmma" else {})
    return later | dict(raw)


def _packed_plan(raw: Mapping[str, Any], problem: PackedProblem, arch: Architecture) -> PackedPlan:
    kind = KERNELS[raw["kernel"]]
    return PackedPlan(kind(arch=arch, **tiling_of(kind, raw), **decided(problem, kind is StreamConfig)), raw["workers"])


def _packed_applied(plan: PackedPlan, problem: PackedProblem) -> PackedPlan:
    return replace(plan, config=replace(plan.config, **decided(problem, plan.streams)))


FAMILIES = {
    "gemm": Family(
        GemmProblem,
        lambda p: replace(p, bias="", bias_dtype="float32", factors=0, gate=""),
        can_run,
        lambda plan, p: can_gemm(plan.config),
        dict,
        lambda raw: _GEMM_KINDS | {"cluster": list, "swap": bool, "workers": int},
        _gemm_written,
        _gemm_plan,
        _gemm_applied,
    ),
    "packed": Family(
        PackedProblem,
        # a gated product is one of twice the columns; the streaming kernel has no bias
        lambda p: replace(p, n=p.rows, gate="", factors=0, bias="float32" if p.bias else ""),
        lambda p: "" if min(p.m, p.n, p.k) > 0 else f"M, N, K are {p.m}, {p.n}, {p.k}, expected at least 1",
        lambda plan, p: refused(p, plan) or can_implement(plan),
        _packed_filled,
        _packed_kinds,
        lambda plan: plan.tiling | {"kernel": "stream" if plan.streams else "wgmma", "workers": plan.workers},
        _packed_plan,
        _packed_applied,
    ),
}


def family_of(problem: Problem) -> str:
    """The name of the family to which ``problem`` belongs."""
    return next(name for name, family in FAMILIES.items() if isinstance(problem, family.problem))
