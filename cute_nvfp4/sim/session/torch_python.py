"""The hooks for backward passes, for threads, and for ``torch.compile``, which leaves functions eager."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from cute_nvfp4.sim.session.memory import tensors_in
from cute_nvfp4.sim.session.patches import Patches
from cute_nvfp4.sim.session.protocol import Session


def install(patches: Patches, session: Session) -> None:
    """Installs these hooks of ``session``."""
    backward = _running_backward(torch.autograd.graph._engine_run_backward, session)
    patches.set(torch.autograd.graph, "_engine_run_backward", backward)
    patches.set(torch.autograd, "_engine_run_backward", backward)
    patches.set(threading.Thread, "_bootstrap_inner", _in_session(threading.Thread._bootstrap_inner, session))
    patches.set(torch, "compile", _eager(session))
    patches.set(torch.nn.Module, "compile", lambda module, *_, **__: None)
    patches.set(torch.version, "cuda", "13.0")
    if dynamo := sys.modules.get("torch._dynamo"):  # for functions compiled before the session
        patches.set(dynamo.eval_frame, "_stance", type(dynamo.eval_frame._stance)("force_eager"))


def _running_backward(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            places = [session.memory.device_index(t) for t in tensors_in(list(outputs))]
        with session.dispatch.backward(max((i for i in places if i is not None), default=-1)):
            return original(outputs, *args, **kwargs)

    return run


def _in_session(original: Callable[..., None], session: Session) -> Callable[..., None]:
    def _bootstrap_inner(thread: threading.Thread) -> None:
        with session.modes():
            original(thread)

    return _bootstrap_inner


def _eager(session: Session) -> Callable[..., Any]:
    def compile(model: Any = None, **options: Any) -> Any:
        """Returns the function or module unchanged."""
        session.runtime.say("torch.compile leaves functions as they are: torch runs eagerly in a simulated session")
        return model if model is not None else lambda function: function

    return compile
