"""What ``benchmarks/through_transformers.py`` does without a GPU: its checkpoint, loaded, and its steps' times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: cute_nvfp4[transformers]")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import through_transformers as benchmark  # noqa: E402
from generate_model import TINY  # noqa: E402

from cute_nvfp4.nn.stored import linears  # noqa: E402


@torch.inference_mode()
def test_a_drawn_checkpoint_decodes(tmp_path: Path) -> None:
    """The model in 4 bits and the decoded one give the same logits, neither all alike nor without bounds."""
    import cute_nvfp4.integrations.transformers  # noqa: F401 (registers NVFP4)

    size = benchmark.write_checkpoint(TINY, tmp_path, "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert len(linears(model)) == 7 * TINY.layers
    assert size > sum(layer.weight_data.nbytes for layer in linears(model).values())
    ids = torch.arange(12)[None]
    want = model(ids).logits
    assert len(benchmark.seconds_of_steps(model, ids, 5)) == 3
    got = model.dequantize()(ids).logits
    assert not linears(model) and 1e-3 < want.std() < 100
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
