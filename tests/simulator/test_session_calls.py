"""Calls of ``vprintf`` and ``__assertfail`` from PTX: what is printed, what is returned, and what stops."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim import OutOfBounds, Trap, UnsupportedInstruction

CALL = """
{{
  .param .b64 text; .param .b64 arguments; .param .b32 result;
  st.param.b64 [text], %p0;
  st.param.b64 [arguments], %p1;
  call.uni (result), vprintf, (text, arguments);
  ld.param.b32 %r9, [result];
}}
"""
STORE = "mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; add.u64 %rd2, %p2, %rd1; st.global.b32 [%rd2], %r9;"


def printed(text: str, arguments: bytes, capsys, lanes: int = 1) -> tuple[str, list[int]]:
    """What a warp with ``lanes`` active lanes prints, and the result of each lane."""
    out = np.full(32, 99, np.uint32)
    guard = f"mov.u32 %r2, %tid.x; setp.ge.u32 %q1, %r2, {lanes}; @%q1 bra DONE;"
    code = f"mov.u32 %r9, 99; {guard} {CALL.format()} {STORE} DONE:"
    tensors = [np.frombuffer(text.encode() + b"\0", np.uint8).copy(), np.frombuffer(arguments, np.uint8).copy(), out]
    launch_kernel(module(code, 3), tensors)
    return capsys.readouterr().out, out[:lanes].tolist()


@pytest.mark.parametrize(
    ("text", "arguments", "want"),
    [
        ("plain\n", b"\0", "plain\n"),
        ("%d|%i|%u", struct.pack("<iiI", -3, 4, 2**32 - 1), f"-3|4|{2**32 - 1}"),
        ("%5d|%-5d|%05d|%+d", struct.pack("<4i", 7, 7, 7, 7), "    7|7    |00007|+7"),
        ("%x %X %o %#x %c", struct.pack("<5i", 255, 255, 8, 255, 65), "ff FF 10 0xff A"),
        ("%lld %llu %ld", struct.pack("<qQq", -(2**40), 2**63, 5), f"{-(2**40)} {2**63} 5"),
        # a double starts at a multiple of 8
        ("%d %f %d %.2e %g", struct.pack("<i4xdi4xdd", 1, 0.5, 2, 12345.678, 0.1), "1 0.500000 2 1.23e+04 0.1"),
        ("%*d|%.*f", struct.pack("<iii4xd", 4, 1, 3, 2.0), "   1|2.000"),
        ("100%% %p", struct.pack("<Q", 4096), "100% 0x1000"),
        ("%hhd %f %f", struct.pack("<i4xdd", 3, float("inf"), float("nan")), "3 inf nan"),
    ],
)
def test_formats(text: str, arguments: bytes, want: str, capsys) -> None:
    got, counts = printed(text, arguments, capsys)
    assert got == want
    assert counts == [text.replace("%%", "").count("%") + text.count("*")]


def test_active_lanes_print_in_order_with_their_own_arguments(capsys) -> None:
    code = (
        "mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 7; setp.ne.u32 %q1, %r2, 0; @%q1 bra DONE;"
        "add.s32 %r3, %r1, 100; st.local.b32 [buffer], %r3; mov.b64 %rd1, buffer; cvta.local.u64 %p1, %rd1;"
        f"{CALL.format()} DONE:"
    )
    text = np.frombuffer(b"lane %d;\0", np.uint8).copy()
    launch_kernel(module(code, 2, ".local .align 8 .b8 buffer[8];"), [text, np.zeros(1, np.uint8)])
    assert capsys.readouterr().out == "lane 100;lane 108;lane 116;lane 124;"


def test_strings_are_read_where_they_lie(capsys) -> None:
    word = np.frombuffer(b"word\0", np.uint8).copy()
    code = (
        "st.local.b64 [buffer], %p1; mov.b64 %rd1, buffer; cvta.local.u64 %p1, %rd1;"
        f"mov.u32 %r2, %tid.x; setp.ne.u32 %q1, %r2, 0; @%q1 bra DONE; {CALL.format()} DONE:"
    )
    text = np.frombuffer(b"<%6s>\0", np.uint8).copy()
    launch_kernel(module(code, 2, ".local .align 8 .b8 buffer[8];"), [text, word])
    assert capsys.readouterr().out == "<  word>"


def test_arguments_outside_memory_are_a_hazard(capsys) -> None:
    with pytest.raises(OutOfBounds, match="reads 4 bytes"):
        printed("%d %d", struct.pack("<i", 1), capsys)


def test_a_failed_assertion_names_itself() -> None:
    code = """
    mov.u32 %r2, %tid.x; setp.ne.u32 %q1, %r2, 5; @%q1 bra DONE;
    {
      .param .b64 message; .param .b64 file; .param .b32 line; .param .b64 function; .param .b64 size;
      st.param.b64 [message], %p0; st.param.b64 [file], %p1; st.param.b32 [line], 12;
      st.param.b64 [function], %p2; st.param.b64 [size], 1;
      call.uni __assertfail, (message, file, line, function, size);
    }
    DONE:
    """
    texts = [np.frombuffer(t + b"\0", np.uint8).copy() for t in (b"x > 0", b"a.py", b"kernel")]
    with pytest.raises(Trap, match=r"device assertion `x > 0` failed at a.py:12, kernel; .*thread \(5, 0, 0\)"):
        launch_kernel(module(code, 3), texts)


def test_other_functions_are_refused() -> None:
    code = "{ .param .b64 a; st.param.b64 [a], %rd1; call.uni free, (a); }"
    with pytest.raises(UnsupportedInstruction, match=r"calls of device functions other than .* `call\.uni free"):
        launch_kernel(module(code, 0), [])
