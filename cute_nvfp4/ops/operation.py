"""What every operation is, written once: checks, exact torch, planned calls, ``prepare``, and its operators of torch.

A public function hands its arguments to its ``Operation``. Everything that a plan depends on (shapes, strides, dtypes,
alignment of addresses, options) makes a key; what does not fit is refused when its key is seen for the first time, and
a later call with the same key has passed the same checks. docs/how-to/operations.md says how to add an operation.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ..errors import OperandError
from ..runtime.backend import resolve
from ..runtime.bounded import Bounded
from ..runtime.kernel import Kernel
from ..runtime.simulating import SESSIONS, session_number, surroundings
from ..runtime.torch_private import increment_versions
from ..target import Target
from ..tensors import check_all_dense
from .arguments import OUTPUT, PLAIN_TYPES, VALUE, Argument
from .checks import check_memory, reads, refuse_config
from .dispatch import by_operator, modes, written_to
from .operator import Operator
from .planned import PlannedCall, PlannedLaunch, Preparation, allocator

OPERATIONS: dict[Callable[..., Any], Operation] = {}
"""The operations, by their functions."""
PREPARED: dict[Callable[..., Any], Callable[..., Preparation]] = {}
"""From the arguments of a public function to its planned call, for ``prepare``."""

_ROAD = """\
def call({given}):
    if is_dynamo_compiling():
        return operation.unplanned({given})
    try:
        recorded = modes() or not ({plain}) or (is_grad_enabled() and ({followed}))
        planned = None if recorded else operation.calls[{key}]
    except (AttributeError, KeyError, RuntimeError, TypeError):
        planned = None
    if planned is None:
        return operation.unplanned({given})
    result = planned({given})
    if ({any_out}) and is_grad_enabled():
        {count}
    return result
