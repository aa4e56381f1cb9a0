"""Kinds of arguments: what the cache key holds of an argument, and whether torch records what is done with it.

Each kind is a set of expressions of the argument's name. An operation joins the expressions of its arguments into one
expression and compiles it, as a NamedTuple compiles its methods; every call evaluates that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

PLAIN_TYPES = frozenset((Tensor, type(None), float, int))
"""Types that torch records only for a gradient, unlike its wrapper subclasses."""


class Argument(NamedTuple):
    """A kind of argument, as expressions of its name ``{x}``.

    key: everything that a plan depends on. plain: whether the class is torch's own and no wrapper; empty: always.
    followed: whether autograd follows the argument; empty: never. on_cpu: whether it lies in host memory; empty:
    unknown. An expression may raise an AttributeError for another kind of argument; the checks then refuse the call.
    """

    key: str = "{x}"
    plain: str = ""
    followed: str = ""
    on_cpu: str = ""

    def __call__(self, x: Any) -> Any:
        """The part of the cache key for ``x``."""
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
# an int that float64 cannot hold must not share a plan with others: the checks refuse it
_NUMBER = "(({x} if {x}.bit_length() > 1000 else int) if type({x}) is int else type({x}))"
_SCALE = "({x}.%s is not None and {x}.%s.requires_grad)"
_SCALES = _SCALE.replace("%s", "global_scale")

VALUE = Argument()
"""An option whose value enters the key."""
TYPED = Argument("({x}, type({x}))")
"""An option whose value and type enter the key, because True equals 1."""
NUMBER = Argument(_NUMBER)
"""A number that may change from call to call."""
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
"""A ``BlockScaledTensor`` or a ``PreparedWeight``."""
TENSOR = Argument(
    f"(None if {{x}} is None else {_TENSOR} if isinstance({{x}}, Tensor) else {_NUMBER})",
    "type({x}) in PLAIN_TYPES",
    "getattr({x}, 'requires_grad', False)",
    "not {x}.is_cuda",
)
"""A tensor, None, or a number that may change from call to call."""
ACTIVATIONS = Argument(
    f"({_TENSOR} if isinstance({{x}}, Tensor) else None if {{x}} is None else {{x}}.key)",
    "(type({x}) is Tensor or {x} is not None and type({x}.data) is Tensor)",
    f"({{x}}.requires_grad if type({{x}}) is Tensor else {_SCALES})",
)
"""Activations: a tensor, an operand, or None."""
OUTPUT = Argument(
    f"(None if {{x}} is None else {_TENSOR})",
    "({x} is None or type({x}) is Tensor)",
    "({x} is not None and {x}.requires_grad)",
)
"""A tensor that is written, or None."""
STATUS = Argument(TENSOR.key)
"""The word in which a kernel reports wrong offsets, or None."""
LIST = Argument("", "False")
"""A list of operands or outputs; the operation makes its key itself."""
