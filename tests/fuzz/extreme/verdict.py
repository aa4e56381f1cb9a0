"""One call, run and judged."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from support.exact_sums import wrong

from cute_nvfp4 import simulating
from cute_nvfp4.errors import OperandError, OperandTypeError, TargetError

from . import others, products
from .axes import COMPUTED, REFERENCE, Call
from .problems import Impossible, Tensors

OURS = (OperandError, OperandTypeError, TargetError)
TRIALS = {**products.TRIALS, **others.TRIALS}
OPTIONAL = (
    "bias",
    "alpha",
    "out",
    "up",
    "weight",
    "residual",
    "status",
    "a.global_scale",
    "b.global_scale",
    "global_scale",
    "out_global_scale",
)
"""Arguments that may be None, which means something else then."""
SCALARS = ("alpha", "a.global_scale", "b.global_scale", "global_scale", "out_global_scale", "status")
"""Device scalars, which may have any number of dimensions."""
LIKE_ANYWAY = {
    "none": (*OPTIONAL, "x"),
    "half": ("bias", "out", "x", "weight", "up", "residual"),
    "scalar": SCALARS,
    "wider": SCALARS,
    "number": ("alpha", "global_scale", "out_global_scale", "offsets"),
    "text": ("global_scale",),
    "array": ("offsets",),
    # what a call does without numbers: shapes
    "meta": ("x", "scale"),
    # no rows of a group
    "empty": ("x",),
}
"""Of a kind the arguments that may be of it."""


class Verdict(NamedTuple):
    """kind: "right", "refused", "impossible"; or a failure: "wrong", "foreign" (an exception that is not ours), or
    "accepted" (a kind that must be refused). launches: kernels that ran."""

    kind: str
    text: str = ""
    launches: int = 0

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "foreign", "accepted")


def judge(call: Call) -> Verdict:
    """Runs a call and says what came of it."""
    sim = contextlib.nullcontext([]) if call.arch == REFERENCE else simulating(call.arch, checks=False)
    with sim as runs:
        return _judged(call)._replace(launches=len(runs))


def _judged(call: Call) -> Verdict:
    tensors = Tensors(call)
    try:
        run, expected = TRIALS[call.function](call, tensors, "reference" if call.arch == REFERENCE else "sim")
        if not tensors.used:
            return Verdict("impossible", f"no argument {call.argument}")
        found = run()
    except Impossible as error:
        return Verdict("impossible", str(error))
    except OURS as error:
        worded = "got" in str(error) and "expected" in str(error)
        return Verdict("refused" if worded else "foreign", str(error))
    except Exception as error:
        return Verdict("foreign", f"{type(error).__name__}: {str(error)[:300]}")
    finally:
        while torch._C._functorch.maybe_current_level() is not None:
            torch._C._functorch._vmap_decrement_nesting()
    if call.kind in ("expanded", "reversed"):
        return Verdict("right", "other numbers, which are not compared")
    if call.kind and call.kind not in COMPUTED:
        if call.argument in LIKE_ANYWAY.get(call.kind, ()):
            return Verdict("right", "an argument that may be so")
        return Verdict("accepted", f"{call.kind} for {call.argument}")
    found = found if isinstance(found, (list, tuple)) else [found]
    faults = [x for x in (wrong(x.detach(), y) for x, y in zip(found, expected)) if x]
    return Verdict("wrong", faults[0]) if faults else Verdict("right")
