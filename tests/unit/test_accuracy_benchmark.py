"""What ``benchmarks/accuracy.py`` does besides running the model: its file, its sample, its figures, its table."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import accuracy as benchmark
from accuracy import CASES, Emulated, Outcome, compared, sample
from smollm2 import read_gguf, state_dict

from cute_nvfp4 import NVFP4Linear, quantize


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(path: Path, tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> Path:
    """A file as llama.cpp writes it, with two entries of metadata."""
    entries = text("llama.block_count") + struct.pack("<II", 4, 30)
    entries += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("é")
    infos, data = b"", b""
    for name, (kind, shape, content) in tensors.items():
        sizes = struct.pack(f"<{len(shape)}Q", *shape[::-1])
        infos += text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2) + entries + infos
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def test_a_gguf_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codes, bytes_ = rng.integers(0, 16, (4, 32)), rng.integers(-127, 128, (2, 32))
    d, m = np.float16([0.5, -0.25, 2, 1]), np.float16([1, 0, -3, 0.125])
    q41 = b"".join(
        struct.pack("<ee", d[i], m[i]) + bytes(int(low | high << 4) for low, high in zip(codes[i, :16], codes[i, 16:]))
        for i in range(4)
    )
    q80 = b"".join(struct.pack("<e", d[i]) + bytes_[i].astype(np.int8).tobytes() for i in range(2))
    plain = np.float32([1, 2, 3])
    path = gguf(tmp_path / "x.gguf", {"a": (3, (2, 64), q41), "b": (0, (3,), plain.tobytes()), "c": (8, (2, 32), q80)})
    found = read_gguf(path)
    assert found.metadata == {"llama.block_count": 30, "tokenizer.ggml.tokens": ["a", "é"]}
    want = (codes * d[:, None].astype(float) + m[:, None].astype(float)).reshape(2, 64)
    assert np.array_equal(found.tensors["a"], want) and np.array_equal(found.tensors["b"], plain)
    assert np.array_equal(found.tensors["c"], bytes_ * d[:2, None].astype(float))
    path.write_bytes(b"GGML" + path.read_bytes()[4:])
    with pytest.raises(ValueError, match="no GGUF file"):
        read_gguf(path)


def test_rows_that_a_rotation_pairs_go_apart() -> None:
    """Row 2 · i + j of a head is row i of half j."""
    value = np.arange(8, dtype=np.float32)[:, None]
    found = state_dict(read_gguf_like({"blk.3.attn_q.weight": value, "token_embd.weight": value}), 2, 1)
    name = "model.layers.3.self_attn.q_proj.weight"
    assert found[name][:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]


def read_gguf_like(tensors: dict[str, np.ndarray]) -> Any:
    from smollm2 import Gguf

    return Gguf({}, tensors)


def test_samples_do_not_overlap() -> None:
    judged, calibration = sample(list(range(1000)), 4, 40, 2)
    assert judged.shape == (4, 40) and calibration.shape == (8, 40)
    assert len({*judged.flatten().tolist(), *calibration.flatten().tolist()}) == 12 * 40
    with pytest.raises(SystemExit, match="no room"):
        sample(list(range(400)), 4, 40, 2)


def test_figures() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, generator=generator)
    other = logits + 0.3 * torch.randn(3, 7, 11, generator=generator)
    tokens = torch.randint(11, (3, 7, 1), generator=generator)
    exact, found = (
        Outcome(-x.log_softmax(-1).gather(-1, tokens)[..., 0], x.log_softmax(-1).bfloat16()) for x in (logits, other)
    )
    same = compared(exact, exact)
    assert same["loss"] == [0, 0] and same["divergence"] == [0, 0] and same["agreement"] == [1, 0]
    row = compared(found, exact)
    p, q = (torch.distributions.Categorical(logits=x.double()) for x in (logits, other))
    divergence = torch.distributions.kl_divergence(p, q).mean(1)
    assert row["divergence"] == pytest.approx([float(divergence.mean()), float(divergence.std()) / 3**0.5], rel=0.05)
    assert row["perplexity"] == pytest.approx(float(found.losses.mean().exp()))
    assert row["agreement"][0] == pytest.approx(float((logits.argmax(-1) == other.argmax(-1)).float().mean()))


@pytest.mark.parametrize("rule", [None, "max", "fp8"])
def test_emulated_layers_give_the_same(rule: str | None) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 32, bias=False)
    layer = NVFP4Linear(quantize(linear.weight.detach()), input_rule=rule, input_global_scale=torch.tensor(0.002))
    x = torch.randn(5, 64)
    torch.testing.assert_close(Emulated(layer)(x), layer(x), rtol=1e-5, atol=1e-5)


def test_the_page_has_the_record() -> None:
    """What ``--table`` would write is there."""
    record = json.loads(benchmark.RESULTS.read_text())
    assert benchmark.table(record) in benchmark.PAGE.read_text()
    assert all(benchmark.case_of(row) in CASES for row in record["rows"])
    lines = benchmark.table(record).splitlines()
    assert len(lines) == 2 + len(record["rows"]) and f"{record['rows'][0]['perplexity']:.2f}" in "".join(lines)
