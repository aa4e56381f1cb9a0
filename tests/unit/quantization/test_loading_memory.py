"""What loading a checkpoint holds at once: its bytes, and no second copy of more than a layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.live_storages import LiveStorages

from cute_nvfp4 import NVFP4Linear, quantize, simulating
from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn import load_checkpoint
from cute_nvfp4.nn.checkpoint import Tensors
from cute_nvfp4.nn.layouts import COMPRESSED_TENSORS, MODELOPT, Layout, tensors_of

BLOCKS, WIDE = 48, 256
MOST = 1.05


def shell() -> torch.nn.Module:
    """Without memory: a head that is the embedding, a buffer, and layers."""
    with torch.device("meta"):
        layers = [torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(BLOCKS)]
        model = torch.nn.Sequential(torch.nn.Embedding(16, WIDE), *layers, torch.nn.BatchNorm1d(WIDE, affine=False))
        model.append(torch.nn.Linear(WIDE, 16, bias=False))
    model[-1].weight = model[0].weight
    return model


@pytest.fixture(scope="module", params=[MODELOPT, COMPRESSED_TENSORS], ids=lambda layout: layout.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the shell in two files."""
    place, generator = tmp_path_factory.mktemp(request.param.name), torch.Generator().manual_seed(3)
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    for i in range(BLOCKS):
        halves[i % 2] |= {f"{i + 1}.{n}": x for n, x in layer_tensors(request.param, generator).items()}
    halves[0] |= {"0.weight": torch.randn(16, WIDE, generator=generator)}
    norm = torch.nn.BatchNorm1d(WIDE, affine=False).state_dict()
    halves[1] |= {f"{BLOCKS + 1}.{name}": x for name, x in norm.items()}
    for i, tensors in enumerate(halves):
        save_file(tensors, place / f"{i}.safetensors")
    return place


def layer_tensors(layout: Layout, generator: torch.Generator) -> dict[str, torch.Tensor]:
    weight = quantize(torch.randn(WIDE, WIDE, generator=generator))
    return tensors_of(NVFP4Linear(weight, input_rule=None), layout)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def peak(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> int:
    """The most bytes of tensors at once; a file's are counted when they are read."""
    read = Tensors.read
    with LiveStorages() as live:

        def noted(self: Tensors, name: str) -> torch.Tensor:
            found = read(self, name)
            live.note(found)
            return found

        monkeypatch.setattr(Tensors, "read", noted)
        run()
    return live.peak


def test_a_model_without_memory_gets_the_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shell()
    found = peak(monkeypatch, lambda: load_checkpoint(model, folder, input_rule=None))
    assert size_of(folder) <= 1.02 * found and found <= MOST * size_of(folder)
    x = torch.randn(3, WIDE)
    assert model[1](x).isfinite().all() and model[-1].weight is model[0].weight
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_two_copies_would_be_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure: a copy of every layer, all at once."""

    def twice() -> list[torch.Tensor]:
        model = shell()
        load_checkpoint(model, folder, input_rule=None)
        return [x.clone() for x in model.state_dict().values()]

    assert peak(monkeypatch, twice) > 1.9 * size_of(folder)


def held(model: torch.nn.Module) -> int:
    """Bytes of a model's tensors, those that no state_dict has included."""
    storages = [x.untyped_storage() for x in (*model.parameters(), *model.buffers())]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


@pytest.mark.sim_only("prepares for Hopper without one")
def test_a_prepared_model_has_one_copy(folder: Path) -> None:
    model = shell()
    load_checkpoint(model, folder, input_rule=None, backend="sim")
    layers = [layer for layer in model.modules() if isinstance(layer, NVFP4Linear)]
    with simulating("sm_90a"):
        for layer in layers[:8]:
            layer.prepare()
            assert held(model) <= MOST * size_of(folder)
    assert all(layer.weight_data is None for layer in layers[:8])


@pytest.mark.sim_only("prepares for Hopper without one")
def test_prepare_under_a_recording_mode_is_an_error() -> None:
    layer = NVFP4Linear(quantize(torch.ones(32, 32)), input_rule=None, backend="sim")
    with simulating("sm_90a"), LiveStorages(), pytest.raises(OperandError, match="mode of torch"):
        layer.prepare()


def test_nothing_is_changed_by_a_checkpoint_that_does_not_fit(folder: Path, tmp_path: Path) -> None:
    model = shell()
    model[BLOCKS] = torch.nn.Linear(WIDE, 2 * WIDE, bias=False, device="meta")
    with pytest.raises(OperandError, match=f"weight of {BLOCKS}"):
        load_checkpoint(model, folder)
    assert all(x.is_meta for x in model.state_dict().values())


def test_what_no_file_has_is_named(folder: Path) -> None:
    model = shell()
    model[1].register_buffer("turn", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(OperandError, match=r"1\.turn"):
        load_checkpoint(model, folder)
