"""Exported operations: written in one process, run in another that has no DSL, refused where they do not fit."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import cute_nvfp4 as nv
from cute_nvfp4.errors import OperandError, OperandTypeError

WITHOUT_DSL = """
import sys
from importlib.machinery import PathFinder

# as if the DSL were not installed: nobody finds it, and whoever asks whether it is there (torch does) is told so
installed = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] == "cutlass" else installed(name, *rest)
import torch
import cute_nvfp4 as nv

given, expected = torch.load(sys.argv[2], weights_only=False)
found = nv.load_exported(sys.argv[1])(**given)
pairs = [(found.data, expected.data)] if hasattr(found, "scale") else [(found, expected)]
assert all(torch.equal(x, y) for x, y in pairs)
assert "cutlass" not in sys.modules
"""


def operand(rows: int, k: int = 256) -> nv.BlockScaledTensor:
    return nv.quantize(torch.randn(rows, k), backend="reference")


def exported(path: Path, operation: str) -> tuple[dict, object]:
    """Writes an operation to ``path``: other operands for it, and their result."""
    if operation == "gemv":
        with nv.simulating("sm_90a"):
            nv.export(path, nv.gemv, operand(130), operand(1), alpha=2.0)
            given = {"a": operand(130), "b": operand(1)}
            return given, nv.gemv(*given.values(), alpha=2.0)
    if operation == "gemm":
        with nv.simulating("sm_100a"):
            nv.export(path, nv.gemm, operand(20), operand(72), out_dtype=torch.float32)
            given = {"a": operand(20), "b": operand(72)}
            return given, nv.gemm(*given.values(), out_dtype=torch.float32)
    with nv.simulating("sm_90a"):
        nv.export(path, nv.quantize, torch.randn(16, 256), global_scale=0.01)
        x = torch.randn(16, 256)
        out = nv.quantize(torch.randn(16, 256), global_scale=torch.tensor(0.01))
        return {"x": x, "out": out}, nv.quantize(x, global_scale=0.01)


@pytest.mark.parametrize("operation", ["gemv", "gemm", "quantize"])
def test_runs_without_the_dsl(operation: str, tmp_path: Path) -> None:
    given, expected = exported(tmp_path / "op", operation)
    torch.save((given, expected), tmp_path / "data")
    command = [sys.executable, "-c", WITHOUT_DSL, str(tmp_path / "op"), str(tmp_path / "data")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def of_width(width: str) -> tuple[object, object, list]:
    """A weight, and an x to export with and others for it: W4A16, or MXFP8 times MXFP4 in the call's own order."""
    if width == "MXFP8, MXFP4":
        x = [nv.quantize(torch.randn(40, 256), "mxfp8", backend="reference") for _ in range(2)]
        return nv.quantize(torch.randn(72, 256), "mxfp4", backend="reference"), x[0], x[1:]
    format, rows = width.split(", ")
    x = [torch.randn(int(rows), 256).bfloat16() for _ in range(2)]
    return nv.prepare_weight(nv.quantize(torch.randn(72, 256), format, backend="reference")), x[0], x[1:]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("width", ["nvfp4, 5", "nvfp4, 40", "mxfp4, 40", "MXFP8, MXFP4"])
def test_other_widths(width: str, arch: str, tmp_path: Path) -> None:
    """The streaming kernel, that of many rows, and products of two formats; MXFP8 with MXFP4 on Hopper is packed by
    each call, which is no one launch."""
    weight, x, others = of_width(width)
    with nv.simulating(arch) as runs:
        if (width, arch) == ("MXFP8, MXFP4", "sm_90a"):
            with pytest.raises(OperandError):
                nv.export(tmp_path / "op", nv.gemm, x, weight)
            return
        nv.export(tmp_path / "op", nv.gemm, x, weight, out_dtype=torch.float32)
        run, before = nv.load_exported(tmp_path / "op"), len(runs)
        for other in others:
            assert torch.equal(run(a=other, b=weight), nv.gemm(other, weight, out_dtype=torch.float32))
        assert len(runs) == before + 2
        with pytest.raises(OperandError, match="a: got"):
            run(a=torch.randn(41, 256).bfloat16() if isinstance(x, torch.Tensor) else operand(40), b=weight)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    given, _ = exported(tmp_path / "op", "gemv")
    run = nv.load_exported(tmp_path / "op")
    with pytest.raises(OperandError, match=r"a: got .*rows.*expected .*rows"):
        run(a=operand(131), b=given["b"])
    with pytest.raises(OperandError, match="operands of gemv: got no b, expected a, b, out"):
        run(a=given["a"])
    with pytest.raises(OperandError, match="operands of gemv: got c"):
        run(**given, c=given["a"])
    overlapping = given["a"].data.view(-1)[: 2 * 130].view(torch.float16)
    with pytest.raises(OperandError, match="memory of out"):
        run(**given, out=overlapping)


