"""The launches that ``ours_b200.py`` times: ``cute-nvfp4 sim --time b200_launches.py gemv n=4096 k=4096``.

Each function makes operands (any values: times do not depend on them) and launches once. ``example FILE ARGS…`` runs an
example of CUTLASS without the kernels that convert its operands to FP4: they take minutes and change no time.
"""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
import types
from pathlib import Path

import torch

from cute_nvfp4 import BlockScaledTensor
from cute_nvfp4.formats import FORMATS
from cute_nvfp4.harness.evaluation import Options, task_of
from cute_nvfp4.harness.problem import get_problem
from cute_nvfp4.scale_layout import to_blocked


def operand(rows: int, k: int, kind: str = "nvfp4") -> BlockScaledTensor:
    fmt = FORMATS[kind]
    data = torch.randint(0, 256, (rows, k // fmt.elements_per_byte), dtype=torch.uint8).cuda()
    scale = torch.full((rows, k // fmt.block), 0x38 if kind == "nvfp4" else 127, dtype=torch.uint8)
    return BlockScaledTensor(data, to_blocked(scale).cuda(), format=fmt)


def gemv(n: int, k: int) -> None:
    from cute_nvfp4 import gemv

    gemv(operand(n, k), operand(1, k))


def gemm(m: int, n: int, k: int, kind: str = "nvfp4", out: str = "float16") -> None:
    from cute_nvfp4 import gemm

    gemm(operand(m, k, kind), operand(n, k, kind), out_dtype=getattr(torch, out))


def packed(m: int, n: int, k: int) -> None:
    """Launches the product of bfloat16 rows and a prepared NVFP4 weight."""
    from cute_nvfp4 import gemm, prepare_weight

    weight = prepare_weight(operand(n, k), backend="reference")  # launches nothing
    gemm(torch.randn(m, k).bfloat16().cuda(), weight)


def contest(problem: str, case: int) -> None:
    """Launches benchmark shape number ``case`` of a problem, with the submission that lies beside the problem's
    task."""
    known = get_problem(problem)
    shape = task_of(Options(problem=problem)).benchmarks[case]
    drawn = known.generate(shape, shape["seed"], "public")
    kinds = {b.name: torch.empty(b.shape, dtype=getattr(torch, b.dtype)) for b in known.buffers(shape) if b.output}
    task = sys.modules["task"] = types.ModuleType("task")
    task.input_t = task.output_t = tuple
    spec = importlib.util.spec_from_file_location("submission", known.folder / "submission.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    module.custom_kernel(known.views({name: tensor.cuda() for name, tensor in (drawn | kinds).items()}))


def example(file: str, arguments: list[str]) -> None:
    import cutlass.torch

    cutlass.torch.convert_cute_tensor = lambda source, tensor, *given, **more: tensor
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    runpy.run_path(file, run_name="__main__")


def main(name: str, *given: str) -> None:
    if name == "example":
        return example(given[0], list(given[1:]))
    words = dict(word.split("=", 1) for word in given)
    values = {key: value if value.isidentifier() else ast.literal_eval(value) for key, value in words.items()}
    {"gemv": gemv, "gemm": gemm, "packed": packed, "contest": contest}[name](**values)


if __name__ == "__main__":
    main(*sys.argv[1:])
