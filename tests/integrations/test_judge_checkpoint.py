"""The programs of docs/how-to/models.md: from a checkpoint to tokens, and one that judges a checkpoint."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from support import forked

pytest.importorskip("transformers")

WORDS = "a b c d e f g h".split()
ROOT = Path(__file__).resolve().parents[2]


def program(name: str) -> str:
    """A file that the page about models has."""
    page = (ROOT / "docs/how-to/models.md").read_text()
    return re.search(rf"<!-- file: {name} -->\n```python\n(.*?)```", page, re.DOTALL)[1]


def run(folder: Path, *arguments: str) -> str:
    """What a program in a folder prints."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "cwd": folder, "env": env, "timeout": 280}
    done = forked.run([sys.executable, *arguments], **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_models(exact: Path, four_bits: Path) -> None:
    """A small model with a tokenizer of eight words, and what the command makes of it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from cute_nvfp4.nn.quantize_files import quantize_files

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a").save_pretrained(exact)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_key_value_heads=2, initializer_range=0.5, **sizes))
    model.bfloat16().save_pretrained(exact)
    quantize_files(exact, four_bits)


def test_from_a_checkpoint_to_tokens(tmp_path: Path) -> None:
    """The page's program, with a model that is there: its text, and twelve tokens more at most."""
    write_models(tmp_path / "exact", tmp_path / "SmolLM2-NVFP4")
    (tmp_path / "tokens.py").write_text(program("tokens.py").replace("torch.cuda.is_available()", "False"))
    words = run(tmp_path, "tokens.py").split()
    assert {*words} <= {*WORDS} and 12 < len(words)


def test_a_checkpoint_is_judged(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(program("judge_checkpoint.py").replace('"cuda"', '"cpu"'))
    write_models(tmp_path / "exact", tmp_path / "four_bits")
    (tmp_path / "text.txt").write_text(" ".join(WORDS) * 200)
    divergences = []
    for other in ("exact", "four_bits"):
        found = run(tmp_path, "judge.py", "exact", other, "text.txt")
        divergences.append(float(re.search(r"Divergence\(mean=([^,]+)", found)[1]))
    assert divergences[0] == 0 < divergences[1]
