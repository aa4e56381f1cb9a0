"""quantize refuses bad input alike, whether a call of the same kind was planned before or not."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import test_quant_out as given
import torch
from support.roads import Roads, table

from cute_nvfp4 import simulating
from cute_nvfp4.ops.quantize import QUANTIZE, quantize

X = given.X[0]


@pytest.fixture(scope="module")
def roads() -> Iterator[Roads]:
    memory = torch.randn(40 * 64)
    with simulating():
        yield Roads(
            QUANTIZE.calls,
            [
                lambda: quantize(X),
                lambda: quantize(X, hadamard=1),
                lambda: quantize(X, transpose=False, axis=1),
                lambda: quantize(X, global_scale=0.01),
                lambda: quantize(X, global_scale=torch.tensor(0.01)),
                lambda: quantize(X, rounding="stochastic", generator=1),
                lambda: quantize(X, out=given.operand()),
                lambda: quantize(X, global_scale=torch.ones(1), out=given.operand()),
                lambda: quantize(memory.view(40, 64), out=given.operand()),
            ],
        )
    QUANTIZE.calls.clear()


def test_outputs(roads: Roads) -> None:
    for out, message in table(given.test_what_cannot_be_written_to):
        said = roads.refused(lambda out=out: quantize(X, out=out))
        assert re.search(message, said), said
    assert "out: got Tensor" in roads.refused(lambda: quantize(X, out=torch.zeros(40, 32)))


@pytest.mark.parametrize("part", ["x and data", "x and scale", "x and factor", "data and factor", "given and data"])
def test_memory(roads: Roads, part: str) -> None:
    """A good call of the same key was planned; only addresses are wrong."""
    room = torch.zeros(4096)
    raw = room.view(torch.uint8)
    x, own = room[: 40 * 64].view(40, 64), {"data": raw[12288 : 12288 + 1280].view(40, 32)}
    factor, options = room[4000:4001].fill_(0.01), {}
    if part == "x and data":
        own["data"] = raw[4096 : 4096 + 1280].view(40, 32)
    elif part == "x and scale":
        own["scale"] = raw[4096 : 4096 + 512]
    elif part == "x and factor":
        factor = room[64:65]
    else:
        factor = own["data"].view(torch.float32).view(-1)[16:17].fill_(0.01)
    if part == "given and data":
        options, factor = {"global_scale": factor}, torch.ones(1)
    bad = given.operand(**own, global_scale=factor)
    assert "memory of out: got bytes" in roads.refused(lambda: quantize(x, out=bad, **options))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"format": "nvfp5"}, "format"),
        ({"rule": "best"}, "rule"),
        ({"rounding": "up"}, "rounding"),
        ({"generator": 3}, "generator"),
        ({"hadamard": 3.5}, ""),
        ({"hadamard": 1.0}, ""),
        ({"axis": 5}, "axis of the blocks"),
        ({"axis": 0, "transpose": True}, "transpose"),
        ({"scale_layout": "flat"}, "scale_layout"),
        ({"global_scale": "none"}, "global scale"),
        ({"global_scale": 2.0**119}, "global scale"),
        ({"global_scale": True}, "global scale"),
        ({"global_scale": torch.ones(2)}, "global scale"),
        ({"global_scale": torch.ones(1).double()}, "global scale"),
        ({"rounding": "stochastic", "generator": "seed"}, ""),
        ({"backend": "gpu"}, "backend"),
        ({"backend": "cuda"}, "backend"),
    ],
    ids=str,
)
def test_requests(roads: Roads, options: dict, error: str) -> None:
    assert error in roads.refused(lambda: quantize(X, **options))


def test_tensors(roads: Roads) -> None:
    for x in (X.double(), X[:0], X[None, None], X[:, :50], "x"):
        roads.refused(lambda x=x: quantize(x))
