"""A problem folder as it is read: its ``task.yml``, and the files that it lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import HarnessError, TaskFileError
from ..problem import Buffer
from ..schema import Case, Task, Tolerances, read_yaml

SUBMISSION_MARK = "@SUBMISSION@"
"""Stands in ``files`` for the source of the submission."""
PROVIDED = ("task.py", "utils.py")
"""Files that may be missing: the harness has what the public evaluator provides under these names."""
MOST_DATA = 32 << 30
"""Bytes of a case's data at the most."""
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
    """What is used of a public ``task.yml``; other keys are left alone."""

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
    """A task whose cases are keyword arguments of ``generate_input``: any YAML, and usually a ``seed``."""

    tests: list[dict[str, Any]] = Field(min_length=1)
    benchmarks: list[dict[str, Any]] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> FolderTask:
        return self

    @classmethod
    def of(cls, name: str, public: PublicTask) -> FolderTask:
        """The task called ``name``; its cases without ``benchmarks`` are the tests. Tolerances are the folder's own."""
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
    """A problem that a folder defines: its ``files`` by name, its ``task``. It draws and judges in a process of its own
    (``examination``), so this holds no tensors."""

    def __init__(self, folder: Path, files: dict[Path, bytes], task: FolderTask) -> None:
        self.folder, self.files, self.task, self.name = folder, files, task, task.name

    def validate(self, case: Case) -> None:
        """Every case is ``generate_input``'s to accept."""

    def useful_bytes(self, case: Case) -> int:
        """0: what an implementation must move is not known."""
        return 0

    def buffers(self, case: Case) -> list[Buffer]:
        """Room for a case: what is drawn says which tensors there are. Memory is taken when it is written."""
        return [Buffer("data", (MOST_DATA,), "uint8")]

    def output_shapes(self, case: Case) -> list[tuple[tuple[int, ...], str]]:
        """None: what is returned says it."""
        return []

    def flops(self, case: Case) -> int:
        """No count, but a guess that grows with a case, for limits and the order of cases: the product of its sizes."""
        product = 1
        for name, value in case.items():
            for entry in value if isinstance(value, list) else [value]:
                if name != "seed" and isinstance(entry, int) and not isinstance(entry, bool):
                    product *= max(1, abs(entry))
        return product


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a task file in the public format, which lists ``files``; ours has none."""
    content = read_yaml(path)
    return isinstance(content, dict) and "files" in content


def read_folder(path: Path) -> FolderProblem:
    """The problem of the folder that the task file ``path`` lies in.

    Raises:
        TaskFileError: the file, or one that it lists, is missing or not what it should be.
        HarnessError: it is for CUDA C++ or for several GPUs.
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
    """The files that are listed, without the submission and the public evaluator's script, which is not run."""
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
