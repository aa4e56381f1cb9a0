"""A call, as text and back, and the values that each of its axes has."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields, replace

REFERENCE = "reference"
ARCHS = (REFERENCE, "sm_90a", "sm_100a", "sm_120a", "sm_103a", "sm_121a")
NUMBERS = (
    "none", "1", "-1", "0", "-0", "1e-45", "-3e-42", "1.1754942e-38", "1.1754944e-38", "1e-30", "3e-38", "2e-20",
    "0.004", "20", "1e20", "3e35", "3e36", "2.6e36", "-9e31", "3e38", "3.4028235e38", "-3.4028235e38",
    "inf", "-inf", "nan",
)  # fmt: skip
"""alphas and global scales: float32 numbers, which each is rounded to."""
PRODUCTS = ("gemm", "gemv", "gated_gemm", "grouped_gemm", "grouped_gemm_contiguous")
OTHERS = (
    "quantize", "dequantize", "rmsnorm_quantize", "silu_mul_quantize", "tensor_amax", "prepare_weight", "to_blocked",
    "from_blocked", "interleave", "prepare", "export",
)  # fmt: skip
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2", "float", "float tiny", "float huge")
WEIGHTS = ("nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2", "prepared")
GATES = ("silu", "gelu_tanh", "gelu_erf", "relu", "identity")
KINDS = (
    "", "coo", "csr", "meta", "nested", "jagged", "quantized", "complex", "conj", "negative", "functional", "vmap",
    "mkldnn", "empty", "parameter", "gradient", "subclass", "strided", "expanded", "reversed", "wider",
    "scalar", "double", "boolean", "half", "integer", "none", "text", "number", "array",
)  # fmt: skip
"""Kinds of tensors, and what is none, in the place of an argument."""
COMPUTED = ("parameter", "gradient", "subclass", "strided", "expanded", "reversed")
"""Kinds that may also be computed with: all others must be refused, or be what the argument may be anyway."""
ARGUMENTS = {
    "gemm": ("a.data", "a.scale", "a.global_scale", "b.data", "b.scale", "b.global_scale", "bias", "alpha", "out", "x"),
    "gemv": ("a.data", "a.scale", "a.global_scale", "b.data", "b.scale", "b.global_scale", "out", "alpha"),
    "gated_gemm": (
        "a.data",
        "a.scale",
        "a.global_scale",
        "b.data",
        "up.data",
        "up.scale",
        "alpha",
        "out",
        "out_global_scale",
        "x",
    ),
    "grouped_gemm": ("a.data", "a.scale", "b.scale", "b.global_scale", "alpha", "out", "x"),
    "grouped_gemm_contiguous": ("a.data", "a.scale", "b.data", "b.scale", "offsets", "status", "alpha", "out", "x"),
    "quantize": ("x", "global_scale"),
    "dequantize": ("a.data", "a.scale", "a.global_scale"),
    "rmsnorm_quantize": ("x", "weight", "residual", "global_scale"),
    "silu_mul_quantize": ("x", "up", "global_scale"),
    "tensor_amax": ("x",),
    "prepare_weight": ("b.data", "b.scale", "b.global_scale"),
    "to_blocked": ("scale",),
    "from_blocked": ("scale",),
    "interleave": ("b.data", "b.scale"),
    "prepare": ("a.data", "a.scale", "b.data", "out"),
    "export": ("a.data", "a.scale", "b.data", "x", "out"),
}
"""Tensors of a function, one of which may be of another kind or lie somewhere else."""


@dataclass(frozen=True)
class Call:
    """function on arch. a, b: what the operands are. alpha, a_scale, b_scale: as in ``NUMBERS``; on_device: whether
    alpha is a tensor. quantized: global scale of a gated result in NVFP4. data: "exact" has sums that no order rounds,
    "full" all codes, "zeros". place: bytes that ``argument`` starts after an aligned address; kind: what it is instead
    of a plain tensor."""

    function: str = "gemm"
    arch: str = REFERENCE
    a: str = "nvfp4"
    b: str = "nvfp4"
    m: int = 3
    n: int = 16
    k: int = 128
    batch: int = 0
    alpha: str = "none"
    on_device: bool = False
    a_scale: str = "none"
    b_scale: str = "none"
    out: str = "float32"
    given: bool = False
    bias: bool = False
    gate: str = "silu"
    quantized: str = "none"
    data: str = "exact"
    argument: str = ""
    kind: str = ""
    place: int = 0
    seed: int = 0

    def __str__(self) -> str:
        parts = [(x.name, getattr(self, x.name)) for x in fields(self)]
        return ",".join(f"{name}={value}" for name, value in parts if value != getattr(_PLAIN, name))

    @classmethod
    def parse(cls, text: str) -> Call:
        """The call that a failure printed."""
        found = dict(part.split("=", 1) for part in text.split(",") if part)
        kinds = {x.name: type(getattr(_PLAIN, x.name)) for x in fields(cls)}
        made = {x: value == "True" if kinds[x] is bool else kinds[x](value) for x, value in found.items()}
        return cls(**made)


_PLAIN = Call()


def float32(text: str) -> float:
    """A number as float32 has it."""
    import torch

    return float(torch.tensor(float(text), dtype=torch.float32))


STRUCTURES = 240
"""As many structures random calls have, so that few kernels are compiled: each is called with many numbers."""


def random_number(choose: random.Random) -> str:
    """One of ``NUMBERS`` but none, or any finite float32."""
    if choose.random() < 0.7:
        return choose.choice(NUMBERS[1:])
    return f"{choose.choice((-1, 1)) * math.ldexp(1 + choose.random(), choose.randint(-149, 127)):.9g}"


def structure(choose: random.Random) -> Call:
    """What decides which kernels a call compiles; of its numbers whether there is one."""
    there = "1"
    made = Call(
        choose.choice((*PRODUCTS * 4, *OTHERS)),
        choose.choice((REFERENCE, *ARCHS[1:4] * 4, *ARCHS[4:])),
        choose.choice(("nvfp4",) * 6 + FORMATS),
        choose.choice(("nvfp4", "nvfp4", "nvfp4", "prepared", "prepared", *WEIGHTS)),
        choose.choice((1, 3, 20)),
        choose.choice((16, 32, 48)),
        choose.choice((64, 128)),
        choose.choice((0, 0, 0, 1, 2)),
        choose.choice(("none", there, there)),
        choose.random() < 0.4,
        choose.choice(("none", there, there)),
        choose.choice(("none", there, there)),
        choose.choice(("float32",) * 6 + ("float16", "bfloat16")),
        bias=choose.random() < 0.2,
        gate=choose.choice(GATES),
    )
    return replace(made, quantized=choose.choice(("none", there))) if made.function == "gated_gemm" else made


_NUMBERS = ("alpha", "a_scale", "b_scale", "quantized")


def random_call(choose: random.Random) -> Call:
    """Any call: of a third of them an argument is of another kind, or lies somewhere else."""
    call = structure(random.Random(f"structure {choose.randrange(STRUCTURES)}"))
    if choose.random() < 0.4:
        # exact torch compiles nothing, and takes any structure
        call = replace(structure(choose), arch=REFERENCE)
    numbers = {x: random_number(choose) for x in _NUMBERS if getattr(call, x) != "none"}
    call = replace(call, **numbers, given=choose.random() < 0.3, seed=choose.randint(0, 99))
    call = replace(call, data=choose.choice(("exact", "exact", "exact", "full", "zeros")))
    if choose.random() < 0.35:
        call = replace(call, argument=choose.choice(ARGUMENTS[call.function]))
        if choose.random() < 0.25:
            return replace(call, place=choose.choice((1, 2, 4, 8, 16, 32)))
        return replace(call, kind=choose.choice(KINDS[1:]))
    return call


def sample(seed: int = 0) -> list[Call]:
    """Few calls in which every value of every axis occurs, and every kind of every argument with exact torch."""
    choose, found = random.Random(seed), []
    for function, arguments in ARGUMENTS.items():
        for argument in arguments:
            plain = replace(Call(function, argument=argument, seed=1), **shape_of(argument))
            found += [replace(plain, kind=kind) for kind in KINDS[1:]]
            found += [replace(plain, place=place) for place in (1, 4, 16)]
    axes = {
        "arch": ARCHS[:4], "a": FORMATS, "b": WEIGHTS, "alpha": NUMBERS, "a_scale": NUMBERS, "b_scale": NUMBERS,
        "quantized": NUMBERS,
        "out": ("float32", "float16", "bfloat16"), "gate": GATES, "data": ("exact", "full", "zeros"),
        "function": (*PRODUCTS, *OTHERS), "m": (1, 3, 20), "n": (16, 32, 48), "batch": (0, 1, 2),
    }  # fmt: skip
    for name, values in axes.items():
        for value in values:
            random_one = replace(random_call(choose), arch=choose.choice(ARCHS[:4]), argument="", kind="", place=0)
            if name not in ("arch", "function"):
                function = "gated_gemm" if name == "quantized" else choose.choice(PRODUCTS)
                random_one = replace(random_one, function=function)
            found.append(replace(random_one, **{name: value}))
    return found


def shape_of(argument: str) -> dict[str, object]:
    """What a call must have for that argument to be used."""
    root = argument.split(".")[0]
    more = {
        "bias": {"bias": True}, "alpha": {"on_device": True, "alpha": "20"}, "out": {"given": True},
        "out_global_scale": {"quantized": "0.004"},
        "x": {"a": "float", "b": "prepared"},
    }.get(root, {})  # fmt: skip
    return more | ({"a_scale": "0.004", "b_scale": "20"} if "global_scale" in argument else {})
