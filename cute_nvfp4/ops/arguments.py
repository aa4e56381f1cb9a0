"""Kinds of arguments of the operations: what a key says of one, and whether torch follows what is done with it.

Each is written once, as expressions of the argument's name: an operation joins those of its arguments into the one
expression that every call of it evaluates, as a NamedTuple does for its own methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

PLAIN_TYPES = frozenset((Tensor, type(None), float, int))
"""Types of arguments of which torch follows nothing but their gradient."""


class Argument(NamedTuple):
    """A kind of argument, in expressions of its name ``{x}``.

    key: all that a plan depends on. plain: whether it is of torch's own class, and no wrapper; empty: no matter what it
    is. followed: whether a gradient of it is asked for. on_cpu: whether it is in host memory; empty: it does not say.
    An expression may raise an AttributeError for what is none of its kind, and then the checks refuse the call.
    """

    key: str = "{x}"
    plain: str = ""
    followed: str = ""
    on_cpu: str = ""

    def __call__(self, x: Any) -> Any:
        """The key of ``x``."""
        return _function(self.key)(x)

    def or_none(self) -> Argument:
        """The kind of an argument that may be None."""
        plain = self.plain and f"({{x}} is None or {self.plain})"
        followed = self.followed and f"({{x}} is not None and {self.followed})"
        return Argument(f"(None if {{x}} is None else {self.key})", plain, followed)


@functools.cache
def _function(key: str) -> Callable[[Any], Any]:
    return eval(f"lambda x: {key.format(x='x')}", {"Tensor": Tensor})


_TENSOR = "({x}.dtype, {x}.shape, {x}.stride(), {x}.device, ({x}.data_ptr() or 1) & 15, {x}.is_neg())"
_SCALE = "({x}.%s is not None and {x}.%s.requires_grad)"
_SCALES = _SCALE.replace("%s", "global_scale")

VALUE = Argument()
"""An option that is compared as it is."""
TYPED = Argument("({x}, type({x}))")
"""An option whose type matters, too: True equals 1."""
NUMBER = Argument("type({x})")
"""A number that varies from call to call."""
OPERAND = Argument("{x}.key", "type({x}.data) is Tensor", _SCALES, "{x}.key.on_cpu")
"""A ``BlockScaledTensor``."""
WEIGHT = Argument("{x}.key", "", f"({_SCALES} or {_SCALE.replace('%s', 'up_global_scale')})", "{x}.key.on_cpu")
"""A ``PreparedWeight``."""
ANY_WEIGHT = Argument(
    "{x}.key",
    "type(getattr({x}, 'data', None)) in PLAIN_TYPES",
    f"({_SCALES} or getattr(getattr({{x}}, 'up_global_scale', None), 'requires_grad', False))",
    "{x}.key.on_cpu",
)
"""A weight of either kind."""
TENSOR = Argument(
    f"(None if {{x}} is None else {_TENSOR} if isinstance({{x}}, Tensor) else type({{x}}))",
    "type({x}) in PLAIN_TYPES",
    "getattr({x}, 'requires_grad', False)",
    "not {x}.is_cuda",
)
"""A tensor, None, or a number, which varies from call to call."""
ACTIVATIONS = Argument(
    f"({_TENSOR} if isinstance({{x}}, Tensor) else None if {{x}} is None else {{x}}.key)",
    "(type({x}) is Tensor or {x} is not None and type({x}.data) is Tensor)",
    f"({{x}}.requires_grad if type({{x}}) is Tensor else {_SCALES})",
)
"""A tensor, or an operand in its place, or None."""
OUTPUT = Argument(
    f"(None if {{x}} is None else {_TENSOR})",
    "({x} is None or type({x}) is Tensor)",
    "({x} is not None and {x}.requires_grad)",
)
"""A tensor that is written, or None."""
STATUS = Argument(TENSOR.key)
"""The word in which a kernel says what is wrong with offsets, or None."""
LIST = Argument("", "False")
"""A list of operands or outputs: the operation makes the key."""
