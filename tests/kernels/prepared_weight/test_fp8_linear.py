"""``NVFP4Linear`` with x in FP8, always or where rows are many: products, one copy of the weight, torch's traces."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support import backends

from cute_nvfp4 import BlockScaledTensor, NVFP4Linear, gemm, prepare_weight, quantize_model, simulating
from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import MXFP4, pack_e2m1
from cute_nvfp4.nn import MXFP4Linear, held_weight
from cute_nvfp4.nn.input_rules import FP8_ROWS
from cute_nvfp4.nn.released import rewritten, unpacked
from cute_nvfp4.row_scaled import by_rows
from cute_nvfp4.runtime.backend import Backend

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]
E4M3 = torch.float8_e4m3fn
N, K = 72, 144
RULES = pytest.mark.parametrize("rule", ["fp8", "auto"])


def made(rule: str, seed: int = 0, k: int = K, special: bool = False, backend: Backend = "auto") -> NVFP4Linear:
    """Codes of every kind. special: blocks far below the largest of their row too, of zeros, with NaN and signs."""
    generator, padded = torch.Generator().manual_seed(seed), -(-k // 16) * 16
    data = torch.randint(0, 256, (N, padded // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0x28, 0x60, (N, padded // 16), dtype=torch.uint8, generator=generator)
    if special:
        scale[:40] = torch.randint(0, 256, (40, padded // 16), dtype=torch.uint8, generator=generator)
        data[41, :8], scale[42, 1], data[43] = 0, 0, 0
    device = backends.device()
    weight = BlockScaledTensor(data.to(device), scale.to(device), torch.tensor(0.01, device=device))
    return NVFP4Linear(weight, in_features=k, input_rule=rule, backend=backend)


def rows(m: int, k: int = K, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype).to(backends.device())


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@RULES
@pytest.mark.parametrize("k", [K, 70])
def test_products(rule: str, k: int) -> None:
    """They are those of ``gemm``, before and after ``prepare``, on Hopper and where exact torch computes."""
    many, few = rows(FP8_ROWS, k), rows(FP8_ROWS - 1, k)
    with simulating():
        layer = made(rule, k=k)
        of_16, of_8 = (prepare_weight(layer.weight, dtype=dtype) for dtype in (torch.bfloat16, E4M3))
        x, y = (torch.nn.functional.pad(x, (0, of_8.k - k)) for x in (many, few))
        wanted = gemm(x, of_8), gemm(y, of_8 if rule == "fp8" else of_16)
        for one in (layer, layer.prepare()):
            assert one(many).equal(wanted[0]) and one(few).equal(wanted[1])
        assert layer(many.float()).equal(gemm(by_rows(x.float()), of_8, out_dtype=torch.float32))
        kernels = [layer.explain_backend(m).reason for m in (FP8_ROWS - 1, FP8_ROWS)]
    assert ["in FP8" in x for x in kernels] == [rule == "fp8", True]
    exact = gemm(x, of_8, backend="reference")
    assert made(rule, k=k, backend="reference")(many).equal(exact), "exact torch rounds x and weights as Hopper does"
    assert (wanted[0].double() - exact.double()).norm() < 2e-3 * exact.double().norm()


@RULES
def test_one_copy_that_loses_nothing(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, other, x = made(rule, special=True), made(rule, seed=1, special=True), rows(FP8_ROWS)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with simulating():
        layer.prepare()
        assert layer.weight_data is None and layer.weight_scale is None and equal(layer.state_dict(), before)
        names = ("weight_prepared_float8_e4m3fn", "weight_row_factor_bits")
        places = [layer.get_buffer(name).data_ptr() for name in names]
        result = layer(x)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(x).nan_to_num(), result.nan_to_num()) and equal(twin.state_dict(), before)
        layer.load_state_dict(other.state_dict())
        assert equal(layer.state_dict(), other.state_dict())
        assert [layer.get_buffer(name).data_ptr() for name in names] == places, "where a captured graph reads them"
        assert torch.equal(layer(x).nan_to_num(), other(x).nan_to_num())
        monkeypatch.setattr(held_weight, "rewritten", lambda *_: None)
        if rule == "fp8":
            lossy = made(rule, special=True).prepare()
            assert not equal(lossy.state_dict(), before), "what packing rewrites must be kept"


def test_every_code_under_every_pair_of_scales_comes_back() -> None:
    """Each scale beside one that makes the row's factor: blocks that packing moves are among them."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 4)
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 4)
    scale[:, 1], scale[:, 2], scale[:, 3] = 0x7E, 0x38, 0x01
    weight = BlockScaledTensor(pack_e2m1(codes), scale, None)
    packed = prepare_weight(weight, dtype=E4M3)
    lost = rewritten(weight, packed)
    found = unpacked(packed, lost)
    assert torch.equal(found.data, weight.data) and torch.equal(found.rowmajor_scale()[0], scale)
    # row r has blocks of scale r, 448, 1 and 2**-9: the last is always moved, 1 never but beside a NaN
    places, rows_of_nan = lost.places.view(-1), [0x7F, 0xFF]
    block = [places[places % 4 == i] // 4 for i in range(4)]
    assert block[3].tolist() == [*range(256)] and block[2].tolist() == block[1].tolist() == rows_of_nan
    assert [x for x in block[0].tolist() if 0x30 <= x < 0x7F] == []


@pytest.mark.parametrize("rule", ["fp8", "auto"])
def test_mxfp4(rule: str) -> None:
    """Exact weights, and scales from which every byte comes back; a row whose scales lie too far apart is refused."""
    generator = torch.Generator().manual_seed(6)
    data = torch.randint(0, 256, (N, 64), dtype=torch.uint8, generator=generator)
    scale = torch.randint(118, 128, (N, 4), dtype=torch.uint8, generator=generator)
    scale[:, 0] += torch.arange(N, dtype=torch.uint8) % 3
    data[5, :16], data[7], scale[9, 1] = 0, 0, 3
    data[9, 16:32] = 0
    weight = BlockScaledTensor(data.to(backends.device()), scale.to(backends.device()), None, MXFP4)
    layer, x = MXFP4Linear(weight, input_rule=rule), rows(FP8_ROWS, 128)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with simulating():
        wanted = gemm(x, prepare_weight(weight, dtype=E4M3))
        assert layer(x).equal(wanted) and layer.prepare()(x).equal(wanted) and layer.weight_data is None
        assert equal(layer.state_dict(), before)
        scale[3, 2] = 140
        wide = BlockScaledTensor(data.to(backends.device()), scale.to(backends.device()), None, MXFP4)
        with pytest.raises(OperandError, match="in a row of an MXFP4 weight"):
            MXFP4Linear(wide, input_rule=rule).prepare()


def test_traced() -> None:
    layer, x = made("auto").requires_grad_(False), rows(FP8_ROWS + 2)
    with simulating():
        assert torch.compile(layer, fullgraph=True, backend="eager")(x).equal(layer(x)), "packed within the trace"
        layer.prepare()
        sizes = ({0: torch.export.Dim("m", min=FP8_ROWS, max=1024)},)
        # a part of a model: torch 2.13 cannot export a module that has a buffer that is None itself
        program = torch.export.export(torch.nn.Sequential(layer), (x,), dynamic_shapes=sizes).module()
        assert program(rows(FP8_ROWS)).equal(layer(rows(FP8_ROWS)))


def test_gradient_goes_straight_through() -> None:
    layer, x = made("fp8"), rows(5).requires_grad_()
    with simulating():
        layer.prepare()
        layer(x).sum().backward()
    values = layer.weight.dequantize(torch.bfloat16)
    assert torch.allclose(x.grad, torch.ones(5, N, dtype=x.dtype, device=x.device) @ values, rtol=1e-2, atol=1e-2)


@pytest.mark.sim_only("runs exact torch")
def test_models() -> None:
    """A calibrated model; GPTQ sees x as the layers will round it."""
    generator = torch.Generator().manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32))
    batches = [torch.randn(20, 64, generator=generator) for _ in range(2)]
    exact = model(batches[0]).detach()
    quantized, report = quantize_model(model, method="gptq", input_rule="fp8", calibration=batches)
    assert [layer.input_rule for layer in quantized if isinstance(layer, NVFP4Linear)] == ["fp8"] * 2
    error = (quantized(batches[0]) - exact).norm() / exact.norm()
    assert error < 0.25 and len(report.layers) == 2
    for wrong in ("fp9", "hessian"):
        with pytest.raises(OperandError, match=wrong):
            NVFP4Linear.from_linear(torch.nn.Linear(32, 32), input_rule=wrong)
