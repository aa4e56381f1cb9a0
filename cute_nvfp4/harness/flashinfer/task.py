"""Reads a definition with its workloads as a folder's problem, and a solution as a submission."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import HarnessError, SubmissionError, TaskFileError
from ..folder.task import FolderProblem, FolderTask, PublicTask
from ..submission import Submission
from .records import Definition, Solution, Workload
from .sizes import DTYPES

LANGUAGES = ("python", "cute", "cutedsl", "cute_dsl", "pytorch")
OTHER_LANGUAGES = {
    "triton": "the simulated GPU has no driver for Triton",
    "cuda": "nvcc makes machine code and host code that calls the driver, and the simulator runs PTX",
    "cpp": "nvcc makes machine code and host code that calls the driver, and the simulator runs PTX",
    "tilelang": "TileLang compiles with a CUDA toolkit and calls the driver",
}
_SHIM = "cute_nvfp4_submission.py"
_AS_READ = Path("workloads_as_read.json")
_DEFAULT_SIZE = 16
_Record = TypeVar("_Record", bound=BaseModel)


def read_definition(path: Path, workloads: Path | None) -> FolderProblem:
    """The problem of a definition's JSON file. workloads: a file with one on each line, as a workload or in a trace.

    Raises:
        TaskFileError: a file is missing or invalid, or the definition needs workloads and none are given.
    """
    definition = _read(path, Definition)
    for name, tensor in [*definition.inputs.items(), *definition.outputs.items()]:
        unknown = [axis for axis in tensor.shape or () if axis not in definition.axes]
        if unknown or tensor.dtype not in DTYPES:
            what = f"axes {', '.join(unknown)}" if unknown else f"dtype {tensor.dtype}"
            raise TaskFileError(f"{path}: {name} has {what}, which is unknown; dtypes are {', '.join(DTYPES)}")
    found = [_default(definition, path)] if workloads is None else _workloads(workloads, definition)
    files = {
        Path("definition.json"): definition.model_dump_json().encode(),
        Path("definition_reference.py"): definition.reference.encode(),
        Path("reference.py"): b"from cute_nvfp4.harness.flashinfer.exam import check_implementation, generate_input\n",
    }
    files[_AS_READ] = json.dumps([w.model_dump(exclude_unset=True) for w in found]).encode()
    if workloads is not None:
        files |= _tensors(found, workloads)
    files[Path("workloads.json")] = json.dumps([w.model_dump() for w in found]).encode()
    cases: list[dict[str, Any]] = [{**w.axes, "workload": w.uuid, "seed": index} for index, w in enumerate(found)]
    public = PublicTask(files=[{"name": "-", "source": "-"}], tests=cases, ranking_by="geom")
    return FolderProblem(path.resolve().parent, files, FolderTask.of(definition.name, public))


def read_solution(path: Path, definition: str) -> Submission:
    """The submission that calls a solution's entry point.

    Raises:
        HarnessError: the solution is for another definition, or in a language that the harness does not run.
        SubmissionError: its entry point is not a Python function, or its JSON is not a solution.
    """
    try:
        solution = _read(path, Solution)
    except TaskFileError as error:
        raise SubmissionError(str(error)) from error
    if solution.definition != definition:
        raise HarnessError(f"{path} is a solution for {solution.definition!r}, not {definition!r}")
    spec = solution.spec
    if spec.language.lower() not in LANGUAGES:
        why = OTHER_LANGUAGES.get(spec.language.lower(), "that is no language that the harness knows")
        raise HarnessError(
            f"{path} is written in {spec.language}: {why}. Write it in Python with the CuTe DSL (language: python), or "
            "run it with flashinfer-bench on a machine with a GPU."
        )
    file, _, function = spec.entry_point.partition("::")
    sources = {source.path: source.content for source in solution.sources}
    if file not in sources or not function.isidentifier():
        raise SubmissionError(f"{path}: entry_point is {spec.entry_point!r}, expected FILE.py::FUNCTION of its sources")
    for name, content in sources.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise SubmissionError(f"{path}: a source has the path {name!r}, expected one inside a folder")
        if name.endswith(".py"):
            try:
                ast.parse(content, filename=name)
            except SyntaxError as error:
                raise SubmissionError(f"{path}: syntax error in {name}, line {error.lineno}: {error.msg}") from error
    shim = (
        "import json\n\nfrom cute_nvfp4.harness.flashinfer.call import submission\n\n"
        'outputs = list(json.load(open("definition.json"))["outputs"])\n'
        f"custom_kernel = submission({file!r}, {function!r}, {spec.destination_passing_style}, outputs)\n"
    )
    files = {Path(name): content.encode() for name, content in sources.items()} | {Path(_SHIM): shim.encode()}
    return Submission(path.with_name(_SHIM), shim, files)


def read_workloads(problem: FolderProblem) -> list[dict[str, Any]]:
    """The workloads of a problem of ``read_definition``, as they were read, in the order of its cases."""
    return json.loads(problem.files[_AS_READ])


def solution_name(path: Path) -> str:
    """The name of a solution; its file's name if the solution has no readable name."""
    try:
        return str(json.loads(path.read_text())["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return path.stem


def _read(path: Path, record: type[_Record]) -> _Record:
    try:
        return record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise TaskFileError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        faults = "\n".join(f"  {'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:8])
        raise TaskFileError(f"{path} is no {record.__name__} of FlashInfer-Bench:\n{faults}") from error


def _default(definition: Definition, path: Path) -> Workload:
    """A small workload with random inputs."""
    free = [name for name, axis in definition.axes.items() if axis.type != "const"]
    scalars = [name for name, tensor in definition.inputs.items() if tensor.shape is None]
    if definition.constraints or scalars:
        raise TaskFileError(
            f"{path} has constraints or scalars, which random inputs do not keep: give --workloads FILE"
        )
    inputs = {name: {"type": "random"} for name in definition.inputs}
    return Workload(uuid="random", axes=dict.fromkeys(free, _DEFAULT_SIZE), inputs=inputs)


def _workloads(path: Path, definition: Definition) -> list[Workload]:
    try:
        text = path.read_text()
    except OSError as error:
        raise TaskFileError(f"{path} cannot be read: {error.strerror}") from error
    found = []
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        where = f"{path}, workload {number}"
        try:
            content = json.loads(line)
            content = content.get("workload", content)
            workload = Workload.model_validate(content)
        except (ValueError, AttributeError) as error:
            raise TaskFileError(f"{where} is not valid: {error}") from error
        free = {name for name, axis in definition.axes.items() if axis.type != "const"}
        if set(workload.axes) != free or set(workload.inputs) != set(definition.inputs):
            raise TaskFileError(f"{where}: expected axes {sorted(free)} and inputs {list(definition.inputs)}")
        found.append(workload)
    if not found or len({w.uuid for w in found}) < len(found):
        raise TaskFileError(f"{path}: expected workloads, one a line, each with a uuid of its own")
    return found


def _tensors(workloads: list[Workload], beside: Path) -> dict[Path, bytes]:
    """The files of tensors that the workloads name, and renames them in the workloads. A path starts at the root of the
    trace set, which is some folder above the file of workloads."""
    names: dict[str, str] = {}
    files: dict[Path, bytes] = {}
    for source in (source for w in workloads for source in w.inputs.values() if source.type == "safetensors"):
        if source.path not in names:
            places = [folder / str(source.path) for folder in beside.resolve().parents]
            place = next((place for place in places if place.is_file()), None)
            if place is None:
                raise TaskFileError(f"{beside} names {source.path}, which is not below any folder above it")
            names[source.path] = f"tensors{len(names)}.safetensors"
            files[Path(names[source.path])] = place.read_bytes()
        source.path = names[source.path]
    return files
