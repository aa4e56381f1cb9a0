"""What a ``task.yml`` holds, and how a bad one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import TaskFileError

Case = dict[str, int]  # the problem's parameters and "seed"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tolerances(_Strict):
    """An output passes where ``|out - ref| <= atol + rtol |ref| + sum_rtol * sum |a_k b_k|``."""

    rtol: float = Field(ge=0)
    atol: float = Field(ge=0)
    sum_rtol: float = Field(default=0.0, ge=0)


class Limits(_Strict):
    """When a timed case stops (whichever comes first) and how long one call may take."""

    repeats: int = Field(default=200, ge=2)
    relative_error: float = Field(default=0.001, gt=0)
    seconds: float = Field(default=120.0, gt=0)
    timeout_seconds: float = Field(default=180.0, gt=0)
    cpu_repeats: int = Field(default=2, ge=1, description="repeats on a backend that has no GPU times to give")


class SpeedOfLight(_Strict):
    """A bound computed from peaks, not a measurement: ``max(bytes / peak_bytes_s, flops / peak_flop_s)``."""

    gpu: str
    note: str
    peak_bytes_s: float = Field(gt=0)
    peak_flop_s: float = Field(gt=0)
    microseconds: list[float]


class PublicResults(_Strict):
    """Times published by others: never measured by this harness."""

    gpu: str
    note: str
    microseconds: list[float]
    geometric_mean: float


class Task(_Strict):
    """A problem's shapes, seeds, tolerances and published figures."""

    name: str
    description: str
    gpus: list[str] = Field(min_length=1)
    parameters: list[str] = Field(min_length=1)
    tolerances: Tolerances
    full_range_tolerances: Tolerances
    limits: Limits = Limits()
    tests: list[Case] = Field(min_length=1)
    benchmarks: list[Case] = Field(min_length=1)
    speed_of_light: SpeedOfLight | None = None
    public_results: PublicResults | None = None

    @model_validator(mode="after")
    def _check(self) -> Task:
        for kind in ("tests", "benchmarks"):
            for index, case in enumerate(getattr(self, kind)):
                check_case(case, self.parameters, f"{kind}[{index}]")
        for kind in ("speed_of_light", "public_results"):
            figures = getattr(self, kind)
            if figures is not None and len(figures.microseconds) != len(self.benchmarks):
                raise ValueError(
                    f"{kind}.microseconds has {len(figures.microseconds)} entries, "
                    f"benchmarks has {len(self.benchmarks)}"
                )
        return self


def check_case(case: Case, parameters: list[str], where: str) -> None:
    """Raises ValueError unless ``case`` has exactly the problem's parameters (positive) and a seed."""
    expected = {*parameters, "seed"}
    if set(case) != expected:
        missing, unknown = sorted(expected - set(case)), sorted(set(case) - expected)
        raise ValueError(f"{where}: missing {missing}, unknown {unknown}; a case has {sorted(expected)}")
    for name in parameters:
        if case[name] < 1:
            raise ValueError(f"{where}: {name} is {case[name]}, must be at least 1")


def load_task(path: Path) -> Task:
    """Reads and validates a task file.

    Raises:
        TaskFileError: the file is missing, is not YAML, or does not match the schema; every fault is listed.
    """
    try:
        content: Any = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise TaskFileError(f"task file {path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"task file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise TaskFileError(f"task file {path} is not YAML: {error}") from error
    try:
        return Task.model_validate(content)
    except ValidationError as error:
        faults = "\n".join(
            f"  {'.'.join(str(part) for part in fault['loc']) or 'file'}: {fault['msg']}" for fault in error.errors()
        )
        raise TaskFileError(f"task file {path} is not valid:\n{faults}") from error


def spec(case: Case) -> str:
    """A case in the protocol's one-line form: ``m: 128; k: 256; l: 1; seed: 1111``."""
    return "; ".join(f"{name}: {value}" for name, value in case.items())


def parse_spec(line: str, parameters: list[str], where: str) -> Case:
    """The inverse of :func:`spec`.

    Raises:
        TaskFileError: the line is not a list of ``name: integer`` pairs with exactly the problem's names.
    """
    case: Case = {}
    for part in filter(None, (piece.strip() for piece in line.split(";"))):
        name, separator, value = part.partition(":")
        try:
            if not separator or name.strip() in case:
                raise ValueError("expected each name once, as 'name: integer'")
            case[name.strip()] = int(value)
        except ValueError as error:
            raise TaskFileError(f"{where}: cannot read {part!r} in {line!r}: {error}") from error
    try:
        check_case(case, parameters, where)
    except ValueError as error:
        raise TaskFileError(str(error)) from error
    return case
