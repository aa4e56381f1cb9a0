"""The output of each ``--json`` as pydantic models, which are derived from the records that the commands write.

A test validates the commands' real output with them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

Model = type[BaseModel]
STRICT = ConfigDict(extra="forbid")


def made(name: str, about: str, /, **fields: Any) -> Model:
    """A model with exactly these fields, all required. A field ``schema`` would hide a method of pydantic's."""
    found = {f"{key}_" if hasattr(BaseModel, key) else key: (kind, Field(alias=key)) for key, kind in fields.items()}
    return create_model(name, __doc__=about, __config__=STRICT, **found)


def of_record(record: type, name: str = "", without: tuple[str, ...] = (), /, **more: Any) -> Model:
    """The model of a dataclass or named tuple as a dictionary: its fields except ``without``, and ``more``."""
    kinds = {key: kind for key, kind in _hints(record).items() if key in _fields(record) and key not in without}
    return made(name or record.__name__, record.__doc__ or "", **{k: of_type(t) for k, t in kinds.items()}, **more)


def of_type(kind: Any) -> Any:
    """``kind``, with every record in it replaced by its model."""
    if dataclasses.is_dataclass(kind):
        return _cached(kind)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal or not arguments:
        return kind
    inner = tuple(one if one is Ellipsis else of_type(one) for one in arguments)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, inner)
    return typing.get_origin(kind)[inner]


@functools.cache
def _cached(record: type) -> Model:
    return of_record(record)


def _fields(record: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(record)) if dataclasses.is_dataclass(record) else record._fields


def _hints(record: type) -> dict[str, Any]:
    """The types of a record's fields. Names that its module imports for type checkers only are the simulator's."""
    from ..sim.checks.findings import Finding
    from ..sim.observe.l2 import L2Traffic
    from ..sim.observe.timing import Timing

    own = vars(sys.modules[record.__module__])
    others = {one.__name__: one for one in (Finding, L2Traffic, Timing) if one.__name__ not in own}
    return typing.get_type_hints(record, localns=others)


def _case(name: str = "", /, **more: Any) -> Model:
    from ..harness.counters import Launch
    from ..harness.results import CaseResult

    launch = {key: (of_type(field.annotation), ...) for key, field in Launch.model_fields.items()}
    launches = list[create_model("Launch", __doc__=Launch.__doc__, __config__=STRICT, **launch)]
    return of_record(CaseResult, name, ("launches",), passed=bool, spec=str, launches=launches, **more)


def _run(case: Model, name: str = "", /, **more: Any) -> Model:
    from ..harness.modelled_score import ModelledKernels
    from ..harness.results import RunResult

    kernels = of_record(ModelledKernels) | None
    apart = ("cases", "modelled_kernels")
    return of_record(RunResult, name, apart, passed=bool, modelled_kernels=kernels, cases=list[case], **more)


def evaluation() -> Model:
    """A run of one submission."""
    return _run(_case())


def comparison() -> Model:
    """Runs of several submissions, with the figures that are compared."""
    from ..harness.comparison import FIGURES, TIMES

    figures = made("Figures", "Each figure of a case, or its geometric mean; null where there is none.",
                   **{figure.key: float | None for figure in FIGURES})  # fmt: skip
    about = "How many times faster than the first submission; null where one of the two has no such time."
    faster = made("TimesFaster", about, **dict.fromkeys(TIMES, float | None))
    judged = _run(
        _case("ComparedCase", figures=figures),
        "Submission",
        name=str,
        geometric_means=figures,
        refusal=str,
        times_faster=faster,
    )
    refused = made("Refused", "A submission that could not be loaded, and why.",
                   name=str, submission=str, passed=bool, refusal=str, times_faster=faster)  # fmt: skip
    return made("Comparison", "Several submissions.", passed=bool, submissions=list[judged | refused])


def events() -> Model:
    """A line of ``--json-lines``."""
    from ..harness.lines import EVENTS

    fields = {event.model_fields["event"].default: event for event in EVENTS}
    return made("Events", "One of these a line; ``event`` says which.", **fields)


