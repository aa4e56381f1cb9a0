"""What all operations share: checks, exact torch, planned calls, ``prepare``, and the operators of torch.

A public function passes its arguments to its ``Operation``. The cache key of a call holds everything that its plan
depends on: shapes, strides, dtypes, alignment of addresses, options. The first call with a key checks the arguments and
plans; later calls with that key need no checks. docs/how-to/operations.md says how to add an operation.
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
"""The operations, by their public functions."""
PREPARED: dict[Callable[..., Any], Callable[..., Preparation]] = {}
"""What makes a ``Preparation`` of the arguments of each public function that ``prepare`` takes."""

_FAST_PATH = """\
def call({args}):
    if is_dynamo_compiling():
        return operation.unplanned({args})
    try:
        recorded = modes() or not ({plain}) or (is_grad_enabled() and ({followed}))
        planned = None if recorded else operation.calls[{key}]
    except (AttributeError, KeyError, RuntimeError, TypeError):
        planned = None
    if planned is None:
        return operation.unplanned({args})
    result = planned({args})
    if ({any_out}) and is_grad_enabled():
        {count}
    return result
"""
"""The fast path of a call. ``Operation`` fills in the expressions of its arguments' kinds and compiles it. A call takes
the slow path (``unplanned``) if an argument has another kind, if its key is new, or if torch records it."""
_FAST_PATH_NAMES = {
    **{"Tensor": Tensor, "PLAIN_TYPES": PLAIN_TYPES, "modes": modes, "is_grad_enabled": is_grad_enabled},
    **{"is_dynamo_compiling": is_dynamo_compiling, "increment_versions": increment_versions, "written_to": written_to},
    **{"surroundings": surroundings, "session_number": session_number, "SESSIONS": SESSIONS, "modules": sys.modules},
}
"""The names that the expressions of the fast path use."""


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
    """An operation of the package, built from the functions in which it differs from the others.

    A *request* is a record of the arguments of the public function.

    function: the public function; its signature names the arguments.
    arguments: the kind of each argument, by name; an argument without a kind enters the cache key as it is.
    check: raises for arguments that do not fit; returns the output, which is the caller's or a new one.
    describe: raises for a request that is impossible, and returns what it asks for. It runs once a request, and
        ``request.described`` keeps the result.
    reference: computes a request whose ``out`` has the result's shape and dtype, in exact torch.
    plan: makes the planned call from such a request and a target.
    key: makes the cache key, if the key is not that of the arguments.
    target: where a request with an output runs; by default the device of the output decides.
    store: writes an exact result to an output; None: ``reference`` makes or writes the output.
    overlaps: raises if the caller's output overlaps an input.
    vary: the arguments that may change from call to call after ``prepare``.
    preparable: whether ``prepare`` accepts the operation.
    prepared: makes the ``Preparation`` of a request; by default ``preparation_of``.
    follows: whether autograd follows arguments that require a gradient.
    outs: the arguments that a call writes.
    count: an expression that raises the autograd version counters of the written arguments.
    """

    operator: Callable[[Any], Operator | None] = staticmethod(lambda request: None)
    """The operator of torch for a request, set by ``library``; None: torch records the operations of ``reference``."""

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
        """Compiles the functions that make the cache key, run the fast path, and tell autograd of what was written."""
        args = ", ".join(kinds)

        def of_all(part: str, joint: str) -> str:
            return joint.join(getattr(kind, part).format(x=x) for x, kind in kinds.items() if getattr(kind, part))

        source, any_out = f"key({args})", " or ".join(f"{x} is not None" for x in self._outs)
        if key is None:
            answers = [kind.on_cpu.format(x=x) for x, kind in kinds.items() if kind.on_cpu]
            # an operand keeps its key and answers faster than a tensor; of tensors, the first is never None
            on_cpu = max(answers, key=lambda x: ".key." in x)
            around = f"surroundings(True) if {on_cpu} else session_number() if SESSIONS in modules else 0"
            source = f"({of_all('key', ', ')}, {around})"
        scope = _FAST_PATH_NAMES | {"operation": self, "key": key}
        exec(
            _FAST_PATH.format(
                args=args,
                plain=of_all("plain", " and ") or "True",
                followed=(self._follows and of_all("followed", " or ")) or "False",
                key=source,
                any_out=any_out,
                count=count,
            ),
            scope,
        )
        found = (eval(f"lambda {args}: {x}", scope) for x in (source, f"({count}) if {any_out} else None"))
        return next(found), scope["call"], next(found)

    def __call__(self, *args: Any) -> Any:
        """The result for the arguments, in order."""
        return self.call(*args)

    def request_of(self, **named: Any) -> Any:
        """The request with these arguments, and the defaults of the others."""
        return self.request(**(self.defaults | named))

    def unplanned(self, *args: Any) -> Any:
        """The slow path: torch records the call, or no plan exists yet for arguments like these."""
        check_all_dense(zip(self.fields, args))
        if not by_operator([args[i] for i in self._followed], self._follows):
            return self.run(*args)
        request = self.request(*args)
        operator = self.operator(request)
        return self._exact(*args, like=self._check(request)) if operator is None else operator.call(request)

    def run(self, *args: Any) -> Any:
        """The result, without torch's dispatcher."""
        result = (self._found(args) or self._planned(args))(*args)
        if is_grad_enabled():
            self._count_written(*args)
        return result

    def found(self, *args: Any) -> Any:
        """The call that was planned for arguments like these, or None."""
        call = self._found(args)
        return getattr(call, "owner", call)

    def _found(self, args: tuple) -> Callable[..., Any] | None:
        try:
            return self.calls.find(self.key(*args))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            # an argument of another kind has no key; the checks refuse it
            return None

    def checked(self, request: Any) -> Any:
        """Checks a request and returns its output, the caller's or a new one."""
        return self._check(request)

    def _planned(self, args: tuple) -> Any:
        """Checks these arguments, plans the call for all arguments with the same key, and keeps the plan."""
        request = self.request(*args)
        out = self._check(request)
        target = self._target(request, out)
        if target.backend == "reference":
            refuse_config(getattr(request, "config", None))
            call = functools.partial(self._exact, like=out)
        else:
            call = self._plan(request if request.out is out else request._replace(out=out), target)
        self.calls[self.key(*args)] = getattr(call, "run", call)
        return call

    def _exact(self, *args: Any, like: Any) -> Any:
        """Computes the request in exact torch. like: a tensor with the shape and dtype of the result."""
        request = self.request(*args)
        if request.out is not None:
            self._overlaps(request)
        if self._store is None:
            return self._reference(request)
        if request.out is None:
            return self._store(self._reference(request._replace(out=like)), self._check(request))
        return self._store(self._reference(request), request.out)

    def overlapping(self, *args: Any) -> None:
        """Raises if the output of a call overlaps an input."""
        self._overlaps(self.request(*args))

    def preparation(self, *operands: Any, **options: Any) -> Preparation:
        """The planned call of these arguments, for ``prepare``.

        Raises:
            OperandError: no single launch computes the call.
        """
        return self._prepared(self.request_of(**self._signature.bind(*operands, **options).arguments))

    def kernel_call(self, request: Any) -> Any:
        """The planned call of a request; raises if exact torch would compute it."""
        return kernels_only(self.found(*request) or self._planned(request))

    def preparation_of(self, request: Any) -> Preparation:
        """The planned call of a request, for ``prepare``; it has one launch."""
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
        """A planned call of one launch.

        arguments, read_only: as in ``PlannedLaunch``.
        extra: one more field of the launch: its name, its maker (``PlannedCall.extra``), and an example to plan with.
        new, options: as in ``PlannedCall``; ``new_of`` among the options replaces the maker of "out".
        """
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
    """The record of an operation's arguments; its ``described`` calls ``describe`` once and keeps the result."""
    plain = namedtuple("Request", fields)
    if describe is None:
        return plain

    def described(request: Any) -> Any:
        # torch.compile does not follow attributes that a record keeps: describe again
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
"""An ``Operation`` that quantizes its first argument. It makes or writes the parts of the result itself, and autograd
does not follow its arguments."""
