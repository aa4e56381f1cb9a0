"""Templates of launches: every byte that varies is found and explained, and host code that hides one is refused."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from cute_nvfp4.errors import CompileError
from cute_nvfp4.kernels.gemm.arguments import GemmArguments, Operand, Output
from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.ops import gemm, gemv
from cute_nvfp4.runtime import template
from cute_nvfp4.runtime.launch import Slot
from cute_nvfp4.runtime.template import Patch, capture
from cute_nvfp4.sim import Launch

POINTER, FLOAT, INT = ctypes.c_void_p, ctypes.c_float, ctypes.c_int32
LAUNCH = Launch("k", (4, 1, 1), (128, 1, 1), ())


@dataclass
class Host:
    """A host function: from its values to the launches."""

    call: Callable[[list], list[Launch]]


@dataclass
class Fake:
    """A compiled kernel with nothing but a host function."""

    host: Host
    name: str = "fake"


def kernel(params: Callable[..., tuple[bytes, ...]], **changes: Callable[..., object]) -> Fake:
    """One launch, whose parameters and other fields are functions of the values."""

    def call(values: list) -> list[Launch]:
        plain = [x.value for x in values]
        return [replace(LAUNCH, params=params(*plain), **{name: f(*plain) for name, f in changes.items()})]

    return Fake(Host(call))


def found(params: Callable[..., tuple[bytes, ...]], *types: type, varying: tuple[int, ...] | None = None):
    types_ = list(types)
    return capture(kernel(params), types_, [0] * len(types_), varying or tuple(range(len(types_))))


def test_what_varies_is_found_where_it_is() -> None:
    """Addresses with and without a constant, a float, an int; a fixed number and padding stay."""

    def params(p: int, q: int, x: float, n: int, fixed: int) -> tuple[bytes, ...]:
        return struct.pack("<QfiQ", q, x, n, p + 4096), struct.pack("<iiQ", fixed, 7, p - 48)

    made = capture(kernel(params), [POINTER, POINTER, FLOAT, INT, INT], [0, 0, 0.0, 0, 5], (0, 1, 2, 3))
    assert made.patches == (
        Patch(0, 0, 0, "Q", 1),
        Patch(0, 0, 8, "f", 2),
        Patch(0, 0, 12, "i", 3),
        Patch(0, 0, 16, "Q", 0, 4096),
        Patch(0, 1, 8, "Q", 0, -48),
    )
    for values in ((1 << 40, 3 << 33, 1.5, -7), (256, 4096, float("-inf"), 2**31 - 1)):
        assert made.filled(values) == [replace(LAUNCH, params=params(*values, 5))]


def test_what_a_call_writes() -> None:
    """Each value is where its patch says, one twice and one with a constant; every other byte stays."""
    codes, before = "QQif", bytes(range(64))
    patches = [(0, 1, 0), (8, 3, 0), (12, 2, 0), (24, 0, -48), (32, 0, 0), (56, 1, 4096)]
    held = tuple(Patch(0, 0, at, codes[i], i, added) for at, i, added in patches)
    buffer = ctypes.create_string_buffer(before, 64)
    slots = [Slot.of(buffer, p.offset, p) for p in held]
    for seed in range(2):
        values = (2**63 + seed, 2**46 + 3 * seed, seed - 7, seed - 0.25)
        for slot in slots:
            slot.write(values)
        made = template.Template((replace(LAUNCH, params=(before,)),), held, len(codes))
        assert made.filled(values)[0].params == (buffer.raw,)


def test_a_float_beyond_float32_is_infinity() -> None:
    """As ctypes makes it, which writes the parameters of a launch on a GPU."""
    made = template.Template((replace(LAUNCH, params=(bytes(4),)),), (Patch(0, 0, 0, "f", 0),), 1)
    for value in (1e300, -1e300, 0.1):
        assert made.filled([value])[0].params == (bytes(ctypes.c_float(value)),)


def test_several_launches_and_values_that_are_not_used() -> None:
    def call(values: list) -> list[Launch]:
        p = values[1].value
        return [
            replace(LAUNCH, params=(struct.pack("<Q", p),)),
            replace(LAUNCH, params=(struct.pack("<IQI", 9, p, 9),)),
        ]

    made = capture(Fake(Host(call)), [POINTER, POINTER], [0, 0], (0, 1))
    assert [(p.launch, p.offset, p.value) for p in made.patches[:1]] == [(0, 0, 1)]
    assert made.values == 2 and {p.value for p in made.patches} == {1}


REFUSED: dict[str, tuple[Callable[..., tuple[bytes, ...]], tuple[type, ...]]] = {
    "half an address": (lambda p: (struct.pack("<I", p & 0xFFFFFFFF),), (POINTER,)),
    "its pages": (lambda p: (struct.pack("<Q", p >> 12),), (POINTER,)),
    "twice an address": (lambda p: (struct.pack("<Q", 2 * p),), (POINTER,)),
    "a distance": (lambda p, q: (struct.pack("<q", p - q),), (POINTER, POINTER)),
    "a sum": (lambda p, q: (struct.pack("<Q", p + q),), (POINTER, POINTER)),
    "one bit": (lambda p: (struct.pack("<i", p >> 12 & 1),), (POINTER,)),
    "too much added": (lambda p: (struct.pack("<Q", p + (1 << 35)),), (POINTER,)),
    "half the float": (lambda x: (struct.pack("<f", x / 2),), (FLOAT,)),
    "the float as an int": (lambda x: (struct.pack("<i", int(x)),), (FLOAT,)),
    "an int and one": (lambda n: (struct.pack("<i", n + 1),), (INT,)),
    "the larger of two": (lambda n, m: (struct.pack("<i", max(n, m, 0x23000000)),), (INT, INT)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_held_is_refused(name: str) -> None:
    params, types = REFUSED[name]
    with pytest.raises(CompileError, match=r"kernel fake: byte \d of a parameter of \d bytes depends on an address"):
        found(params, *types)


@pytest.mark.parametrize(
    ("field", "of"),
    [
        ("grid", lambda p: (1 + (p >> 12 & 1), 1, 1)),
        ("dynamic_smem", lambda p: p >> 12 & 1),
        ("kernel", lambda p: f"k{p >> 12 & 1}"),
    ],
)
def test_a_launch_that_depends_on_an_address_is_refused(field: str, of: Callable) -> None:
    with pytest.raises(CompileError, match="kernel fake: what it launches depends on addresses"):
        capture(kernel(lambda p: (struct.pack("<Q", p),), **{field: of}), [POINTER], [0], (0,))


def test_as_many_launches_each_time() -> None:
    def call(values: list) -> list[Launch]:
        return [LAUNCH] * (1 + (values[0].value >> 12 & 1))

    with pytest.raises(CompileError, match="what it launches depends on addresses"):
        capture(Fake(Host(call)), [POINTER], [0], (0,))


def test_two_explanations_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two values were made up alike, neither is taken."""
    monkeypatch.setattr(template, "_made_up", lambda code, n, count, probe: 0x1000 + probe)
    with pytest.raises(CompileError, match="depends on an address"):
        found(lambda n, m: (struct.pack("<i", n),), INT, INT)


