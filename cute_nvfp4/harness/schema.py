"""The schema of a ``task.yml``, and the errors for an invalid one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from .errors import TaskFileError

# The problem's parameters and "seed". In a grouped problem a parameter is a list with one entry for each group.
Case = dict[str, int | list[int]]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integers(value: object) -> int | list[int]:
    if _is_integer(value) or (isinstance(value, list) and all(_is_integer(entry) for entry in value)):
        return value
    raise ValueError(f"is {value!r}, must be an integer or a list of integers")


_RawCase = dict[str, Annotated[int | list[int], PlainValidator(_integers)]]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tolerances(_Strict):
    """An output passes where ``|out - ref| <= atol + rtol |ref| + sum_rtol * sum |a_k b_k|``."""

    rtol: float = Field(ge=0)
    atol: float = Field(ge=0)
    sum_rtol: float = Field(default=0.0, ge=0)


class Limits(_Strict):
    """When a timed case stops (at the first limit that it reaches), and how long one call may take."""

    repeats: int = Field(default=200, ge=2)
    relative_error: float = Field(default=0.001, gt=0)
    seconds: float = Field(default=120.0, gt=0)
    timeout_seconds: float = Field(default=180.0, gt=0)
    batch: int = Field(default=1, ge=1, description="calls, each on inputs of its own, that one timed repeat makes")
    ranked_seconds: float = Field(default=24.0, gt=0, description="of all timed cases together on a GPU")
    cpu_flop_s: float = Field(default=1e8, gt=0, description="operations a second without a GPU, at the least")
    cpu_repeats: int = Field(default=2, ge=1, description="repeats on a backend that has no GPU times to give")
    cpu_batch: int = Field(default=2, ge=1, description="what batch is at most on such a backend")


class SpeedOfLight(_Strict):
    """A bound computed from peak rates, not a measurement: ``max(bytes / peak_bytes_s, flops / peak_flop_s)``."""

    gpu: str
    note: str
    peak_bytes_s: float = Field(gt=0)
    peak_flop_s: float = Field(gt=0)
    microseconds: list[float]


class PublicResults(_Strict):
    """Times that others published; this harness never measured them."""

    gpu: str
    note: str
    microseconds: list[float]
    geometric_mean: float


_SHAPES, _FIGURES = ("tests", "benchmarks"), ("speed_of_light", "public_results")


class Task(_Strict):
    """A problem's shapes, seeds, tolerances and published figures."""

    name: str
    description: str
    gpus: list[str] = Field(min_length=1)
    parameters: list[str] = Field(min_length=1)
    grouped: bool = Field(default=False, description="every parameter is a list with one entry for each group")
    tolerances: Tolerances
    full_range_tolerances: Tolerances
    limits: Limits = Limits()
    ranking_by: Literal["geom", "mean", "last"] = Field(default="geom", description="what the score is of the means")
    tests: list[_RawCase] = Field(min_length=1)
    benchmarks: list[_RawCase] = Field(min_length=1)
    speed_of_light: SpeedOfLight | None = None
    public_results: PublicResults | None = None

    @model_validator(mode="after")
    def _check(self) -> Task:
        for kind in ("tests", "benchmarks"):
            for index, case in enumerate(getattr(self, kind)):
                check_case(case, self.parameters, f"{kind}[{index}]", grouped=self.grouped)
        for kind in ("speed_of_light", "public_results"):
            figures = getattr(self, kind)
            if figures is not None and len(figures.microseconds) != len(self.benchmarks):
                raise ValueError(
                    f"{kind}.microseconds has {len(figures.microseconds)} entries, "
                    f"benchmarks has {len(self.benchmarks)}"
                )
        return self


def check_case(case: Case, parameters: list[str], where: str, *, grouped: bool = False) -> None:
    """Raises ValueError unless ``case`` has exactly the problem's parameters (positive) and a seed.

    grouped: every parameter is a list, all of the same length, none empty.
    """
    expected = {*parameters, "seed"}
    if set(case) != expected:
        missing, unknown = sorted(expected - set(case)), sorted(set(case) - expected)
        raise ValueError(f"{where}: missing {missing}, unknown {unknown}; a case has {sorted(expected)}")
    if not _is_integer(case["seed"]):
        raise ValueError(f"{where}: seed is {case['seed']}, must be an integer")
    for name in parameters:
        value = case[name]
        entries = value if isinstance(value, list) else [value]
        if isinstance(value, list) is not grouped or not entries:
            kind = "a list with one entry for each group" if grouped else "an integer"
            raise ValueError(f"{where}: {name} is {value}, must be {kind}")
        if min(entries) < 1:
            raise ValueError(f"{where}: {name} is {value}, must be at least 1")
    if grouped:
        lengths = {name: len(case[name]) for name in parameters}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{where}: lists of different lengths: {lengths}")


def load_task(path: Path, of: Path | None = None) -> Task:
    """Reads and validates a task file.

    of: the problem's own task file. With it, one of ``tests`` and ``benchmarks`` is enough and stands for both, and
    other missing fields come from ``of`` (except published figures, which belong to its own shapes).

    Raises:
        TaskFileError: the file is missing, is not YAML, or does not match the schema; the message lists every fault.
    """
    content = read_yaml(path)
    if of is not None and isinstance(content, dict) and not content.keys().isdisjoint(_SHAPES):
        own = {name: value for name, value in read_yaml(of).items() if name not in (*_SHAPES, *_FIGURES)}
        content = own | dict.fromkeys(_SHAPES, content.get("tests", content.get("benchmarks"))) | content
    try:
        return Task.model_validate(content)
    except ValidationError as error:
        faults = "\n".join(
            f"  {'.'.join(str(part) for part in fault['loc']) or 'file'}: {fault['msg']}" for fault in error.errors()
        )
        raise TaskFileError(f"task file {path} is not valid:\n{faults}") from error


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; raises TaskFileError if it cannot be read."""
    try:
        return yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise TaskFileError(f"task file {path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"task file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise TaskFileError(f"task file {path} is not YAML: {error}") from error


def spec(case: Case) -> str:
    """A case in the protocol's one-line form: ``m: 128; k: 256; l: 1; seed: 1111`` or ``m: [96, 128]; ...``."""
    return "; ".join(f"{name}: {value}" for name, value in case.items())


def parse_spec(line: str, parameters: list[str], where: str, *, grouped: bool = False) -> Case:
    """The inverse of :func:`spec`.

    Raises:
        TaskFileError: the line is not a list of ``name: integer`` (or ``name: [integer, ...]``) pairs with exactly
            the problem's names.
    """
    case: Case = {}
    for part in filter(None, (field.strip() for field in line.split(";"))):
        name, separator, value = part.partition(":")
        try:
            if not separator or name.strip() in case:
                raise ValueError("expected each name once, as 'name: integer' or 'name: [integer, ...]'")
            case[name.strip()] = _parse_value(value.strip())
        except ValueError as error:
            raise TaskFileError(f"{where}: cannot read {part!r} in {line!r}: {error}") from error
    try:
        check_case(case, parameters, where, grouped=grouped)
    except ValueError as error:
        raise TaskFileError(str(error)) from error
    return case


def _parse_value(text: str) -> int | list[int]:
    if text.startswith("[") and text.endswith("]"):
        return [int(entry) for entry in text[1:-1].split(",")]
    return int(text)
