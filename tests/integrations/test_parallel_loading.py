"""``from_pretrained`` of several processes: each reads its shards, together they give what one process gives, and what
they save is the file that they read."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import same_bits
from support.ranks import ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed: cute_nvfp4[transformers]")
pytest.importorskip("transformers.distributed.parallel_utils", reason="this transformers divides models otherwise")

from test_transformers import IDS, load, published, published_mixture, small, tensors  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

from cute_nvfp4.errors import OperandError  # noqa: E402
from cute_nvfp4.integrations import transformers as module  # noqa: E402
from cute_nvfp4.nn.experts import PackedExperts  # noqa: E402
from cute_nvfp4.nn.stored import linears  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="transformers would divide among GPUs")
FOUR = {"num_key_value_heads": 4, "moe_intermediate_size": 64}
"""Sizes that four ranks can divide."""
WHOLE_INPUTS = {
    **{f"model.layers.*.mlp.{name}_proj": "colwise_gather_output" for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": "rowwise_split_input",
}
"""A plan with the other styles of transformers."""


WHOLE_EXPERTS: dict[str, str] = {}
"""In the place of a plan: every rank has some of the experts whole."""


MIXTURES = {"mixture": None, "mixture, whole experts": WHOLE_EXPERTS}


def counted() -> list[int]:
    """Bytes of codes and scales that loading reads from now on, tensor by tensor."""
    from transformers import core_model_loading as loading

    read: list[int] = []

    def noting(function: Any) -> Any:
        def noted(*given: Any, **options: Any) -> Any:
            x = function(*given, **options)
            if x is not None and x.ndim > 1 and x.element_size() == 1:
                read.append(x.nbytes)
            return x

        return noted

    for place, name in ((loading.DtensorShardOperation, "shard_tensor"), (loading, "_materialize_copy")):
        setattr(place, name, noting(getattr(place, name)))
    return read


@torch.inference_mode()
def run(model: Any) -> dict[str, torch.Tensor]:
    """What a model gives: logits, and tokens that it generates."""
    tokens = model.generate(IDS[:1], max_new_tokens=4, do_sample=False)
    return {"logits": model(IDS).logits, "tokens": tokens}


def loaded(rank: int, folder: Path, plans: dict[str, dict[str, str] | None]) -> None:
    """Loads, runs and saves the checkpoints in ``folder`` as one rank does: name and plan of each."""
    module.register(compressed_tensors=True)
    read, count = counted(), torch.distributed.get_world_size()
    for name, plan in plans.items():
        read.clear()
        options = {"ep_size": count} if plan == WHOLE_EXPERTS else {} if plan is None else {"tp_plan": plan}
        model = load(folder / name.split(",")[0], distributed_config=DistributedConfig(tp_size=count, **options))
        found = run(model) | {"read": sum(read)}
        model.save_pretrained(folder / f"{name} saved")
        with pytest.raises(OperandError, match="got a divided model"):
            model.dequantize()
        torch.save(found, folder / f"{name} {rank}.pt")
    if count == 2:
        os.environ["WORLD_SIZE"] = "2"
        torch.save(run(load(folder / "llama", tp_plan="auto")), folder / f"auto {rank}.pt")


def check(folder: Path, name: str, count: int) -> None:
    """Each rank gives what one process gives, has read its share, and they saved what one process saves."""
    model = load(folder / name.split(",")[0])
    want = run(model)
    for rank in range(count):
        found = torch.load(folder / f"{name} {rank}.pt")
        torch.testing.assert_close(found["logits"], want["logits"], rtol=1e-4, atol=1e-4)
        assert found["tokens"].equal(want["tokens"])
        given = tensors(folder / name.split(",")[0])
        # every quantized layer is divided, and its 4-bit scales with it
        assert found["read"] == sum(x.nbytes for x in given.values() if x.ndim > 1 and x.element_size() == 1) // count
    model.save_pretrained(folder / "one saved")
    assert same_bits(tensors(folder / f"{name} saved"), tensors(folder / "one saved"))


def test_two_processes_are_one(tmp_path: Path) -> None:
    """A Llama with biases and a layer in FP8 by two plans, and a mixture in compressed-tensors' layout."""
    module.register(compressed_tensors=True)
    published(tmp_path / "llama", "modelopt")
    published_mixture(tmp_path / "mixture", "compressed-tensors")
    ranks(loaded, tmp_path, {"llama": None, "llama, whole inputs": WHOLE_INPUTS, **MIXTURES})
    for name in ("llama", "llama, whole inputs", *MIXTURES):
        check(tmp_path, name, 2)
    for rank in range(2):
        found = [torch.load(tmp_path / f"{name} {rank}.pt") for name in ("llama", "auto")]
        assert found[0]["logits"].equal(found[1]["logits"])