def test_a_map_is_compared_by_its_first_half() -> None:
    """What is behind it is not defined: the encoder leaves there what was on the stack."""
    from cute_nvfp4.sim.tma.descriptor import InvalidTensorMap, TensorMap

    planned = _gemm_launch((1 << 40, 2 << 40, 3 << 40, 4 << 40, 5 << 40, 1.0))
    tensor_map = next(p for p in planned.params if len(p) == 128 and TensorMap.decode(p))
    noise = iter(range(1, 9))
    place = tensor_map.index(struct.pack("<Q", TensorMap.decode(tensor_map).address))

    def params(p: int) -> tuple[bytes, ...]:
        first = tensor_map[:place] + struct.pack("<Q", p) + tensor_map[place + 8 : 64]
        return (first + bytes([next(noise)]) * 64,)

    made = found(params, POINTER)
    assert [(p.offset, p.value) for p in made.patches] == [(place, 0)]
    assert made.launches[0].params[0][64:] == bytes(64)
    # what is not a tensor map is compared whole
    wrong = bytes([0xFF]) * 64
    with pytest.raises(InvalidTensorMap):
        TensorMap.decode(wrong + bytes(64))
    with pytest.raises(CompileError, match="byte 64 of a parameter of 128 bytes"):
        found(lambda p: (wrong + bytes([next(noise)]) * 64,), POINTER)


# --- host code of the package


def _arguments() -> GemmArguments:
    side = Operand(0, 0, 64, 64, 64 * 64, 1, 512)
    return GemmArguments(
        a=(side,), b=(side,), out=Output(0, 64, 64 * 64, None, None), bias=None, alpha=1.0, factors=((),),
        partials=None, k=64, batch=1, workers=1,
    )  # fmt: skip


def _gemm_launch(values: tuple) -> Launch:
    """The launch of a GEMM's host function at these addresses."""
    compiled, signature = gemm.KERNEL.compile(GemmConfig()), gemm.KERNEL.signature(GemmConfig())
    given = signature.values(_arguments(), 0)
    for i, value in zip(signature.varying, values):
        given[i] = value
    (launch,) = compiled.host.call([kind(x) for kind, x in zip(signature.types, given)])
    return launch


def _same(got: Launch, want: Launch) -> None:
    want = replace(want, params=tuple(map(template._defined, want.params)))
    assert got == want


def test_a_gemm_at_real_addresses() -> None:
    signature = gemm.KERNEL.signature(GemmConfig())
    compiled = gemm.KERNEL.compile(GemmConfig())
    made = capture(compiled, signature.types, signature.values(_arguments(), 0), signature.varying)
    assert {p.value for p in made.patches} == set(range(6))
    for values in ((1 << 40, 2 << 40, 3 << 40, 4 << 40, 5 << 40, 0.5), (16, 512, 4096, 32, 64, -3.25)):
        _same(made.filled(values)[0], _gemm_launch(values))


def test_a_gemv_at_real_addresses() -> None:
    compiled, config = gemv.compile_gemv("sm_100a", m=40, k=64)
    signature = gemv.KERNEL.signature(config)
    arguments = gemv.GemvArguments(
        *(0,) * 7, alpha=1.0, m=40, k=64, batch=1, a_strides=gemv.Strides(32, 1280), sfa_strides=gemv.Strides(0, 512),
        b_batch=32, sfb_batch=512, c_strides=gemv.Strides(1, 40), ctas=3,
    )  # fmt: skip
    given = signature.values(arguments, 0)
    made = capture(compiled, signature.types, given, signature.varying)
    for values in ((*(n << 40 for n in range(1, 6)), 0, 0, 2.0), (4096, 8192, 64, 512, 1024, 36, 40, -1.5)):
        for i, value in zip(signature.varying, values):
            given[i] = value
        (want,) = compiled.host.call([kind(x) for kind, x in zip(signature.types, given)])
        _same(made.filled(values)[0], want)
        assert made.filled(values)[0].grid == want.grid