"""
"""The straight road of a call, compiled for an operation from the expressions of its arguments' kinds. What is none of
its kind, is new, or is recorded by torch takes the other road."""
_SCOPE = {
    **{"Tensor": Tensor, "PLAIN_TYPES": PLAIN_TYPES, "modes": modes, "is_grad_enabled": is_grad_enabled},
    **{"is_dynamo_compiling": is_dynamo_compiling, "increment_versions": increment_versions, "written_to": written_to},
    **{"surroundings": surroundings, "session_number": session_number, "SESSIONS": SESSIONS, "modules": sys.modules},
}
"""What the expressions of that road name."""


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

    function: has the arguments, in order; a *request* is a record of them. arguments: their kinds, by name; others are
    compared as they are. describe: raises where a request asks for what cannot be, and says what it asks for: that is
    done once, and is ``request.described`` to all that follow. check: raises where they do not fit, and gives the
    output, the caller's or a new one. reference: exact torch, of a request whose ``out`` is like the result. plan: from
    such a request and a target to the call. key: makes the key, where it is not that of the arguments. target: where a
    request with such an output runs. store: writes an exact result to an output; None: the reference makes or writes
    the output itself. overlaps: raises where a given output overlaps an input. vary: what may vary in a call that
    ``prepare`` made; preparable: whether it takes the operation; prepared: makes the preparation of a request, where it
    is no matter of course (``preparation_of``). follows: whether torch is asked for a gradient of
    arguments that require one. outs: the arguments that are written; count: the expression that tells autograd of them.
    """

    operator: Callable[[Any], Operator | None] = staticmethod(lambda request: None)
    """The operator of torch for a request, which ``library`` sets; None: torch records what the reference does."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Argument],
        *,
        check: Callable[[Any], Any],
        describe: Callable[[Any], Any] | None = None,
        reference: Callable[[Any], Any],
        plan: Callable[[Any, Target], Callable[..., Any]],
        key: Callable[..., Any] | None = None,
        target: Callable[[Any, Any], Target] | None = None,
        store: Callable[[Any, Any], Any] | None = lambda exact, out: out.copy_(exact),
        overlaps: Callable[[Any], None] = lambda r: check_memory(reads(r), r.out),
        vary: Sequence[str] = ("a", "b", "out"),
        preparable: bool = False,
        prepared: Callable[[Any], Preparation] | None = None,
        follows: bool = True,
        outs: Sequence[str] = ("out",),
        count: str = "increment_versions((out,)) if type(out) is Tensor else written_to(out)",
    ) -> None:
        self._signature = inspect.signature(function)
        self.name, self.fields = function.__name__, tuple(self._signature.parameters)
        parameters = self._signature.parameters.items()
        self.defaults = {name: None if x.default is x.empty else x.default for name, x in parameters}
        self.request = _request_type(self.fields, describe)
        self._check, self._reference, self._plan, self._store = check, reference, plan, store
        self._overlaps, self._vary, self._prepared = overlaps, vary, prepared or self.preparation_of
        self._target = target or _target_of_output
        self._follows, self._outs = follows, outs
        self.calls = Bounded()
        kinds = dict.fromkeys(self.fields, VALUE) | {"out": OUTPUT} | dict(arguments)
        self._followed = [i for i, kind in enumerate(kinds.values()) if kind.plain or kind.followed]
        self.key, self.call, self._count_written = self._compiled(kinds, key, count)
        OPERATIONS[function] = self
        if preparable:
            PREPARED[function] = self.preparation

    def _compiled(self, kinds: Mapping[str, Argument], key: Any, count: str) -> tuple[Callable[..., Any], ...]:
        """What makes the key of a call, the straight road of a call, and what tells autograd what one wrote."""
        given = ", ".join(kinds)

        def of_all(part: str, joint: str) -> str:
            return joint.join(getattr(kind, part).format(x=x) for x, kind in kinds.items() if getattr(kind, part))

        source, any_out = f"key({given})", " or ".join(f"{x} is not None" for x in self._outs)
        if key is None:
            places = [kind.on_cpu.format(x=x) for x, kind in kinds.items() if kind.on_cpu]
            # an operand says it sooner than a tensor; of tensors the first is never None
            place = max(places, key=lambda x: ".key." in x)
            around = f"surroundings(True) if {place} else session_number() if SESSIONS in modules else 0"
            source = f"({of_all('key', ', ')}, {around})"
        scope = _SCOPE | {"operation": self, "key": key}
        exec(
            _ROAD.format(
                given=given,
                plain=of_all("plain", " and ") or "True",
                followed=(self._follows and of_all("followed", " or ")) or "False",
                key=source,
                any_out=any_out,
                count=count,
            ),
            scope,
        )
        found = (eval(f"lambda {given}: {x}", scope) for x in (source, f"({count}) if {any_out} else None"))
        return next(found), scope["call"], next(found)

    def __call__(self, *given: Any) -> Any:
        """The result for the arguments, in order."""
        return self.call(*given)

    def request_of(self, **given: Any) -> Any:
        """The request with these arguments, and the others by default."""
        return self.request(**(self.defaults | given))

    def unplanned(self, *given: Any) -> Any:
        """The result where torch records the call, or where no call was planned for the like."""
        check_all_dense(zip(self.fields, given))
        if not by_operator([given[i] for i in self._followed], self._follows):
            return self.run(*given)
        request = self.request(*given)
        operator = self.operator(request)
        return self._exact(*given, like=self._check(request)) if operator is None else operator.call(request)

    def run(self, *given: Any) -> Any:
        """The result, past torch's dispatcher."""
        result = (self._found(given) or self._planned(given))(*given)
        if is_grad_enabled():
            self._count_written(*given)
        return result

    def found(self, *given: Any) -> Any:
        """The call that was planned for arguments like these, or None."""
        call = self._found(given)
        return getattr(call, "owner", call)

    def _found(self, given: tuple) -> Callable[..., Any] | None:
        try:
            return self.calls.find(self.key(*given))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            # of what is none of its kind, which the checks refuse
            return None

    def checked(self, request: Any) -> Any:
        """The output of a request that fits, the caller's or a new one."""
        return self._check(request)

    def _planned(self, given: tuple) -> Any:
        """The call for these arguments and all like them, which it checks."""
        request = self.request(*given)
        out = self._check(request)
        target = self._target(request, out)
        if target.backend == "reference":
            refuse_config(getattr(request, "config", None))
            call = functools.partial(self._exact, like=out)
        else:
            call = self._plan(request if request.out is out else request._replace(out=out), target)
        self.calls[self.key(*given)] = getattr(call, "run", call)
        return call

    def _exact(self, *given: Any, like: Any) -> Any:
        """Computes the request in exact torch. like: a result of the same kind."""
        request = self.request(*given)
        if request.out is not None:
            self._overlaps(request)
        if self._store is None:
            return self._reference(request)
        if request.out is None:
            return self._store(self._reference(request._replace(out=like)), self._check(request))
        return self._store(self._reference(request), request.out)

    def overlapping(self, *given: Any) -> None:
        """Raises where the output of a call overlaps an input."""
        self._overlaps(self.request(*given))

    def preparation(self, *operands: Any, **options: Any) -> Preparation:
        """A call that was planned, for ``prepare``.

        Raises:
            OperandError: one that has no such call.
        """
        return self._prepared(self.request_of(**self._signature.bind(*operands, **options).arguments))

    def kernel_call(self, request: Any) -> Any:
        """The planned call of a request, which runs a kernel."""
        return kernels_only(self.found(*request) or self._planned(request))

    def preparation_of(self, request: Any) -> Preparation:
        """The call of a request, for ``prepare``: one launch."""
        return self.kernel_call(request).preparation(request, self._vary)

    def planned(
        self,
        kernel: Kernel,
        config: Any,
        target: Target,
        arguments: Any,
        request: Any,
        *,
        new: Mapping[str, Callable[[], Any]] | None = None,
        extra: tuple[str, Callable[[tuple, bool], Any], Any] | None = None,
        read_only: Sequence[str] = (),
        **options: Any,
    ) -> PlannedCall:
        """A planned call of one launch. arguments, read_only: as in ``PlannedLaunch``. extra: the name and the maker of
        a further field of it, and one like it to plan with; new, options, which also may be ``new_of``: as in
        ``PlannedCall``."""
        fields, out, new = self.fields, request.out, dict(new or {})
        if "new_of" not in options:
            new["out"] = allocator(torch.empty(out.shape, dtype=out.dtype, device=out.device))
        made = {name: make() for name, make in new.items() if getattr(request, name) is None}
        example = tuple(request._replace(**made))
        if extra is not None:
            fields, example = (*fields, extra[0]), (*example, extra[2])
            options["extra"] = extra[1]
        launch = PlannedLaunch(kernel, config, target, out.device, arguments, fields, example, read_only)
        return PlannedCall(launch, new, self._outs, self.overlapping, **options)


def _request_type(fields: Sequence[str], describe: Callable[[Any], Any] | None) -> type:
    """The record of an operation's arguments; ``described`` is what ``describe`` says of one, asked once."""
    plain = namedtuple("Request", fields)
    if describe is None:
        return plain

    def described(request: Any) -> Any:
        # a trace describes anew: it does not follow what a record keeps
        kept = {} if is_dynamo_compiling() else vars(request)
        if "described" not in kept:
            kept["described"] = describe(request)
        return kept["described"]

    return type("Request", (plain,), {"described": property(described)})


def _target_of_output(request: Any, out: Any) -> Target:
    return resolve(request.backend, (out[0] if isinstance(out, (list, tuple)) else out).device)


quantizing = functools.partial(
    Operation, store=None, follows=False, target=lambda request, out: resolve(request.backend, request[0].device)
)
"""An ``Operation`` that quantizes a tensor, its first argument, whose gradient nobody follows, and makes or writes the
parts of the result itself."""
