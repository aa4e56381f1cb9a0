"""Tensor parallel plans of transformers for 4-bit layers: the shard that a rank reads, and what it exchanges."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.nn.loaded_shards import FEWER, Cut, check_cut
from cute_nvfp4.nn.stored import StoredExperts, StoredLinear

COLUMNS = {"colwise": False, "packed_colwise": False, "colwise_rep": True, "colwise_gather_output": True}
"""Styles that cut rows (N) of W, and whether each rank gets all columns of the result."""
ROWS = {"rowwise": False, "rowwise_rep": True, "rowwise_split_input": True}
"""Styles that cut columns (K) of W, and whether each rank is given all columns of x."""
WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Styles whose layers are whole on every rank."""


def ranks(model: Any) -> int:
    """The number of ranks among which a model's matrices are divided while it is loaded.

    Raises:
        OperandError: the model is to be distributed in another way, too.
    """
    wanted = getattr(model.config, "distributed_config", None)
    if not hasattr(wanted, "tp_size"):
        return 1
    others = [name for name in ("fsdp_size", "dp_replicate_size", "pp_size") if getattr(wanted, name, 1) > 1]
    if others:
        raise OperandError.of("distributed_config", got=f"{', '.join(others)} above 1", expected="tp_size and ep_size")
    if wanted.ep_size not in (1, wanted.tp_size):
        got = f"ep_size {wanted.ep_size}, tp_size {wanted.tp_size}"
        hint = "Other rows on each rank: shard_experts and ExpertParallel (docs/how-to/use_two_gpus.md)."
        raise OperandError.of("distributed_config", got=got, expected="ep_size = tp_size, or 1", hint=hint)
    return wanted.tp_size


def experts_of_rank(model: Any, name: str, count: int) -> range:
    """The experts, by index, that this rank reads of ``count``: all, unless ranks hold whole experts (``ep_size``).

    Then the loader is told not to miss the other experts of ``name`` in the file.

    Raises:
        OperandError: the experts do not divide by the ranks.
    """
    size = getattr(getattr(model.config, "distributed_config", None), "ep_size", 1)
    if size == 1:
        return range(count)
    if count % size:
        raise OperandError.of(f"{name} over {size} ranks", got=count, expected=f"a multiple of {size}", hint=FEWER)
    others = {rf"^{re.escape(name)}\."}
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *others}
    mine = count // size
    return range(dist.get_rank() * mine, (dist.get_rank() + 1) * mine)


def plan_whole_experts(model: Any, plan: dict[str, str]) -> None:
    """Removes the rules for stacks from a plan of expert parallelism, since each rank reads only its experts."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard as generic

    for name, module in model.named_modules():
        if isinstance(module, StoredExperts):
            for stack in (module.first, "down_proj"):
                plan.pop(f"{generic(name)}.{stack}", None)


def planned(model: Any, plan: dict[str, str], layers: Mapping[str, StoredLinear]) -> dict[str, str]:
    """The styles of the layers that a plan of transformers divides, by name.

    plan: is changed in place: experts that a file stores one by one get the rules of their stacks. layers: all layers
    outside of such experts.

    Raises:
        OperandError: layers do not divide by the ranks, or do not have these styles.
    """
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard as generic

    count = ranks(model)
    experts = {name: x for name, x in model.named_modules() if isinstance(x, StoredExperts)}
    for name, module in experts.items():
        _plan_experts(generic(name), module, plan)
    if count == 1:
        return {}
    override = model.config.distributed_config.tp_plan
    rules = plan | (override if isinstance(override, dict) else {})
    found = {name: rules[generic(name)] for name in layers if generic(name) in rules}
    for name, style in found.items():
        _check(name, style, layers[name], count)
    for path, module in experts.items() if model.config.distributed_config.ep_size == 1 else ():
        for name, layer in module.named_modules(prefix=path):
            if isinstance(layer, StoredLinear) and generic(name) in rules:
                _check(name, rules[generic(name)], layer, count)
    _check_heads(model, found, count)
    return found


def _plan_experts(name: str, module: StoredExperts, plan: dict[str, str]) -> None:
    """Replaces the rules for stacks of experts by rules for single experts."""
    first, second = (plan.pop(f"{name}.{stack}", None) for stack in (module.first, "down_proj"))
    if first in COLUMNS and second in ROWS:
        plan |= {f"{name}.*.{matrix}": "colwise" for matrix in module.names[:-1]}
        plan[f"{name}.*.{module.names[-1]}"] = "rowwise"


def _check(name: str, style: str, layer: StoredLinear, count: int) -> None:
    if style in WHOLE:
        return
    if style not in COLUMNS and style not in ROWS:
        expected = ", ".join((*COLUMNS, *ROWS, *WHOLE))
        raise OperandError.of(f"tensor parallel style of {name}", got=repr(style), expected=f"one of {expected}")
    block = 1 if layer.layout is None else layer.layout.format.block
    n = layer.out_features // (2 if style == "packed_colwise" else 1)
    check_cut(name, "columns" if style in COLUMNS else "rows", n, layer.in_features, block, count)


def _check_heads(model: Any, styles: Mapping[str, str], count: int) -> None:
    """Raises if a rank would get part of a head of keys and values."""
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    cut = any(name.endswith(".k_proj") and COLUMNS.get(style) is False for name, style in styles.items())
    if cut and isinstance(heads, int) and heads % count:
        expected = f"a multiple of {count}"
        what = f"num_key_value_heads over {count} ranks"
        raise OperandError.of(what, got=heads, expected=expected, hint=FEWER)


def exchanging(made: torch.nn.Module, old: torch.nn.Linear, cut: Cut, style: str) -> torch.nn.Module:
    """A layer made from a shard, which exchanges with the other ranks as its style says.

    An ``NVFP4Linear`` exchanges itself; torch's layer, in 16 bits, gets transformers' hooks.
    """
    if isinstance(made, NVFP4Linear):
        made.shard = cut.shard(gathered=COLUMNS.get(style, False), split=ROWS.get(style, False))
        return made
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    mesh, placements = cut.like.device_mesh, cut.like.placements
    sizes = {"bias": made.bias is not None, "device": "meta", "dtype": made.weight.dtype}
    whole = torch.nn.Linear(old.in_features, old.out_features, **sizes)
    of_bias = placements if cut.axis == "columns" else [Replicate()]
    for name, where in (("weight", placements), ("bias", of_bias)):
        mine = getattr(made, name)
        if mine is not None:
            tensor = DTensor.from_local(mine.detach(), mesh, where, run_check=False)
            setattr(whole, name, torch.nn.Parameter(tensor, requires_grad=False))
    return ALL_PARALLEL_STYLES[style].install_forward(whole, mesh)