def test_four_processes_are_one(tmp_path: Path) -> None:
    """A rank's share of a row of ``down_proj`` is one block."""
    published_mixture(tmp_path / "mixture", "modelopt", **FOUR)
    ranks(loaded, tmp_path, MIXTURES, count=4)
    for name in MIXTURES:
        check(tmp_path, name, 4)


def planned(folder: Path, **options: Any) -> Any:
    """A checkpoint's model on "meta", as a loader has it before it divides it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.distributed_config = DistributedConfig(**options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    quantizer = module.CuteNvfp4Quantizer(module.PublishedConfig(quant_method="modelopt"))
    quantizer._process_model_before_weight_loading(model, checkpoint_files=[folder / "model.safetensors"])
    quantizer.update_parallel_plan(model, model.tp_plan)
    return model


@pytest.mark.parametrize(
    "options, words",
    [
        ({"tp_size": 4}, r"columns \(K\) of .*down_proj over 4 ranks: got 96, expected a multiple of 64 .*fewer ranks"),
        ({"tp_size": 3}, r"rows \(N\) of .*k_proj over 3 ranks: got 32, expected a multiple of 3"),
        ({"tp_size": 2, "tp_plan": {"model.layers.*.mlp.up_proj": "all_reduce"}}, r"got 'all_reduce', expected one of"),
        ({"tp_size": 2, "fsdp_size": 2, "ep_size": 2}, r"got fsdp_size above 1"),
        ({"fsdp_size": 2}, r"got fsdp_size above 1"),
    ],
)
def test_what_cannot_be_divided(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    published(tmp_path / "given", "modelopt", mixed=False)
    with pytest.raises(OperandError, match=f"(?s){words}"):
        planned(tmp_path / "given", **options)


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    published(tmp_path / "given", "modelopt", small(intermediate_size=128), mixed=False)
    with pytest.raises(OperandError, match="num_key_value_heads over 4 ranks: got 2, expected a multiple of 4"):
        planned(tmp_path / "given", tp_size=4)
    assert planned(tmp_path / "given", tp_size=2).tp_plan["model.layers.*.mlp.up_proj"] == "colwise"


def test_rules_of_experts(tmp_path: Path) -> None:
    """Rules of stacks become rules of the experts that a file has one by one."""
    published_mixture(tmp_path / "given", "modelopt")
    plan = planned(tmp_path / "given", tp_size=2).tp_plan
    rules = {name.rpartition("experts.")[2]: style for name, style in plan.items() if "experts." in name}
    assert rules == {"*.gate_proj": "colwise", "*.up_proj": "colwise", "*.down_proj": "rowwise"}
    with pytest.raises(OperandError, match=r"columns \(K\) of .*experts.0.down_proj over 4 ranks: got 32"):
        planned(tmp_path / "given", tp_size=4)


def test_whole_experts_that_do_not_divide(tmp_path: Path) -> None:
    published_mixture(tmp_path / "given", "modelopt")
    with pytest.raises(OperandError, match=r"mlp.experts over 3 ranks: got 4, expected a multiple of 3.*fewer ranks"):
        planned(tmp_path / "given", tp_size=3, ep_size=3)
    with pytest.raises(OperandError, match=r"got ep_size 4, tp_size 2, expected ep_size = tp_size"):
        module.ranks(SimpleNamespace(config=SimpleNamespace(distributed_config=SimpleNamespace(tp_size=2, ep_size=4))))


def test_a_model_in_16_bits_is_not_divided(tmp_path: Path) -> None:
    model = small()
    model.config.distributed_config = DistributedConfig(tp_size=2)
    quantizer = module.CuteNvfp4Quantizer(module.CuteNvfp4Config(), pre_quantized=False)
    with pytest.raises(OperandError, match="expected a checkpoint in 4 bits"):
        quantizer._process_model_before_weight_loading(model)


def test_one_process_has_no_shards(tmp_path: Path) -> None:
    published_mixture(tmp_path / "given", "modelopt")
    model = load(tmp_path / "given")
    layers = [*linears(model).values(), *(x for x in model.modules() if isinstance(x, PackedExperts))]
    assert len(layers) > 4 and all(layer.shard is None for layer in layers)
