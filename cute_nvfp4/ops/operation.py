"""What every operation is, written once: checks, exact torch, planned calls, ``prepare``, and its operators of torch.

A public function hands its arguments to its ``Operation``. Everything that a plan depends on (shapes, strides, dtypes,
alignment of addresses, options) makes a key; what does not fit is refused when its key is seen for the first time, and
a later call with the same key has passed the same checks. docs/operations.md says how to add an operation.
"""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import is_grad_enabled

from ..errors import OperandError
from ..runtime.backend import resolve
from ..runtime.bounded import Bounded
from ..runtime.kernel import Kernel
from ..runtime.simulating import world
from ..target import Target
from .calls import allocator, operand_key, output_key, tensor_key
from .checks import check_overlap, reads, refuse_config
from .dispatch import by_operator, written_to
from .operator import Operator
from .planned import PlannedCall, PlannedLaunch, Preparation

OPERATIONS: dict[Callable[..., Any], Operation] = {}
"""The operations, by their functions."""
PREPARED: dict[Callable[..., Any], Callable[..., Preparation]] = {}
"""From the arguments of a public function to its planned call, for ``prepare``."""


def kernels_only(call: Any) -> Any:
    """``call`` if it runs a kernel.

    Raises:
        OperandError: it runs exact torch.
    """
    if call is not None and not isinstance(call, functools.partial):
        return call
    raise OperandError.of(
        "backend of a prepared call",
        got="exact torch",
        expected="the kernels",
        hint="Use CUDA tensors, or a block of cute_nvfp4.simulating().",
    )


