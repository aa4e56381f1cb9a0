"""docs/how-to/models.md, "Measure your own": the program judges a checkpoint, and tells a worse one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from support import forked

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkpoint_is_judged(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from cute_nvfp4.nn.quantize_files import quantize_files

    page = (ROOT / "docs/how-to/models.md").read_text()
    program = re.search(r"<!-- file: judge_checkpoint.py -->\n```python\n(.*?)```", page, re.DOTALL)[1]
    (tmp_path / "judge.py").write_text(program.replace('"cuda"', '"cpu"'))
    words = "a b c d e f g h".split()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a").save_pretrained(tmp_path / "exact")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_key_value_heads=2, initializer_range=0.5, **sizes))
    model.bfloat16().save_pretrained(tmp_path / "exact")
    quantize_files(tmp_path / "exact", tmp_path / "four_bits")
    (tmp_path / "text.txt").write_text(" ".join(words) * 200)
    divergences = []
    for other in ("exact", "four_bits"):
        done = forked.run([sys.executable, "judge.py", "exact", other, "text.txt"], capture_output=True, text=True,
                          cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=280)  # fmt: skip
        assert done.returncode == 0, done.stderr
        divergences.append(float(re.search(r"Divergence\(mean=([^,]+)", done.stdout)[1]))
    assert divergences[0] == 0 < divergences[1]
