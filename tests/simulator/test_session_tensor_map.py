"""``cuTensorMapEncodeTiled`` as host code calls it: what it packs, and what it refuses."""

from __future__ import annotations

import ctypes

import pytest

from cute_nvfp4.sim import HostModule, LaunchError
from cute_nvfp4.sim.host.device import Device
from cute_nvfp4.sim.tma.descriptor import TensorMap
from cute_nvfp4.sim.tma.encode import encode_tiled

GOOD = {"kind": 6, "dims": (100, 64), "strides": (256,), "box": (64, 8), "steps": (1, 1), "swizzle": 3}


def encode(**changes) -> bytes:
    given = GOOD | {"address": 1 << 20, "interleave": 0, "promotion": 0, "fill": 0} | changes
    arrays = {n: (ctypes.c_uint64 * len(given[n]))(*given[n]) for n in ("dims", "strides")}
    arrays |= {n: (ctypes.c_uint32 * len(given[n]))(*given[n]) for n in ("box", "steps")}
    places = {n: ctypes.addressof(a) for n, a in arrays.items()}
    rest = {n: given[n] for n in ("kind", "address", "interleave", "swizzle", "promotion", "fill")}
    return encode_tiled(rank=given.get("rank", len(given["dims"])), **places, **rest)


def test_a_map_says_what_was_asked() -> None:
    """Against the fields of the hardware's format, read by hand."""
    words = [int.from_bytes(encode()[8 * i : 8 * i + 8], "little") for i in range(16)]
    assert words[0] == 1 << 20
    assert (
        words[1] >> 4 & 7 == 1 and words[1] >> 7 & 15 == 6 and words[1] >> 13 & 3 == 3 and words[1] >> 32 == 256 // 16
    )
    assert words[4] == 99 | 63 << 32 and words[6] >> 56 == 63 and words[7] & 0xFF == 7
    assert TensorMap.decode(encode()).box == (64, 8)
    assert TensorMap.decode(encode(kind=13, dims=(128, 64), strides=(64,), box=(128, 8))).type == "b4x16"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rank": 6}, "rank 6"),
        ({"address": 8}, "not a multiple of 16"),
        ({"strides": (200,)}, "stride of 0xc8 bytes is not a multiple of 16"),
        ({"box": (64, 257)}, "box dimension 1 is 257"),
        ({"dims": (0, 64)}, "dimension 0 is 0"),
        ({"steps": (1, 9)}, "element stride 1 is 9"),
        ({"kind": 99}, "data type 0 is 99, not within 0 and 15"),
        ({"swizzle": 9}, "swizzle 0 is 9, not within 0 and 6"),
        ({"box": (65, 8)}, "not a multiple of 16 bytes"),
        ({"box": (128, 8)}, "does not fit into a swizzle"),
    ],
)
def test_refused(changes: dict, text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        encode(**changes)


def host_call(arch: str, form: str, kind: int, swizzle: int) -> bytes:
    """The "Tiled" or "Im2col" map that host code for ``arch`` makes of four-dimensional images."""
    host, out = HostModule.__new__(HostModule), (ctypes.c_uint8 * 128)()
    host.device = Device.of(arch)
    sizes, strides = (ctypes.c_uint64 * 4)(128, 16, 16, 4), (ctypes.c_uint64 * 3)(256, 4096, 65536)
    steps, box, corner = (ctypes.c_uint32 * 4)(1, 1, 1, 1), (ctypes.c_uint32 * 4)(128, 2, 1, 1), (ctypes.c_int * 2)()
    at = [ctypes.addressof(a) for a in (sizes, strides, steps, box, corner, out)]
    inside = at[3:4] if form == "Tiled" else (at[4], at[4], 128, 8)
    encode = getattr(host, f"_on_cuTensorMapEncode{form}")
    encode(at[5], kind, 4, 1 << 20, *at[:2], *inside, at[2], 0, swizzle, 0, 0)
    return bytes(out)


@pytest.mark.parametrize("form", ["Tiled", "Im2col"])
@pytest.mark.parametrize(("kind", "swizzle"), [(13, 3), (14, 3), (0, 4)], ids=["4 bits", "4 bits padded", "32B atoms"])
def test_host_code_makes_the_maps_of_its_device(form: str, kind: int, swizzle: int) -> None:
    assert host_call("sm_100a", form, kind, swizzle) == host_call("sm_120a", form, kind, swizzle)
    with pytest.raises(LaunchError, match=r"needs compute capability 10\.0"):
        host_call("sm_90a", form, kind, swizzle)
    assert host_call("sm_90a", form, 0, 3) == host_call("sm_100a", form, 0, 3)
