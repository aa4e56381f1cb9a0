"""Rounding: packed and single floating-point arithmetic, conversions, and the approximate functions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .apply import case, values
from .case import Case


def cases() -> Iterator[Case]:
    yield from _halves()
    yield from _singles()
    yield from _conversions()
    yield from _approximations()


def _halves() -> Iterator[Case]:
    for kind in ("f16", "f16x2", "bf16", "bf16x2"):
        forms = [
            "add.rn",
            "sub.rn",
            "mul.rn",
            "min",
            "max",
            "min.NaN",
            "max.NaN",
            "min.xorsign.abs",
            "max.NaN.xorsign.abs",
        ]
        if kind.startswith("f16"):
            forms += ["add.ftz", "sub.rn.ftz", "mul.ftz", "add.sat", "sub.sat", "mul.ftz.sat", "min.ftz", "max.ftz.NaN"]
        for form in forms:
            yield case(f"arithmetic {form}.{kind}", f"{form}.{kind} %x, %a, %b;", [kind] * 2, [kind])
        for form in ("fma.rn", "fma.rn.relu", *(("fma.rn.ftz", "fma.rn.sat") if kind.startswith("f16") else ())):
            yield case(f"arithmetic {form}.{kind}", f"{form}.{kind} %x, %a, %b, %c;", [kind] * 3, [kind])
        for form in ("neg", "abs"):
            yield case(f"arithmetic {form}.{kind}", f"{form}.{kind} %x, %a;", [kind], [kind])
        for relation in ("eq", "lt", "geu", "nan", "num"):
            if kind.endswith("x2"):
                code = f"setp.{relation}.{kind} %q1|%q2, %a, %b; selp.u32 %x, 1, 0, %q1; selp.u32 %r1, 2, 0, %q2;"
                code += " or.b32 %x, %x, %r1;"
            else:
                code = f"setp.{relation}.{kind} %q1, %a, %b; selp.u32 %x, 1, 0, %q1;"
            yield case(f"arithmetic setp.{relation}.{kind}", code, [kind] * 2, ["pred"])


def _singles() -> Iterator[Case]:
    for mode in ("rn", "rz", "rm", "rp"):
        for form, operands in (("add", 2), ("mul", 2), ("fma", 3), ("div", 2), ("sqrt", 1), ("rcp", 1)):
            for flush in ("", ".ftz"):
                if flush and mode in ("rm", "rp"):
                    continue
                code = f"{form}.{mode}{flush}.f32 %x, {', '.join(f'%{r}' for r in 'abc'[:operands])};"
                yield case(f"arithmetic {form}.{mode}{flush}.f32", code, ["f32"] * operands, ["f32"], 384)
        for form, operands in (("add", 2), ("mul", 2), ("fma", 3)):
            code = f"{form}.{mode}.f64 %x, {', '.join(f'%{r}' for r in 'abc'[:operands])};"
            yield case(f"arithmetic {form}.{mode}.f64", code, ["f64"] * operands, ["f64"], 128)
    for form in ("add.sat", "fma.rn.sat", "mul.ftz.sat", "min", "max.NaN", "min.xorsign.abs", "max.ftz"):
        n = 3 if form.startswith("fma") else 2
        code = f"{form}.f32 %x, {', '.join(f'%{r}' for r in 'abc'[:n])};"
        yield case(f"arithmetic {form}.f32", code, ["f32"] * n, ["f32"])


def _conversions() -> Iterator[Case]:
    for form, inputs, output in (
        ("rn.f16x2.f32", 2, "f16x2"),
        ("rz.f16x2.f32", 2, "f16x2"),
        ("rn.relu.f16x2.f32", 2, "f16x2"),
        ("rn.bf16x2.f32", 2, "bf16x2"),
        ("rz.bf16x2.f32", 2, "bf16x2"),
        ("rn.relu.bf16x2.f32", 2, "bf16x2"),
        ("rn.f16.f32", 1, "f16"),
        ("rz.f16.f32", 1, "f16"),
        ("rm.f16.f32", 1, "f16"),
        ("rp.f16.f32", 1, "f16"),
        ("rn.sat.f16.f32", 1, "f16"),
        ("rn.bf16.f32", 1, "bf16"),
        ("rz.bf16.f32", 1, "bf16"),
        ("rna.tf32.f32", 1, "tf32"),
        ("rn.tf32.f32", 1, "tf32"),
        ("rz.tf32.f32", 1, "tf32"),
        ("rn.relu.tf32.f32", 1, "tf32"),
        ("rn.satfinite.e4m3x2.f32", 2, "e4m3x2"),
        ("rn.satfinite.e5m2x2.f32", 2, "e5m2x2"),
        ("rn.satfinite.relu.e4m3x2.f32", 2, "e4m3x2"),
        ("rni.s32.f32", 1, "s32"),
        ("rzi.u32.f32", 1, "u32"),
        ("rmi.ftz.s32.f32", 1, "s32"),
        ("rpi.f32.f32", 1, "f32"),
        ("rzi.s64.f32", 1, "s64"),
        ("rni.sat.u8.f32", 1, "u8"),
        ("sat.f32.f32", 1, "f32"),
        ("f64.f32", 1, "f64"),
    ):
        code = f"cvt.{form} %x, {'%a, %b' if inputs == 2 else '%a'};"
        yield case(f"convert {form}", code, ["f32"] * inputs, [output], 384)
    every = np.arange(1 << 16, dtype=np.uint16)
    for form, kind, output in (
        ("f32.f16", "f16", "f32"),
        ("f32.bf16", "bf16", "f32"),
        ("rn.f16x2.e4m3x2", "e4m3x2", "f16x2"),
        ("rn.f16x2.e5m2x2", "e5m2x2", "f16x2"),
        ("rn.relu.f16x2.e4m3x2", "e4m3x2", "f16x2"),
        ("rn.satfinite.e4m3x2.f16x2", "f16x2", "e4m3x2"),
        ("rn.satfinite.e5m2x2.f16x2", "f16x2", "e5m2x2"),
        ("rni.s32.f16", "f16", "s32"),
        ("rn.f16.s32", "s32", "f16"),
        ("rz.f32.s32", "s32", "f32"),
        ("rp.f32.u64", "u64", "f32"),
        ("rm.f32.f64", "f64", "f32"),
        ("rn.f32.f64", "f64", "f32"),
    ):
        given = [np.concatenate([every[::251], every[:250]])[:384].view(np.uint8)] if kind.startswith("e") else None
        given = given and [np.resize(given[0], 768)]
        yield case(f"convert {form}", f"cvt.{form} %x, %a;", [kind], [output], 384, given=given)


def _approximations() -> Iterator[Case]:
    """Functions that the ISA gives a maximum error, not a result."""
    for form, kind in (
        ("ex2.approx", "f32"),
        ("ex2.approx.ftz", "f32"),
        ("lg2.approx", "f32"),
        ("sin.approx", "f32"),
        ("cos.approx", "f32"),
        ("rsqrt.approx", "f32"),
        ("rsqrt.approx.ftz", "f32"),
        ("sqrt.approx", "f32"),
        ("rcp.approx", "f32"),
        ("rcp.approx.ftz", "f32"),
        ("tanh.approx", "f32"),
        ("ex2.approx", "f16"),
        ("ex2.approx", "f16x2"),
        ("ex2.approx.ftz", "bf16"),
        ("ex2.approx.ftz", "bf16x2"),
        ("tanh.approx", "f16"),
        ("tanh.approx", "f16x2"),
        ("tanh.approx", "bf16"),
        ("tanh.approx", "bf16x2"),
    ):
        yield case(f"approximate {form}.{kind}", f"{form}.{kind} %x, %a;", [kind], [kind], 512, "approximate")
    for form in ("div.approx", "div.full", "div.approx.ftz"):
        given = [values("f32", 512, s) for s in (7, 8)]
        yield case(f"approximate {form}.f32", f"{form}.f32 %x, %a, %b;", ["f32"] * 2, ["f32"], 512, "approximate",
                   given=given)  # fmt: skip
