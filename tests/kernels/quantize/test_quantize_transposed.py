"""The fused kernels that read x where K is strided give the bits of the reference."""

from __future__ import annotations

import pytest
import torch
from support.mutants import plan_anew
from support.quantize_problems import DTYPES, PAIRS, SWEEP, differences, edges, golden_inputs, near_ties

from cute_nvfp4.ops import quantize as ops
from cute_nvfp4.planning import quantize as planning
from cute_nvfp4.quantization.hadamard import Hadamard

pytestmark = [pytest.mark.kernels, SWEEP, pytest.mark.usefixtures("poisoned")]


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(x: torch.Tensor, alignment: int) -> torch.Tensor:
        raise AssertionError(f"{tuple(x.shape)}, strides {x.stride()}: copied")

    monkeypatch.setattr(ops, "readable_by", refuse)


def check(x: torch.Tensor, format: str, rule: str, **options: object) -> None:
    assert differences(x, format, rule, **options) == []


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format,rule", [pair for pair in PAIRS if pair[1] != "optimal"])
def test_edges(arch: str, format: str, rule: str, dtype: torch.dtype) -> None:
    """Numbers of every kind, rows and blocks too many for an atom and a work tile."""
    scale, k = (torch.tensor(0.0007), 272) if format == "nvfp4" else (None, 544)
    check(edges(130, k).to(dtype).t().contiguous().t(), format, rule, global_scale=scale)


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("rule", ["max", "four_six_mse"])
def test_ties(arch: str, rule: str) -> None:
    for dtype, value in zip(DTYPES, (93 / 16 / 2688, 5.25 / 1536, 1 / 3)):
        x = near_ties(dtype, value)[:126, :256].t().contiguous().t()
        check(x, "nvfp4", rule, global_scale=torch.tensor(value))


