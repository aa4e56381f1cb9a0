"""What inspection reads out of SASS and PTX."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cute_nvfp4.cli.main import app
from cute_nvfp4.errors import CompileError
from cute_nvfp4.ops.probe import compile_probe
from cute_nvfp4.runtime import inspection
from cute_nvfp4.runtime.inspection import Access, inspect_cubin
from cute_nvfp4.sim.host.cubin import register_counts

SASS = """
\t.section\t.text.one,"ax",@progbits
.text.one:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 LDG.E.ENL2.256.NA.EFL2 R8, R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/                   F2FP.F16.E2M1.UNPACK_B R7, R8 ;
        /*0040*/                   HADD2.F32 R9, -RZ, R7.H0_H0 ;
        /*0050*/                   HFMA2 R9, -RZ, RZ, 2, 0 ;
        /*0060*/                   HFMA2 R9, R7, R8, R9 ;
        /*0070*/             @UP0  UIADD3 UR4, UR4, 0x1, URZ ;
        /*0080*/                   STL.64 [R1], R2 ;
        /*0090*/                   LDL.64 R2, [R1] ;
        /*00a0*/                   STG.E.U16 desc[UR4][R4.64], R7 ;
        /*00b0*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR4][R4.64] ;
        /*00b0*/                   WHATISTHIS R1 ;
.L_x_1:
        /*00c0*/              @P1  BRA `(.L_x_0) ;
        /*00d0*/                   EXIT ;
.L_x_0:
        /*00e0*/                   BRA `(.L_x_0);
        /*00f0*/                   NOP;
"""
PTX = """
.visible .entry one(
	.param .u64 p
)
{
	ld.param.b64 	%rd1, [p];
	{ .reg .b64 p; mov.b64 p, 1; ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%r1,%r2,%r3,%r4}, [%rd1], p; }
	@%p1 ld.global.L1::no_allocate.L2::evict_first.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1];
	ld.global.L1::no_allocate.L2::evict_first.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1];
	cp.async.cg.shared.global.L2::cache_hint [%r1], [%rd1], 16, %rd2;
	cp.async.commit_group;
	ld.shared.v2.b32 	{%r1, %r2}, [%r9];
	st.global.b16 	[%rd2], %rs1;
}
"""
RESOURCES = """
Resource usage:
 Common:
  GLOBAL:0
 Function one:
  REG:40 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:916 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.fixture
def report(monkeypatch):
    texts = {"nvdisasm": SASS, "cuobjdump": RESOURCES}
    monkeypatch.setattr(inspection, "_run_tool", lambda name, cubin, *options: texts[name])
    return inspect_cubin(b"", PTX).kernel


def test_resources(report):
    found = (report.registers, report.stack_bytes, report.shared_bytes, report.local_bytes)
    assert found == (40, 16, 1024, 8)
    assert (report.spill_loads, report.spill_stores) == (1, 1)


def test_instruction_mix(report):
    """The branch to itself and the NOP after the end are padding; the conditional branch to it is code."""
    assert report.instructions == 15
    assert report.mix == {
        "global memory": 4, "conversion": 2, "local memory": 2, "control": 2,
        "constant memory": 1, "move": 1, "half": 1, "integer": 1, "other": 1,
    }  # fmt: skip
    assert report.count("F2FP") == 1 and report.count("HFMA2") == 2 and report.count("LDG.E") == 2
    assert report.count("LDG.E.12") == 0  # whole names only