@pytest.mark.parametrize("scale", [0.01, torch.tensor(0.01), "auto"])
def test_a_new_quantized_result_has_the_scale_that_was_exported(scale, tmp_path: Path) -> None:
    """Once it had what lay in its memory. A tensor's number is not in the file; with "auto" the kernel writes it."""
    with nv.simulating("sm_90a"):
        nv.export(tmp_path / "op", nv.quantize, torch.randn(16, 256), global_scale=scale)
        run, x = nv.load_exported(tmp_path / "op"), torch.randn(16, 256)
        expected = nv.quantize(x, global_scale=scale)
        if isinstance(scale, torch.Tensor):
            with pytest.raises(OperandError, match="out of quantize: got none, expected one with the global scale"):
                run(x=x)
        else:
            found = run(x=x)
            assert torch.equal(found.data, expected.data) and found.global_scale == expected.global_scale
        found = run(x=x, out=nv.quantize(torch.randn(16, 256), global_scale=0.01))
        assert torch.equal(found.data, expected.data) and found.global_scale == expected.global_scale


@pytest.mark.parametrize("name", ["x", "out"])
@pytest.mark.parametrize("kind", [torch.Tensor.to_sparse, torch._neg_view, lambda x: None, lambda x: "x"])
def test_what_is_no_plain_tensor_is_refused(name: str, kind, tmp_path: Path) -> None:
    with nv.simulating("sm_90a"):
        nv.export(tmp_path / "op", nv.quantize, torch.randn(16, 256))
        given = {"x": torch.randn(16, 256), "out": nv.quantize(torch.randn(16, 256))}
        given[name] = kind(torch.randn(16, 256))
        if (name, given[name]) != ("out", None):
            with pytest.raises((OperandError, OperandTypeError), match=f"{name}: got .*expected"):
                nv.load_exported(tmp_path / "op")(**given)


def at(x: torch.Tensor, alignment: int) -> torch.Tensor:
    """A copy whose address is a multiple of ``alignment`` bytes, and of no larger power of two."""
    room = torch.empty(x.numel() * x.element_size() + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + alignment
    return room[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape).copy_(x)


def test_an_out_of_none_may_come_first(tmp_path: Path) -> None:
    given, expected = exported(tmp_path / "op", "gemv")
    with nv.simulating("sm_90a"):
        assert nv.load_exported(tmp_path / "op")(out=None, **given).equal(expected)


def test_less_alignment_than_exported_is_refused(tmp_path: Path) -> None:
    a, b = operand(130), operand(1)
    with nv.simulating("sm_90a"):
        nv.export(tmp_path / "op", nv.gemv, a, b)
        run = nv.load_exported(tmp_path / "op")
        half = nv.BlockScaledTensor(at(a.data, 16), a.scale, a.global_scale)
        with pytest.raises(OperandError, match=r"a: got .*'alignment': 16.*expected .*'alignment': 32"):
            run(a=half, b=b)
        # less is needed, more does no harm
        nv.export(tmp_path / "op", nv.gemv, half, b)
        assert torch.equal(nv.load_exported(tmp_path / "op")(a=a, b=b), nv.gemv(a, b))


def test_parts_of_the_result_are_apart(tmp_path: Path) -> None:
    given, _ = exported(tmp_path / "op", "quantize")
    out = given["out"]
    crossed = nv.BlockScaledTensor(out.data, out.data.view(-1)[: out.scale.numel()], out.global_scale)
    with pytest.raises(OperandError, match="memory of out: got bytes of an input, or of another part"):
        nv.load_exported(tmp_path / "op")(x=given["x"], out=crossed)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(OperandError, match="expected a file that export wrote"):
        nv.load_exported(tmp_path / "missing")
    exported(tmp_path / "op", "gemv")
    with zipfile.ZipFile(tmp_path / "op") as archive:
        plan = json.loads(archive.read("plan.json"))
        rest = {name: archive.read(name) for name in ("kernel.cubin", "kernel.ptx")}
    with zipfile.ZipFile(tmp_path / "new", "w") as archive:
        archive.writestr("plan.json", json.dumps(plan | {"version": 99}))
        for name, data in rest.items():
            archive.writestr(name, data)
    with pytest.raises(OperandError, match=r"got version 99, expected 1\. Export it again"):
        nv.load_exported(tmp_path / "new")


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with nv.simulating("sm_100a"):
        a, b = operand(20), operand(72)
        with pytest.raises(OperandError, match="expected alpha and bias as numbers"):
            nv.export(tmp_path / "op", nv.gemm, a, b, bias=torch.zeros(72))
        with pytest.raises(OperandError, match="operation to prepare"):
            nv.export(tmp_path / "op", nv.dequantize, a)
        with pytest.raises(OperandTypeError, match=r"b1 and b2: got .*, expected a PreparedWeight of both"):
            nv.export(tmp_path / "op", nv.gated_gemm, a, b, b)
        with pytest.raises(OperandError, match="backend of a prepared call: got exact torch"):
            nv.export(tmp_path / "op", nv.gemv, a, operand(1), backend="reference")
