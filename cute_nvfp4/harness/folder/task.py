"""Reads a problem folder: its ``task.yml``, and the files that it lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import HarnessError, TaskFileError
from ..problem import Buffer
from ..schema import Case, Task, Tolerances, read_yaml

SUBMISSION_MARK = "@SUBMISSION@"
"""Stands for the submission's source in ``files``."""
PROVIDED = ("task.py", "utils.py")
"""Files that a folder may omit: the harness provides what the public evaluator has under these names."""
MOST_DATA = 32 << 30
"""Most bytes of a case's data."""
_MOST_BYTES = 16 << 20
_REFERENCE = "reference.py"
CUDA_CPP = (
    "{path} asks for CUDA C++ (lang: cu): nvcc makes machine code and host code that calls the driver, and the "
    "simulator runs PTX. Write the kernel in the CuTe DSL, with inline PTX if wanted, and judge it by a folder with "
    "lang: py; or run this folder on a machine with a GPU and the public evaluator."
)
SEVERAL_GPUS = (
    "{path} is for several GPUs (multi_gpu: true), and one is simulated here. Judge it on a machine with the GPUs and "
    "the public evaluator."
)


class _File(BaseModel):
    name: str
    source: str


class _Config(BaseModel):
    model_config = ConfigDict(extra="allow")

    main: str = "eval.py"


class PublicTask(BaseModel):
    """The part of a public ``task.yml`` that the harness uses; other keys are ignored."""

    model_config = ConfigDict(extra="ignore")

    files: list[_File] = Field(min_length=1)
    lang: str = "py"
    description: str = ""
    config: _Config = _Config()
    tests: list[dict[str, Any]] = Field(min_length=1)
    benchmarks: list[dict[str, Any]] = []
    ranking_by: Literal["last", "mean", "geom"] = "last"
    multi_gpu: bool = False


class FolderTask(Task):
    """A task whose cases are keyword arguments of ``generate_input``: any YAML, usually with a ``seed``."""

    tests: list[dict[str, Any]] = Field(min_length=1)
    benchmarks: list[dict[str, Any]] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> FolderTask:
        return self

    @classmethod
    def of(cls, name: str, public: PublicTask) -> FolderTask:
        """The task called ``name``. Without ``benchmarks`` the tests stand for them. The folder has the tolerances."""
        cases = [*public.tests, *public.benchmarks]
        names = dict.fromkeys(key for case in cases for key in case if key != "seed")
        return cls(
            name=name,
            description=public.description,
            gpus=["any"],
            parameters=list(names) or ["seed"],
            tolerances=Tolerances(rtol=0, atol=0),
            full_range_tolerances=Tolerances(rtol=0, atol=0),
            tests=public.tests,
            benchmarks=public.benchmarks or public.tests,
            ranking_by=public.ranking_by,
        )


class FolderProblem:
    """A problem that a folder defines: its ``files`` by name, its ``task``. It holds no tensors, since the folder draws
    and judges in a process of its own (``examination``)."""

    def __init__(self, folder: Path, files: dict[Path, bytes], task: FolderTask) -> None:
        self.folder, self.files, self.task, self.name = folder, files, task, task.name

    def validate(self, case: Case) -> None:
        """Accepts every case: ``generate_input`` decides."""

    def useful_bytes(self, case: Case) -> int:
        """0: the bytes that an implementation must move are unknown."""
        return 0

    def buffers(self, case: Case) -> list[Buffer]:
        """Room for a case, whose tensors are known once they are drawn. Memory is taken when it is written."""
        return [Buffer("data", (MOST_DATA,), "uint8")]

    def output_shapes(self, case: Case) -> list[tuple[tuple[int, ...], str]]:
        """An empty list: ``custom_kernel``'s return value defines the outputs."""
        return []

    def flops(self, case: Case) -> int:
        """The product of a case's sizes: not a count, but an estimate for limits and for the order of cases."""
        product = 1
        for name, value in case.items():
            for entry in value if isinstance(value, list) else [value]:
                if name != "seed" and isinstance(entry, int) and not isinstance(entry, bool):
                    product *= max(1, abs(entry))
        return product


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a task file in the public format, which lists ``files``; ours does not."""
    content = read_yaml(path)
    return isinstance(content, dict) and "files" in content


def read_folder(path: Path) -> FolderProblem:
    """The problem of the folder that has the task file ``path``.

    Raises:
        TaskFileError: the file, or one that it lists, is missing or invalid.
        HarnessError: the folder is for CUDA C++ or for several GPUs.
    """
    try:
        public = PublicTask.model_validate(read_yaml(path))
    except ValidationError as error:
        faults = "\n".join(f"  {'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise TaskFileError(f"task file {path} is not valid:\n{faults}") from error
    if public.lang != "py":
        if public.lang == "cu":
            raise HarnessError(CUDA_CPP.format(path=path))
        raise HarnessError(f"{path} has lang: {public.lang}; expected py (CuTe DSL, torch, inline PTX)")
    if public.multi_gpu:
        raise HarnessError(SEVERAL_GPUS.format(path=path))
    folder = path.resolve().parent
    files = _files(path, folder, public)
    if Path(_REFERENCE) not in files:
        raise TaskFileError(f"{path} lists no {_REFERENCE}, which has generate_input and check_implementation")
    return FolderProblem(folder, files, FolderTask.of(folder.name, public))


def _files(path: Path, folder: Path, public: PublicTask) -> dict[Path, bytes]:
    """The listed files, without the submission and the public evaluator's script, which the harness does not run."""
    found: dict[Path, bytes] = {}
    for file in public.files:
        name = Path(file.name)
        if file.source == SUBMISSION_MARK or file.name == public.config.main:
            continue
        if name.is_absolute() or ".." in name.parts:
            raise TaskFileError(f"{path}: files has the name {file.name!r}; expected one inside the folder")
        source = folder / file.source
        if source.is_file():
            found[name] = source.read_bytes()
        elif file.name not in PROVIDED:
            raise TaskFileError(f"{path}: files names {file.source}, which does not exist at {source}")
    if sum(map(len, found.values())) > _MOST_BYTES:
        raise TaskFileError(f"{path}: its files have more than {_MOST_BYTES >> 20} MiB together")
    return found
