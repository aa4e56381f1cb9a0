"""How transformers loads our checkpoints: where tensors go, and how many bytes of them there are at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.live_storages import LiveStorages
from test_transformers import IDS, load, module, published, transformers

MOST = 1.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ModelOpt's, of so many layers that one is a small part of them."""
    place = tmp_path_factory.mktemp("given")
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    published(place, "modelopt", transformers.LlamaForCausalLM(config).eval(), mixed=False)
    return place


def test_a_model_is_held_once_while_it_is_loaded(folder: Path) -> None:
    module.register()
    with LiveStorages() as live:
        model = load(folder)
        # what no operation has touched is counted, too
        live.note([*model.parameters(), *model.buffers()])
    size = (folder / "model.safetensors").stat().st_size
    assert 0.9 * size < live.peak <= MOST * size


@torch.inference_mode()
@pytest.mark.parametrize("places", ["cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}], ids=str)
def test_a_map_of_devices(folder: Path, places: str | dict[str, str]) -> None:
    pytest.importorskip("accelerate", reason="transformers asks accelerate to place modules")
    module.register()
    model = load(folder, device_map=places)
    assert model(IDS).logits.equal(load(folder)(IDS).logits) and model.device.type == "cpu"