def profiles() -> Model:
    """The file of ``--report``."""
    from ..sim.profile.page import Profile

    return made("Profiles", "Details pages.", profiles=list[of_record(Profile, "DetailsPage", schema=int)])


_SIMULATION = """A program under one schedule. ``schema`` is 1; it grows when a key changes its meaning.

``status`` is the exit status of the command. ``failure`` is what stopped the first launch that was stopped, or the
first hazard that ``--continue`` went on past, even if the program went on; its ``kind`` is the name of the error's
class, its ``launch`` null for a hazard in torch's own work. ``error`` is the exception that ended the program.
``findings`` are of all launches. ``seconds`` are of this machine and say nothing of a GPU. A launch has ``counters``
with ``--counters``, ``timing`` with ``--time``, and 0 ``instructions`` if it was stopped. Its ``params`` are
the sizes of the parameters in bytes, not their contents; its ``cubin`` is left out."""


def simulation() -> Model:
    """A program in the simulated GPU."""
    from ..sim.machine.launch import Launch
    from ..sim.observe.result import Result
    from ..sim.observe.timing import Phase, Timing

    timing = of_record(Timing, "ModelledTime", ("waits", "code", "again"), phases=list[of_record(Phase)],
                       gains=dict[str, float])  # fmt: skip
    counters = of_record(Result, "Counters", ("findings", "timing"), bank_conflicts=int)
    without = ("params", "attributes", "cubin", "registers")
    launch = of_record(
        *(Launch, "SimulatedLaunch", without), number=int, params=list[int], attributes=list[Any], registers=int,
        seconds=float, instructions=int, warnings=list[str], counters=counters | None, timing=timing | None,
    )  # fmt: skip
    from ..sim.checks.findings import Finding

    failure = made("Failure", "What stopped the first launch that was stopped.", kind=str, message=str,
                   launch=int | None)  # fmt: skip
    error = made("Error", "The exception that ended the program.", kind=str, message=str)
    outcome = Literal["ended", "hazard", "not modelled", "internal error", "program failed"]
    return made(
        *("Simulation", _SIMULATION), schema=int, script=str, arguments=list[str], arch=str,
        schedule=str, checks=bool, allow=list[str], strict=bool, status=int, outcome=outcome, seconds=float,
        failure=failure | None, error=error | None, findings=list[of_type(Finding)], launches=list[launch],
    )  # fmt: skip


def schedules() -> Model:
    """A program under several schedules."""
    died = made("Died", "A run that ended before it wrote its report.", schedule=str, status=int)
    return made("Schedules", "A program under several schedules; the last is the one that failed, if one did.",
                schema=int, script=str, arguments=list[str], arch=str, status=int,
                schedules=list[simulation() | died])  # fmt: skip


def doctor() -> Model:
    """The checks of this machine."""
    from .diagnosis import Finding

    return made(
        "Doctor", "``ok``: nothing that is needed is broken.", ok=bool, findings=list[of_record(Finding, "Check")]
    )


def support() -> Model:
    """The matrix of what runs where."""
    from .support_matrix import Answer

    row = made("Call", "A call, and what each architecture says of it.", operation=str, operands=str, form=str,
               architectures=dict[str, of_record(Answer, runs=bool)])  # fmt: skip
    return made("Support", "Which calls run where.", architectures=list[str], rows=list[row])


def inspection() -> Model:
    """A compiled kernel of the package."""
    from ..runtime.inspection import KernelReport

    fields = {"kernel": str, "arch": str, "m": int, "k": int, "l": int, "config": str}
    rest = {"n": (int, ...), "plan": (dict[str, Any], ...), "ptx": (str, ...), "sass": (str, ...)}
    base = made("Compiled", "What a kernel compiles to.", **fields, kernels=list[of_type(KernelReport)])
    optional = {key: (kind | None, None) for key, (kind, _) in rest.items()}
    about = f"{base.__doc__} ``n`` and ``plan`` are those of gemm; ``ptx`` and ``sass`` are there with their options."
    return create_model("Inspection", __doc__=about, __base__=base, **optional)


