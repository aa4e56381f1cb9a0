"""Runs routers of transformers' mixtures as one ``route``: softmax, choice, and sum in one launch."""

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
    """What a router computes from its logits. dtypes: that of its weights (None: the logits') and that of its ids."""

    scoring: str
    renormalize: bool
    dtype: torch.dtype | None
    ids_dtype: torch.dtype


def fuse_routers(model: torch.nn.Module) -> list[str]:
    """Makes the routers of ``model`` use ``route`` if kernels run, else torch's operations; returns their names.

    A router has a ``weight`` (E, H) and ``top_k``, and returns logits (T, E), weights (T, k) and ids (T, k) of rows, as
    those of Qwen3, Qwen2-MoE, Mixtral, OLMoE and gpt-oss do in transformers. A sample shows what it computes from its
    logits; a router that computes something else stays as it is. torch still computes the logits. Ids are the same,
    except for logits that are equal, of which ``route`` takes the lower id, or that round to the same weight.
    """
    found = []
    for name, module in model.named_modules():
        if getattr(module, _KEPT, None) is None:
            form = form_of(module)
            if form is None:
                continue
            # attributes of the instance: its class, which transformers looks for, and its tensors stay
            object.__setattr__(module, _KEPT, form)
            object.__setattr__(module, "forward", types.MethodType(_forward, module))
        found.append(name)
    return found


def form_of(module: torch.nn.Module) -> RouterForm | None:
    """What a module computes from its logits, if it is a router that ``route`` can replace; else None."""
    weight, top = module._parameters.get("weight"), getattr(module, "top_k", None)
    # a forward that somebody replaced does more than its class says
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
                    # among equal logits another expert may have been taken
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
    """Logits, weights and ids of rows (…, H), as the class of ``module`` returns them."""
    followed = torch.is_grad_enabled() and (hidden_states.requires_grad or module.weight.requires_grad)
    if followed or resolve("auto", hidden_states.device).backend == "reference":
        return type(module).forward(module, hidden_states)
    form: RouterForm = getattr(module, _KEPT)
    logits = _logits(module, hidden_states.reshape(-1, module.weight.shape[1]))
    dtype = logits.dtype if form.dtype is None else form.dtype
    options = {"scoring": form.scoring, "renormalize": form.renormalize, "dtype": dtype, "ids_dtype": form.ids_dtype}
    ids, weights = route(logits, module.top_k, **options)
    return logits, weights, ids