class Operation:
    """An operation, of what is its own.

    function: has the arguments, in order; a *request* is a record of them. check: raises where they do not fit, and
    gives the output, the caller's or a new one. reference: exact torch, of a request whose ``out`` is like the result.
    plan: from such a request and a target to the call. operands: arguments whose ``key`` says all that a plan depends
    on. tensors: others that may be tensors. keys: what the rest is in a key, where it is not compared as it is; or key:
    makes all of it. store: writes an exact result to an output. overlaps: raises where a given output overlaps an
    input. preparable: whether ``prepare`` takes it; vary: what may then vary from call to call; prepared: makes the
    preparation of a call that is no ``PlannedCall``. instead: the operation and the request that a request is in fact,
    or None. recorded: whether a call goes through torch's dispatcher, if it can be said sooner than ``by_operator``
    says it.
    """

    operator: Callable[[Any], Operator]
    """The operator of torch for a request; ``library`` sets it."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        check: Callable[[Any], Any],
        reference: Callable[[Any], Any],
        plan: Callable[[Any, Target], Callable[..., Any]],
        operands: Sequence[str] = ("a", "b"),
        tensors: Sequence[str] = (),
        keys: Mapping[str, Callable[[Any], Any]] | None = None,
        store: Callable[[Any, Any], Any] = lambda exact, out: out.copy_(exact),
        overlaps: Callable[[Any], None] = lambda r: check_overlap(reads(r), r.out),
        vary: Sequence[str] = ("a", "b", "out"),
        instead: Callable[[Any], tuple[Operation, Any] | None] = lambda request: None,
        prepared: Callable[[Any, Any], Preparation] | None = None,
        recorded: Callable[..., bool] | None = None,
        key: Callable[..., Any] | None = None,
        preparable: bool = False,
    ) -> None:
        self._signature = inspect.signature(function)
        self.name, self.fields = function.__name__, tuple(self._signature.parameters)
        self.request = namedtuple("Request", self.fields)
        self._check, self._reference, self._plan, self._store = check, reference, plan, store
        self._overlaps, self._vary, self._instead, self._prepared = overlaps, vary, instead, prepared
        self._recorded = recorded or _recorded_of(self.fields, operands, (*tensors, "out"))
        self._out = self.fields.index("out")
        self.calls = Bounded()
        made = dict.fromkeys(operands[2:], operand_key) | dict.fromkeys(tensors, tensor_key) | {"out": output_key}
        self.key = key or _key_of(self.fields, operands[:2], made | dict(keys or {}))
        OPERATIONS[function] = self
        if preparable:
            PREPARED[function] = self.preparation

    def __call__(self, *given: Any) -> Any:
        """The result for the arguments, in order."""
        if self._recorded(*given):
            request = self.request(*given)
            return self.operator(request).call(request)
        try:
            call = self.calls[self.key(*given)]
        except (KeyError, AttributeError, TypeError):
            # planned now, or refused
            return self.run(*given)
        result, out = call(*given), given[self._out]
        if out is not None and is_grad_enabled():
            written_to(out)
        return result

    def run(self, *given: Any) -> Any:
        """The result, past torch's dispatcher."""
        try:
            call = self.calls.find(self.key(*given))
        except AttributeError:
            # of an operand that is none, which the checks refuse
            call = None
        result = (call or self._planned(given))(*given)
        out = given[self._out]
        if out is not None and is_grad_enabled():
            written_to(out)
        return result

    def found(self, *given: Any) -> Callable[..., Any] | None:
        """The call that was planned for arguments like these."""
        return None if self._recorded(*given) else self.calls.find(self.key(*given))

    def checked(self, request: Any) -> Any:
        """The output of a request that fits, the caller's or a new one."""
        return self._check(request)

    def _planned(self, given: tuple) -> Callable[..., Any]:
        """The call for these arguments and all like them, which it checks."""
        request = self.request(*given)
        out = self._check(request)
        first = out[0] if isinstance(out, (list, tuple)) else out
        target = resolve(request.backend, first.device)
        if target.backend == "reference":
            refuse_config(getattr(request, "config", None))
            call = functools.partial(self._exact, like=out)
        else:
            call = self._plan(request._replace(out=out), target)
        self.calls[self.key(*given)] = call
        return call

    def _exact(self, *given: Any, like: Any) -> Any:
        """By exact torch. like: a result of the same kind."""
        request = self.request(*given)
        if request.out is None:
            return self._store(self._reference(request._replace(out=like)), self._check(request))
        self._overlaps(request)
        return self._store(self._reference(request), request.out)

    def overlapping(self, *given: Any) -> None:
        """Raises where the output of a call overlaps an input."""
        self._overlaps(self.request(*given))

    def preparation(self, *operands: Any, **options: Any) -> Preparation:
        """A call that was planned, for ``prepare``.

        Raises:
            OperandError: one that has no such call.
        """
        bound = self._signature.bind(*operands, **options)
        bound.apply_defaults()
        request = self.request(**bound.arguments)
        other = self._instead(request)
        return self._preparation_of(request) if other is None else other[0]._preparation_of(other[1])

    def _preparation_of(self, request: Any) -> Preparation:
        call = kernels_only(self.calls.find(self.key(*request)) or self._planned(request))
        if self._prepared is not None:
            return self._prepared(request, call)
        return call.preparation(request, self._vary)

    def call(
        self,
        kernel: Kernel,
        config: Any,
        target: Target,
        arguments: Any,
        request: Any,
        *,
        extra: tuple[str, Callable[[tuple, bool], Any], Any] | None = None,
        read_only: Sequence[str] = (),
        decoded: Any = None,
        **options: Any,
    ) -> PlannedCall:
        """A planned call of one launch. arguments, read_only, decoded: as in ``PlannedLaunch``. extra: the name and the
        maker of a further field of it, and one like it to plan with; options, which also may be ``new_of``: as in
        ``PlannedCall``."""
        fields, out, new = self.fields, request.out, {}
        if "new_of" not in options:
            new[self._out] = allocator(torch.empty(out.shape, dtype=out.dtype, device=out.device))
        if "status" in fields:
            make = functools.partial(torch.empty, 1, dtype=torch.int32, device=out.device)
            new[fields.index("status")] = make
            request = request._replace(status=make() if request.status is None else request.status)
        example = tuple(request)
        if extra is not None:
            fields, example = (*fields, extra[0]), (*example, extra[2])
            options |= {"extra": extra[1], "closely": extra[0] == "decoded"}
        launch = PlannedLaunch(kernel, config, target, out.device, arguments, fields, example, read_only, decoded)
        return PlannedCall(launch, self._out, new, self.overlapping, **options)


def _recorded_of(fields: Sequence[str], operands: Sequence[str], tensors: Sequence[str]) -> Callable[..., bool]:
    """``by_operator`` of a call's arguments, as one expression, like the key."""
    several = "".join(f"{x}, " for x in operands)
    source = f"lambda {', '.join(fields)}: by_operator(({several}), {', '.join(tensors)})"
    return eval(source, {"by_operator": by_operator})


def _key_of(
    fields: Sequence[str], operands: Sequence[str], made: Mapping[str, Callable[[Any], Any]]
) -> Callable[..., tuple]:
    """Makes the key of a call. It is one expression, because every call needs it: what a NamedTuple does for its own
    methods."""
    # most arguments are left out: None is its own key, without a call
    terms = [
        f"{x}.key" if x in operands and x not in made else f"None if {x} is None else _{x}({x})" if x in made else x
        for x in fields
    ]
    names = {f"_{name}": function for name, function in made.items()} | {"world": world}
    where = [f"{x}.key.on_cpu" for x in operands if x not in made] or [f"not {fields[0]}.is_cuda"]
    source = f"lambda {', '.join(fields)}: ({', '.join(terms)}, world({where[-1]}))"
    return eval(source, names)
