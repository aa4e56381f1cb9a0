"""gemm of plain operands on sm_90a, which packs b in each call; packing by the kernel against packing by torch."""

from __future__ import annotations

import pytest
import torch
from support import backends, gemm_problems
from support.gemm_problems import Case, make
from support.mutants import LAST, Ptx, at, constant, instead, outcome

from cute_nvfp4 import BlockScaledTensor, gemm, prepare, prepare_weight, quantize, simulating, to_blocked
from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import MXFP4, MXFP8, MXFP8_E5M2, NVFP4, Format
from cute_nvfp4.ops.prepare_weight import packed_tiles
from cute_nvfp4.weight_layout import PACKINGS, unpack
from cute_nvfp4.weight_packing import packed_by_torch

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]


PROBLEMS = (
    # streamed; decoded; K that ends in a tile; batches; outputs along M; rows of operands with room between
    "workers=0,m=3,n=200,k=256,out=strided,alpha=0.25",
    "workers=0,m=20,n=136,k=160,bias=n,alpha=0.5,alpha_tensor=True",
    "workers=0,m=40,n=130,k=96,batch=2,bias=batch,out=sliced,dtype=bfloat16,a_global=0.5,b_global=0.25",
    "workers=0,m=5,n=100,k=128,batch=2,repeat_b=True,out=columns,pitch=48",
    "workers=0,m=33,n=70,k=544,out=new,dtype=float16,alpha=1e-5,batch=0",
    "workers=0,m=3,n=200,k=288,a_format=mxfp4,b_format=mxfp4,out=columns",
    "workers=0,m=24,n=136,k=160,batch=2,a_format=mxfp8,b_format=mxfp8_e5m2,bias=n,alpha=0.5,pitch=48",
    "workers=0,m=5,n=100,k=96,a_format=mxfp8_e5m2,b_format=mxfp8,dtype=bfloat16",
)


@pytest.mark.parametrize("text", PROBLEMS)
def test_plain_operands(text: str) -> None:
    problem = make(Case.parse(text))
    with simulating():
        gemm_problems.check(problem, problem.run())


def operand(rows: int, k: int, batch: int, layout: str, format: Format = NVFP4) -> BlockScaledTensor:
    """Every code and every scale, NaN too; of MXFP8 few, but some in most blocks would be too many."""
    generator = torch.Generator().manual_seed(rows)
    shape = batch, rows, format.data_columns(k)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if format.element_bits == 8:
        data = torch.where(torch.rand(shape, generator=generator) < 0.9, data & 0xBB, data)
    scale = torch.randint(0, 256, (batch, rows, k // format.block), dtype=torch.uint8, generator=generator)
    scale[:, :7, 0] = torch.tensor([0, 0x80, 0x7F, 0xFF, 1, 0x87, 0x7E], dtype=torch.uint8)
    if layout == "blocked":
        scale = to_blocked(scale)
        # padding may hold anything
        padded = torch.randint(0, 256, scale.shape, dtype=torch.uint8, generator=generator)
        own = to_blocked(torch.full((batch, rows, k // format.block), 255, dtype=torch.uint8)) == 255
        scale = scale.copy_(torch.where(own, scale, padded))
    return BlockScaledTensor(backends.place(data), backends.place(scale), None, format)


def packs(weight: BlockScaledTensor, dtype: torch.dtype) -> bool:
    """Whether the kernel has the bits of torch."""
    packed = packed_tiles(weight, dtype, backend=backends.backend())
    return torch.equal(packed, packed_by_torch(weight, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rows, k, batch, layout", [(150, 272, 2, "blocked"), (130, 208, 2, "rowmajor"), (16, 16, 1, "blocked")]
)
def test_packing_by_the_kernel(rows: int, k: int, batch: int, layout: str, dtype: torch.dtype) -> None:
    assert packs(operand(rows, k, batch, layout), dtype)


@pytest.mark.parametrize("format", [MXFP4, MXFP8, MXFP8_E5M2], ids=lambda x: x.name)
@pytest.mark.parametrize("rows, k, batch, layout", [(150, 288, 2, "blocked"), (130, 96, 1, "rowmajor")])
def test_packing_of_mx_by_the_kernel(format: Format, rows: int, k: int, batch: int, layout: str) -> None:
    weight = operand(rows, k, batch, layout, format)
    found = packed_by_torch(weight, torch.bfloat16)
    nan = unpack(found, PACKINGS[format.name][torch.bfloat16])[:, :rows, :k].isnan()
    assert nan.any() and nan.float().mean() < 0.5 and packs(weight, torch.bfloat16)


MUTANTS = (
    ("a rotation left out", at("xor.b32", instead("mov.b32 {0}, {1};"), LAST)),
    ("signs of scales dropped", at("and.b32", constant(0x88888888, 0))),
    ("rows g and g + 8 exchanged", at("prmt.b32", instead("prmt.b32 {0}, {2}, {1}, {3};"), LAST)),
    ("scales not shifted", at("mul.rn.f16x2", instead("mov.b32 {0}, {1};"), LAST)),
)
MX_MUTANTS = (
    ("NaN of other lanes", at("shfl.sync.bfly", instead("mov.b32 {0}, 0;"))),
    ("columns of other lanes", at("prmt.b32", instead("prmt.b32 {0}, {2}, {1}, {3};"))),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("name, change", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_of_packing_are_noticed(name: str, change: Ptx) -> None:
    weight = operand(130, 144, 1, "blocked")
    with simulating("sm_90a"):
        assert packs(weight, torch.float16)
    assert outcome(change, lambda: packs(weight, torch.float16), "sm_90a") == "wrong"


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("name, change", MX_MUTANTS, ids=[m[0] for m in MX_MUTANTS])
def test_mutants_of_packing_mx_are_noticed(name: str, change: Ptx) -> None:
    weight = operand(130, 96, 1, "blocked", MXFP8)
    assert outcome(change, lambda: packs(weight, torch.bfloat16), "sm_90a") == "wrong"


@pytest.mark.sim_only("refuses CPU tensors")
def test_what_is_refused() -> None:
    x = quantize(torch.ones(32, 64), backend="reference")
    with simulating("sm_90a"):
        with pytest.raises(OperandError, match="prepare_weight"):
            prepare(gemm, x, x)
        memory = torch.zeros(4096, dtype=torch.uint8)
        a = BlockScaledTensor(memory[:1024].view(32, 32), x.scale)
        with pytest.raises(OperandError, match="memory of out"):
            gemm(a, x, out=memory[:2048].view(torch.float16).view(32, 32))
        weight = prepare_weight(x, dtype=torch.float16)
        assert torch.equal(gemm(x, x), gemm(x, weight, out_dtype=torch.float16))