def test_accesses(report):
    assert report.sass_accesses == (
        Access("copy", "global", 128, "BYPASS", 1),
        Access("load", "global", 256, "NA.EFL2", 1),
        Access("load", "global", 128, "CONSTANT", 1),
        Access("load", "local", 64, "", 1),
        Access("store", "global", 16, "", 1),
        Access("store", "local", 64, "", 1),
    )
    assert report.ptx_accesses == (
        Access("copy", "global", 128, "cg.L2::cache_hint", 1),
        Access("load", "global", 256, "L1::no_allocate.L2::evict_first", 2),
        Access("load", "global", 128, "L1::no_allocate.L2::cache_hint", 1),
        Access("load", "shared", 64, "", 1),
        Access("store", "global", 16, "", 1),
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_real_kernel(arch):
    kernel = compile_probe(arch)
    report = inspect_cubin(kernel.cubin, kernel.ptx)
    found = report.kernel
    assert found.ptx_accesses == found.sass_accesses == (
        Access("load", "global", 32, "", 1), Access("store", "global", 32, "", 1),
    )  # fmt: skip
    assert found.count("FFMA") == 1 and found.mix["float"] == 1  # y = 2 x + 1
    assert "other" not in found.mix
    assert 0 < found.registers <= 32 and register_counts(kernel.cubin) == {found.name: found.registers}
    assert (found.spill_loads, found.spill_stores, found.stack_bytes, found.local_bytes) == (0, 0, 0, 0)
    assert sum(found.mix.values()) == sum(found.opcodes.values()) == found.instructions
    assert found.name in report.sass
    assert json.loads(json.dumps(report.to_dict()))["kernels"][0]["registers"] == found.registers


def test_what_is_not_a_cubin_is_refused():
    with pytest.raises(CompileError, match="cuobjdump failed with exit code"):
        inspect_cubin(b"not a cubin", PTX)


def test_output_that_is_not_understood_is_refused(monkeypatch):
    texts = {"nvdisasm": SASS.replace(".text.one", ".text.two"), "cuobjdump": RESOURCES}
    monkeypatch.setattr(inspection, "_run_tool", lambda name, cubin, *options: texts[name])
    with pytest.raises(CompileError, match=r"no resource usage for the kernels \['two'\]"):
        inspect_cubin(b"", PTX)


def test_a_missing_tool_says_what_to_install(monkeypatch):
    monkeypatch.setattr(inspection.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(inspection.shutil, "which", lambda name: None)
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvdisasm"):
        inspection.find_tool("nvdisasm")


def test_the_command_shows_tables_or_json(monkeypatch):
    from cute_nvfp4.cli import inspect

    monkeypatch.setattr(inspect, "_compile", lambda arch, *problem: (compile_probe(arch), "a configuration"))
    text = CliRunner().invoke(app, ["inspect", "gemv", "--arch", "sm_90a", "--sass", "--ptx"]).output
    for expected in (
        "registers a thread",
        "spills (loads + stores)",
        "FFMA",
        "a configuration",
        ".target sm_90a",
    ):
        assert expected in text
    assert "instructions by class" in text and "as asked for (PTX)" in text and "/*0000*/" in text
    content = json.loads(CliRunner().invoke(app, ["inspect", "gemv", "--json", "--k", "256"]).stdout)
    assert (content["arch"], content["k"]) == ("sm_100a", 256)
    assert content["kernels"][0]["mix"]["float"] == 1 and "sass" not in content


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["inspect", "gemw"], "unknown kernel 'gemw'; known kernels: gemv, gemm"),
        (["inspect", "gemv", "--scales", "diagonal"], "unknown layout of scales 'diagonal'"),
        (["inspect", "gemv", "--arch", "sm_80"], "got 'sm_80', expected one of sm_90a"),
        (["inspect", "gemv", "--k", "40"], "k=40 l=1 is not a problem"),
        (["inspect", "quantize", "--rule", "least"], "rule for nvfp4: got 'least'"),
        (["inspect", "quantize", "--dtype", "float64"], "unknown dtype 'float64'"),
        (["inspect", "quantize", "--k", "40"], "k=40 l=1 is not a problem"),
    ],
)
def test_what_a_user_can_get_wrong(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


LOOPS = """
.L_x_1:
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0 ;
        /*0010*/              @!P0 BRA `(.L_x_9) ;
.L_x_2:
        /*0020*/                   UTCCP.T.S.4x32dp128bit tmem[UR30+0x100], gdesc[UR48] ;
        /*0030*/                   UTCOMMA.4X gdesc[UR6], gdesc[UR62], tmem[UR25], tmem[UR36], idesc[UR37], UP2 ;
        /*0040*/               @P0 BRA `(.L_x_2) ;
        /*0050*/                   BRA.U UP0, `(.L_x_1) ;
        /*0060*/                   UTMALDG.3D [UR8], [UR6], desc[UR4] ;
.L_x_9:
        /*0070*/                   EXIT ;
"""


def test_the_innermost_loop() -> None:
    """From the label to the branch, both ends of it included; forward branches make none."""
    inner = inspection.innermost_loop(LOOPS, "UTCOMMA")
    assert (inner.instructions, inner.count("UTCOMMA"), inner.count("UTCCP"), inner.count("UTCC")) == (3, 1, 1, 0)
    outer = inspection.innermost_loop(LOOPS, "SYNCS")
    assert outer.instructions == 6 and outer.opcodes["UTCOMMA.4X"] == 1 and outer.count("BRA") == 3
    with pytest.raises(CompileError, match="no loop of the kernel contains UTMALDG"):
        inspection.innermost_loop(LOOPS, "UTMALDG")


def test_inspect_gemm_says_where_everything_lies() -> None:
    sizes = ["--m", "512", "--n", "512", "--k", "7168"]
    content = json.loads(CliRunner().invoke(app, ["inspect", "gemm", "--json", *sizes]).stdout)
    plan = content["plan"]
    assert (content["m"], content["n"], content["k"]) == (512, 512, 7168)
    assert plan["shared_memory"].endswith("bytes") and "columns" in plan["tensor_memory"]
    assert set(plan["pipelines"]) >= {"operands", "accumulators"}
    loop = plan["mma_loop"]
    # four blocks of 64 elements in a step of 256, and an atom of scales of A and of B for each
    assert loop["mmas"] == 4 * loop["steps"] and loop["scale_copies"] >= 8 * loop["steps"]
    text = CliRunner().invoke(app, ["inspect", "gemm", *sizes]).output
    assert "tensor memory: " in text and "pipeline operands (load to mma)" in text


def test_inspect_gemm_on_sm_120a() -> None:
    arguments = ["inspect", "gemm", "--arch", "sm_120a", "--m", "16", "--n", "512", "--k", "1024"]
    plan = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["plan"]
    assert plan["tensor_memory"] == "none" and set(plan["pipelines"]) == {"operands"}
    # a warp has sixteen rows and sixteen columns of four blocks along K
    assert (plan["mma_loop"]["steps"], plan["mma_loop"]["mmas"], plan["mma_loop"]["scale_copies"]) == (1, 8, 8)


@pytest.mark.parametrize("m, edges", [("128", {"operands", "partials"}), ("4", {"operands"})])
def test_inspect_gemm_on_sm_90a(m: str, edges: set[str]) -> None:
    """A prepared weight's kernel, with WGMMA or streaming."""
    arguments = ["inspect", "gemm", "--arch", "sm_90a", "--m", m, "--n", "512", "--k", "1024"]
    plan = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["plan"]
    assert set(plan["pipelines"]) == edges and "= 2, " in plan["pipelines"]["operands"]["full"]
    assert plan["mma_loop"]["mmas"] >= 4 and plan["mma_loop"]["shared_loads"] > 0
    text = CliRunner().invoke(app, arguments).output
    assert "pipeline operands (load to mma)" in text and "loads of weights" in text
    assert CliRunner().invoke(app, [*arguments, "--l", "2"]).exit_code == 2


def test_inspect_shows_the_quantization_kernel() -> None:
    """4/6 compiles to more arithmetic than one candidate, and the configuration says what was asked for."""
    found = {}
    for rule in ("max", "four_six_mse"):
        arguments = ["inspect", "quantize", "--arch", "sm_90a", "--rule", rule, "--scales", "rowmajor", "--json"]
        content = json.loads(CliRunner().invoke(app, arguments).stdout)
        assert "layout=rowmajor" in content["config"] and (content["m"], content["k"]) == (8192, 8192)
        found[rule] = content["kernels"][0]
        assert found[rule]["spill_loads"] == found[rule]["spill_stores"] == 0
    assert found["four_six_mse"]["instructions"] > found["max"]["instructions"]
