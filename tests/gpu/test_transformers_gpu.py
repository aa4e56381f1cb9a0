"""Checkpoints that transformers loads, on a GPU: logits beside float32's on the CPU, and every packed byte saved again.

What else loading does is in ``tests/integrations``, and needs no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: cute_nvfp4[transformers]")
pytest.importorskip("accelerate", reason="transformers asks accelerate to place modules")
sys.path.append(str(Path(__file__).resolve().parents[1] / "integrations"))

from test_transformers import IDS, load, module, published, published_mixture, same_bits, tensors

pytestmark = pytest.mark.gpu


def far(x: torch.Tensor, y: torch.Tensor) -> float:
    """|x − y| / |y|."""
    return float((x.float().cpu() - y.float().cpu()).norm() / y.float().cpu().norm())


@torch.inference_mode()
@pytest.mark.parametrize("publish, layout", [(published, "modelopt"), (published_mixture, "compressed-tensors")])
def test_logits_and_bytes(publish, layout: str, tmp_path: Path) -> None:
    module.register(compressed_tensors=True)
    exact, written = publish(tmp_path / "given", layout)
    model = load(tmp_path / "given", dtype=torch.bfloat16, device_map={"": "cuda"})
    want, got = exact(IDS).logits, model(IDS.cuda()).logits
    assert far(got, want) < 0.05 < far(got.roll(1, 1), want)
    model.save_pretrained(tmp_path / "saved")
    saved = tensors(tmp_path / "saved")
    packed = {n: x for n, x in written.items() if x.element_size() == 1 and saved[n].dtype is x.dtype}
    assert len(packed) > 20 and same_bits({n: saved[n] for n in packed}, packed)
