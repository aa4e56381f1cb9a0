"""Routers of transformers' mixtures that run as one ``route``: softmax, the largest, and their sum in one launch."""

from __future__ import annotations

import types
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from cute_nvfp4.errors import OperandError
from cute_nvfp4.ops.moe.route import route
from cute_nvfp4.runtime.backend import resolve

_SAMPLES = 8
_KEPT = "_cute_nvfp4_router"


class RouterForm(NamedTuple):
    """What a router makes of its logits. dtypes: of its weights, None for that of the logits, and of its ids."""

    scoring: str
    renormalize: bool
    dtype: torch.dtype | None
    ids_dtype: torch.dtype


def fuse_routers(model: torch.nn.Module) -> list[str]:
    """Has the routers of ``model`` use ``route`` where kernels run, and torch's operations elsewhere; their names.

    A router has a ``weight`` (E, H) and ``top_k``, and gives logits (T, E), weights (T, k) and ids (T, k) of rows, as
    those of Qwen3, Qwen2-MoE, Mixtral, OLMoE and gpt-oss do in transformers. What it makes of its logits is found by
    what it gives for a sample; one that makes something else of them stays as it is. The product stays torch's. Ids are
    the same but where logits are equal, of which ``route`` takes the lower number, or round to the same weight.
    """
    found = []
    for name, module in model.named_modules():
        if getattr(module, _KEPT, None) is None:
            form = form_of(module)
            if form is None:
                continue
            # an attribute of the instance: its class, which transformers looks for, and its tensors stay
            object.__setattr__(module, _KEPT, form)
            object.__setattr__(module, "forward", types.MethodType(_forward, module))
        found.append(name)
    return found


def form_of(module: torch.nn.Module) -> RouterForm | None:
    """What a module makes of its logits, if it is a router that ``route`` can be; else None."""
    weight, top = module._parameters.get("weight"), getattr(module, "top_k", None)
    # a forward that somebody has replaced already does more than its class says
    if weight is None or weight.ndim != 2 or weight.is_meta or type(top) is not int or "forward" in vars(module):
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_SAMPLES, weight.shape[1], generator=generator).to(weight)
    with torch.no_grad():
        try:
            logits, weights, ids = module(rows)
            if not torch.equal(logits, _logits(module, rows)):
                return None
            for scoring in ("softmax", "sigmoid"):
                for renormalize in (True, False):
                    want = route(logits, top, scoring=scoring, renormalize=renormalize, backend="reference")
                    # of equal logits another expert may have been taken
                    chosen = logits.gather(1, ids).equal(logits.gather(1, want.topk_ids.long()))
                    if chosen and torch.allclose(weights.float(), want.topk_weights, rtol=0.02, atol=1e-6):
                        dtype = None if weights.dtype is logits.dtype else weights.dtype
                        return RouterForm(scoring, renormalize, dtype, ids.dtype)
        except (AttributeError, IndexError, OperandError, RuntimeError, TypeError, ValueError):
            # a module of another kind
            return None
    return None


def _logits(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return linear(rows, module.weight, module._parameters.get("bias"))


def _forward(module: torch.nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, weights and ids of rows (…, H), as the class of ``module`` gives them."""
    followed = torch.is_grad_enabled() and (hidden_states.requires_grad or module.weight.requires_grad)
    if followed or resolve("auto", hidden_states.device).backend == "reference":
        return type(module).forward(module, hidden_states)
    form: RouterForm = getattr(module, _KEPT)
    logits = _logits(module, hidden_states.reshape(-1, module.weight.shape[1]))
    dtype = logits.dtype if form.dtype is None else form.dtype
    options = {"scoring": form.scoring, "renormalize": form.renormalize, "dtype": dtype, "ids_dtype": form.ids_dtype}
    ids, weights = route(logits, module.top_k, **options)
    return logits, weights, ids