def explanation() -> Model:
    """Kernels line by line."""
    from ..sim.profile import Explanation

    return made("Explained", "Kernels line by line; ``launches`` is how many the target made.", schema=int, target=str,
                arch=str, launches=int, kernels=list[of_type(Explanation)])  # fmt: skip


def tuning() -> Model:
    """Ranked plans."""
    from ..planning.gemm_problem import GemmProblem
    from ..planning.packed_problem import PackedProblem

    problem = of_type(GemmProblem) | of_type(PackedProblem)
    modelled = made("ModelledPlan", "By the model alone.", plan=str, model_us=float, bound=str)
    timed = made("TimedPlan", "``us`` is measured, or modelled by ``clock``; ``error`` is there if it could not run.",
                 plan=str, us=float, best_us=float, runs=int, model_us=float)  # fmt: skip
    timed = create_model("TimedPlan", __base__=timed, __doc__=timed.__doc__, error=(str | None, None))
    first = made("Ranked", "A problem, and its plans, the fastest first.", problem=problem, device=str, sm_count=int,
                 plans=list[timed | modelled])  # fmt: skip
    more = dict.fromkeys(("timing", "clock", "stored"), (str | None, None))
    bounds = dict.fromkeys(("speed_of_light_us", "ceiling_us"), (float | None, None))
    ranked = create_model("Ranked", __base__=first, __doc__=first.__doc__, **bounds, **more)
    return made("Tuning", "Plans of products.", kind=Literal["clock", "model", "measured"], problems=list[ranked])


def quantization() -> Model:
    """A quantized checkpoint."""
    from ..nn.divergence import Divergence
    from ..nn.report import LayerReport

    return made("Quantized", "What quantizing a checkpoint gave.", bytes=int, bytes_before=int,
                layers=list[of_type(LayerReport)], skipped=dict[str, str],
                divergence=of_record(Divergence) | None)  # fmt: skip


SCHEMAS: dict[str, tuple[str, Callable[[], Model]]] = {
    "eval": ("eval … --json, one submission", evaluation),
    "comparison": ("eval … --json, several submissions", comparison),
    "events": ("eval … --json-lines", events),
    "profile": ("eval or explain … --report FILE.json", profiles),
    "sim": ("sim … --json FILE", simulation),
    "schedules": ("sim … --schedules N --json FILE", schedules),
    "explain": ("explain … --json", explanation),
    "inspect": ("inspect … --json", inspection),
    "tune": ("tune … --json", tuning),
    "quantize": ("quantize … --json", quantization),
    "support": ("support --json", support),
    "doctor": ("doctor --json", doctor),
}
"""By name of an output: the command that writes it, and the function that makes its model."""


def in_words(model: Model) -> list[str]:
    """The fields of a model, one on each line."""
    lines = []
    for name, field in model.model_fields.items():
        optional = "" if field.is_required() else "  (may be left out)"
        lines.append(f"{field.alias or name}: {_kind(field.annotation)}{optional}")
    return lines


def _kind(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.__name__
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(one) for one in arguments)
    if origin is dict:
        return f"object, each value {_kind(arguments[1])}"
    if origin is list or arguments[1:] == (Ellipsis,):
        return f"list of {_kind(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(_kind(one) for one in arguments)}]"
    if isinstance(kind, type) and issubclass(kind, tuple):
        return f"[{', '.join(kind._fields)}]"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


_WORDS = {type(None): "null", str: "string", int: "integer", float: "number", bool: "true or false", Any: "anything"}


def within(model: Model) -> Iterator[Model]:
    """All models in a model's fields, depth first."""
    for field in model.model_fields.values():
        for inner in _models(field.annotation):
            yield inner
            yield from within(inner)


def _models(kind: Any) -> Iterator[Model]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for one in typing.get_args(kind):
        yield from _models(one)


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema of the output ``name`` of ``SCHEMAS``."""
    return SCHEMAS[name][1]().model_json_schema(by_alias=True)