@pytest.mark.parametrize("rule", ["max", "four_six_abs_max"])
def test_golden_inputs(arch: str, rule: str) -> None:
    for name, x in golden_inputs().items():
        assert (name, differences(x.t().contiguous().t(), "nvfp4", rule, global_scale="auto")) == (name, [])


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("layout", ["blocked", "rowmajor"])
@pytest.mark.parametrize(
    "format,rule,dtype",
    [
        ("nvfp4", "max", torch.bfloat16),
        ("nvfp4", "max_normal", torch.float32),
        ("mxfp4", "floor", torch.half),
        ("mxfp8_e4m3", "ceil", torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows,k", [(2, 16), (30, 32), (34, 48), (96, 240), (128, 256), (130, 272), (258, 64)])
def test_ragged(arch: str, rows: int, k: int, format: str, rule: str, dtype: torch.dtype, layout: str) -> None:
    """In float32 an odd number of rows is read as it lies too."""
    rows, k = rows + (dtype is torch.float32), k if format == "nvfp4" else -(-k // 32) * 32
    check(edges(k, max(rows, 257))[:, :rows].contiguous().to(dtype).t(), format, rule, scale_layout=layout)


_VIEWS = {
    "from 2": lambda x: x[:, 2:132],
    "from 4": lambda x: x[:, 4:],
    "rows apart": lambda x: x[::2, :66],
    "from 1": lambda x: x[:, 1:129],
    "an odd number": lambda x: x[:, :131],
    "one": lambda x: x[:, :1],
    "columns apart": lambda x: x[:, ::2],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("view", _VIEWS)
def test_strides_and_alignments(arch: str, view: str, rotated: bool, dtype: torch.dtype) -> None:
    """Views that are read as they lie, and others that are copied first: the same result, and global scale."""
    x, rotation = edges(96, 176).to(dtype), Hadamard.from_seed(2) if rotated else None
    check(_VIEWS[view](x)[:48].t(), "nvfp4", "max", global_scale="auto", hadamard=rotation)


_BATCHES = [
    ("nvfp4", "four_six_mse", {"global_scale": "auto"}),
    ("mxfp8_e5m2", "even", {"scale_layout": "rowmajor"}),
    ("nvfp4", "max", {"global_scale": "auto", "hadamard": Hadamard.from_seed(2)}),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format,rule,options", _BATCHES, ids=str)
def test_batches(arch: str, format: str, rule: str, options: dict, dtype: torch.dtype) -> None:
    """One matrix after the other, and their rows in turn."""
    x = edges(96, 176).to(dtype)
    apart = rule == "max"
    check(x.reshape(32, 3, 176).permute(1, 2, 0) if apart else x.reshape(3, 32, 176).mT, format, rule, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotated", [False, True])
def test_computed_global_scale(arch: str, rotated: bool, dtype: torch.dtype) -> None:
    finite = torch.finfo(dtype)
    for value in (0.0, finite.smallest_normal, finite.max, float("nan"), float("inf")):
        for place in ((0, 0), (207, 69)):
            x = torch.zeros(208, 70, dtype=dtype)
            x[3, 5], x[place] = 1.5, value
            rotation = Hadamard((1,) * 16) if rotated else None
            check(x.t(), "nvfp4", "max", global_scale="auto", hadamard=rotation)


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("dtype,seed", list(zip(DTYPES, (0, 7, 2**63 - 1))), ids=str)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    "format,rule", [("nvfp4", "max"), ("nvfp4", "four_six_mae"), ("mxfp4", "even"), ("mxfp8_e5m2", "floor")]
)
def test_stochastic_and_rotated(
    arch: str, format: str, rule: str, rotated: bool, dtype: torch.dtype, seed: int
) -> None:
    scale, rotation = torch.tensor(0.01) if format == "nvfp4" else None, Hadamard.from_seed(3, 8) if rotated else None
    x = edges(192, 46).to(dtype).reshape(2, 96, 46).transpose(1, 2)
    check(x, format, rule, global_scale=scale, hadamard=rotation, seed=seed)


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "format,rule", [("nvfp4", "max"), ("nvfp4", "static_4"), ("mxfp4", "ceil"), ("mxfp8_e4m3", "max")]
)
@pytest.mark.parametrize("options", [{}, {"hadamard": Hadamard.from_seed(3)}, {"seed": 5}], ids=str)
def test_tiles(arch: str, format: str, rule: str, options: dict, dtype: torch.dtype) -> None:
    """A tile's lanes find its largest magnitude together; ragged tiles, NaN, rotations, random rounding."""
    scale = torch.tensor(0.01) if format == "nvfp4" else None
    x = edges(96, 138).to(dtype).t()
    x[40:60] *= 1e-3
    check(x, format, rule, global_scale=scale, block_2d=True, **options)


def test_tiles_of_four_six_are_copied(arch: str) -> None:
    check(edges(96, 138).bfloat16().t(), "nvfp4", "four_six_mse", global_scale="auto", block_2d=True)


@pytest.mark.sim_only("runs no kernel")
def test_what_is_read_as_it_lies() -> None:
    x = torch.zeros(2, 64, 40, dtype=torch.bfloat16)
    lies = x.transpose(1, 2)
    assert ops.lies_transposed(lies, False, "mse") and ops.lies_transposed(lies, True, "")
    assert not ops.lies_transposed(lies, True, "mse") and not ops.lies_transposed(x, False, "")
    assert not ops.lies_transposed(lies[:, 1:], False, "") and not ops.lies_transposed(lies[:, :39], False, "")
    assert ops.lies_transposed(lies.float()[:, 1:], False, "") and not ops.lies_transposed(lies[:, ::2], False, "")


def test_one_block_of_threads_for_all(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes task after task; every other grid is somewhere between this one and one task for each."""
    monkeypatch.setattr(planning, "_WAVES", 0)
    plan_anew(monkeypatch)
    check(edges(288, 300).bfloat16().t(), "nvfp4", "max", global_scale="auto")
    check(edges(288, 300).t(), "mxfp4", "even")
