"""PTX that cannot be read says where and why; vectors of registers; no text and no launch ends in an internal error."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from ptx_lab import launch_kernel, module

from cute_nvfp4.errors import CuteNvfp4Error
from cute_nvfp4.sim import GlobalMemory, Launch, LaunchError, Program, PtxSyntaxError, UnsupportedInstruction, run

LINE = '.file 1 "/src/kernel.py"\n.version 8.8\n.target sm_100a\n.address_size 64\n'


@pytest.mark.parametrize(
    ("statement", "got", "expected"),
    [
        ("add.s32 %r1, %nowhere, 1;", "the undeclared %nowhere", "one that a .reg of this scope declares"),
        ("mov.b32 %r1, 5\n mov.b32 %r0, 6;", "the operand `5 mov.b32 %r0`|the constant", "a register|an integer"),
        ("mov.b32 %r1, %r0 mov.b32 %r0, 6;", "`%r0 mov.b32 %r0`", "`,` or `;` after %r0"),
        ("ld.global.b32 %r1, [%rd0;", r"`\[%rd0`", r"`\]` at its end"),
        ("ld.global.b32 %r1, [];", r"the address `\[\]`", "register or name or constant"),
        ("ld.global.b32 %r1, [{%r0}];", r"the address `\[{%r0}\]`", "register or name or constant"),
        ("mov.b32 %r1, 0x12Q;", "the constant `0x12Q`", "an integer"),
        ("mov.f32 %r1, 0f3f80;", "the constant `0f3f80`", "0f and 0d with 8 and 16 digits"),
        ("@%q9 bra END;", "the undeclared predicate %q9", ".reg .pred"),
        ("mov.b32 %r1, !5;", "`!5`", "a predicate register after `!`"),
        (".reg .b33 %x;", "type .b33", "one of .pred .b8"),
        (".reg .b32 %x<9999999999>;", "`%x<9999999999>`", "at most 1048576"),
        (".shared .align 12 .b8 s[4];", ".align 12", "a power of two"),
        (".shared .b32 s(4);", "a declaration of another form", "{.align n}"),
        ("mov.b32 %r1, 0x1ffffffffffffffff;", "the constant", "at most 64 bits"),
        ("?!;", "a statement of another form", "opcode"),
    ],
)
def test_unreadable_statements(statement: str, got: str, expected: str) -> None:
    """The line of the PTX, that of the source, the text, what was expected."""
    head = ".visible .entry kernel()\n{\n.reg .b32 %r<4>; .reg .b64 %rd<4>;\n.loc 1 42 7\n"
    text = f"{LINE}{head}{statement}\nEND: ret;\n}}"
    with pytest.raises(PtxSyntaxError) as error:
        Program.parse(text)
    words = str(error.value)
    assert re.search(got, words) and re.search(expected, words), words
    assert words.startswith("PTX line 9 of kernel, /src/kernel.py:42: `"), words
    assert statement.split()[0].rstrip(";") in words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (".visible .entry kernel(.param .u65 p)\n{ ret; }", "PTX line 5: `.visible .entry kernel.*got type .u65"),
        (".visible .entry (kernel)\n{ ret; }", "PTX line 5: .*expected .entry name"),
        (".global .b32 g = {1, 2, 3};", "PTX line 5: .*got 3 values, expected at most 1"),
        (".visible .entry kernel()\n{ ret;\n", "got the end of the module, expected `}`"),
        ("ret; }", "PTX line 5: .*got a `}` that closes nothing|cannot|another form"),
        (".loc x y", "PTX line 5: `.loc x y`: got `x y`, expected numbers"),
    ],
)
def test_unreadable_modules(text: str, words: str) -> None:
    with pytest.raises(PtxSyntaxError, match=words):
        Program.parse(LINE + text)


def test_vectors_of_registers() -> None:
    """A .v4 or .v2 variable is a vector operand; .x .y .z .w, or .r .g .b .a, are its parts."""
    out, data = np.zeros(5, "u4"), np.array([10, 20, 30, 40], "u4")
    body = """ld.global.v4.b32 v, [%p0]; add.s32 v.w, v.x, v.b; mov.b32 w1.y, v.a; mov.b32 w1.r, v.g;
    st.global.v2.b32 [%p1], w1; st.global.v2.b32 [%p1+8], {v.y, v.z}; { .reg .v2 .b32 v; mov.b32 v.x, 7;
    st.global.b32 [%p1+16], v.x; }"""
    text = module(body, 2, ".reg .v4 .b32 v; .reg .v2 .b32 w<2>;")
    launch_kernel(text, [data, out], block=(1, 1, 1))
    assert out.tolist() == [20, 40, 20, 30, 7]
    with pytest.raises(PtxSyntaxError, match=r"`w1\.z`"):
        launch_kernel(module("mov.b32 w1.z, 1;", 0, ".reg .v2 .b32 w<2>;"), [])
    with pytest.raises(UnsupportedInstruction, match="a vector of 4 elements is wanted, not 2"):
        launch_kernel(module("ld.global.v4.b32 w1, [%p0];", 1, ".reg .v2 .b32 w<2>;"), [data])


@pytest.mark.parametrize("space", ["shared", "local", "global"])
def test_a_variable_of_an_inner_scope_hides_one_of_the_same_name(space: str) -> None:
    out = np.zeros(6, "u4")
    declare = f".{space} .align 16 .b8 v"
    body = f"""st.{space}.b32 [v+4], 1; mov.b64 %rd1, v+4;
    {{ {declare}[64]; st.{space}.b32 [v+4], 2; mov.b64 %rd2, v+4; ld.{space}.b32 %r2, [v+4]; }}
    {{ {declare}[32]; st.{space}.b32 [v+4], 3; ld.{space}.b32 %r3, [v+4]; }}
    ld.{space}.b32 %r1, [v+4]; sub.u64 %rd2, %rd2, %rd1;
    st.global.v4.b32 [%p0], {{%r1, %r2, %r3, 0}}; st.global.u64 [%p0+16], %rd2;"""
    text = module(body, 1, f"{declare}[16];")
    launch_kernel(text, [out], block=(1, 1, 1), checks=True)
    assert out[:3].tolist() == [1, 2, 3]
    assert space == "global" or out[4] == 16


@pytest.mark.parametrize(
    "code",
    [
        *("ld.global.b32 %r1;", "st.global.b32;", "mbarrier.arrive.shared.b64;", "cp.async.ca.shared.global [%p0];"),
        *("bar.sync;", "bar.red.and.pred [%p0], 0, %q1;", "shfl.sync.idx.b32;", "mov.b32 %r1;", "bra;", "mma.sync;"),
        *("st.global.b8 [%p0], %w;", "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32;", "prefetch.tensormap;"),
    ],
)
def test_operands_that_are_missing_or_of_another_kind(code: str) -> None:
    with pytest.raises(UnsupportedInstruction) as error:
        launch_kernel(module(code, 1, ".reg .b128 %w;"), [np.zeros(4, "u4")])
    assert code.rstrip(";") in str(error.value) and "PTX line" in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"grid": (0, 1, 1)}, r"the grid of kernel: got \(0, 1, 1\)"),
        ({"grid": (1, 70000, 1)}, "from 1 to 2147483647, 65535, 65535"),
        ({"grid": (1 << 31, 1, 1)}, "the grid of kernel"),
        ({"grid": (1, 1)}, "the grid of kernel"),
        ({"block": (0, 1, 1)}, "the block of kernel"),
        ({"block": (64, 32, 1)}, "threads of a CTA of kernel: got 2048, expected at most 1024"),
        ({"cluster": (0, 1, 1)}, "the cluster of kernel"),
        ({"dynamic_smem": -1}, "shared memory of kernel: got -1"),
        ({"params": (bytes(4),)}, r"takes parameters of \[8\] bytes, the launch gives \[4\]"),
    ],
)
def test_launches_that_no_gpu_takes(given: dict, words: str) -> None:
    fits = {"kernel": "kernel", "grid": (1, 1, 1), "block": (32, 1, 1), "params": (bytes(8),)}
    with pytest.raises(LaunchError, match=words):
        run(Program.parse(module("ret;", 1)), Launch(**{**fits, **given}), GlobalMemory())


def test_a_huge_grid_takes_no_memory() -> None:
    from cute_nvfp4.sim import Trap

    launch = Launch("kernel", ((1 << 31) - 1, 1, 1), (32, 1, 1), ())
    with pytest.raises(Trap):
        run(Program.parse(module("trap;", 0)), launch, GlobalMemory())


def test_a_variable_that_this_machine_cannot_hold() -> None:
    text = f"{LINE}.global .align 4 .b8 g[99999999999999];\n.visible .entry kernel()\n{{ ret; }}"
    with pytest.raises(LaunchError, match="variable g: got 99999999999999 bytes"):
        run(Program.parse(text), Launch("kernel", (1, 1, 1), (32, 1, 1), ()), GlobalMemory())


BODY = """mov.u32 %r1, %tid.x; { .reg .b32 t; L: mov.b32 {%h1, %h2}, %r1; @%q1 bra L; } add.s32 %r2, %r1, 0x10;
mov.f32 v.x, 0f3f800000; X: .branchtargets A, B; A: B: ld.global.v2.b32 w, [%p0+4]; st.shared.b32 [sm+4], %r3;
bar.sync 0, 32; setp.lt.and.u32 %q1, %r1, 5, %q3; shfl.sync.idx.b32 %r3|%q1, %r1, 0, 31, -1; ld.param.b64 %rd1, [p0];
mbarrier.init.shared.b64 [sm], 1; cp.async.ca.shared.global [%r1], [%p0], 16; atom.global.add.u32 %r1, [%p0], 1;"""
PIECES = (
    *("{", "}", ";", ",", "[", "]", "(", ")", "@", "!", "%r1", ".b32", ".reg", ".entry", "0x", "-", "+", "|", "<5>"),
    *(":", "_", "/*", "//", "\n", "bra", ".align", ".param", "1e400", "9" * 20, "=", ".v4", ".loc 1 2\n", "0f1"),
)


def test_damaged_text_is_refused_in_words() -> None:
    """Whatever is cut out of a module or put into it: it can be read, or the error is one of ours."""
    whole = module(BODY, 1, ".shared .align 8 .b8 sm[128]; .reg .v4 .f32 v; .reg .v2 .b32 w;")
    Program.parse(whole).kernel("kernel")
    kernels = refused = 0
    for seed in range(400):
        r = random.Random(seed)
        text = whole
        for _ in range(r.choice((1, 1, 2))):
            at = r.randrange(len(text))
            end = min(len(text), at + r.choice((0, 1, 2, 5, 20)))
            text = text[:at] + r.choice(("", *PIECES, text[at:end] * 2)) + text[end:]
        try:
            program = Program(*_read(text))
            for name in program.kernels:
                program.kernel(name)
                kernels += 1
        except CuteNvfp4Error as error:
            refused += 1
            assert re.search(r"PTX line \d+", str(error)), str(error)
    assert kernels > 9 and refused > 200


def _read(text: str) -> tuple:
    from cute_nvfp4.sim.frontend.parse import parse_module

    return parse_module(text), text
