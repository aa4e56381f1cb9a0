"""CuTe layouts as CuTe writes them: ``((32,4),4):((16,4),1)``, or with a swizzle ``S<3,4,3> o 0 o (8,64):(64,1)``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import OperandError

Tree = int | tuple["Tree", ...]
_SWIZZLED = re.compile(r"S<(-?\d+),(-?\d+),(-?\d+)>\s*o\s*(-?\d+)\s*o\s*(.*)", re.DOTALL)
EXAMPLE = "a static layout such as '((32,4),4):((16,4),1)' or 'S<3,4,3> o 0 o (8,64):(64,1)'"


@dataclass(frozen=True)
class StaticLayout:
    """A CuTe layout whose sizes and strides are known integers; ``shape`` and ``stride`` are trees of the same form."""

    shape: Tree
    stride: Tree
    swizzle: tuple[int, int, int] | None = None  #: (bits, base, shift)
    first: int = 0  #: the offset that is added before the swizzle

    def __str__(self) -> str:
        text = f"{written(self.shape)}:{written(self.stride)}"
        return text if self.swizzle is None else f"S<{','.join(map(str, self.swizzle))}> o {self.first} o {text}"

    @property
    def modes(self) -> list[tuple[Tree, Tree]]:
        """The (shape, stride) of each top-level mode."""
        shapes = self.shape if isinstance(self.shape, tuple) else (self.shape,)
        strides = self.stride if isinstance(self.stride, tuple) else (self.stride,)
        return list(zip(shapes, strides))

    @property
    def size(self) -> int:
        return size(self.shape)

    def offsets(self) -> np.ndarray:
        """Returns all offsets, with one axis for each top-level mode, along which its first mode counts fastest."""
        out = np.full((), self.first, np.int64)
        for shape, stride in self.modes:
            out = out[..., None] + mode_offsets(shape, stride)
        return out if self.swizzle is None else swizzled(out, *self.swizzle)

    def matrix(self) -> np.ndarray:
        """Returns (rows, columns) offsets: mode 0 by the others, the first of them fastest. A vector is one row."""
        out = self.offsets()
        return out[None] if out.ndim == 1 else out.reshape(len(out), -1, order="F")


def written(tree: Tree) -> str:
    """Returns a tree of integers as CuTe writes it."""
    return str(tree) if isinstance(tree, int) else f"({','.join(map(written, tree))})"


def size(shape: Tree) -> int:
    """Returns the number of coordinates of a shape."""
    return shape if isinstance(shape, int) else int(np.prod([size(s) for s in shape], dtype=np.int64))


def mode_offsets(shape: Tree, stride: Tree) -> np.ndarray:
    """Returns the (size,) offsets of a mode; of nested modes the first counts fastest."""
    if isinstance(shape, int):
        return np.arange(shape, dtype=np.int64) * stride
    out = np.zeros(1, np.int64)
    for inner, by in zip(shape, stride):
        out = (out[None, :] + mode_offsets(inner, by)[:, None]).ravel()
    return out


def swizzled(offsets: np.ndarray, bits: int, base: int, shift: int) -> np.ndarray:
    """Returns offsets after CuTe's ``Swizzle<bits, base, shift>``: it XORs ``bits`` bits from ``base + shift`` on into
    those from ``base`` on. A negative shift XORs those from ``base`` on into those from ``base - shift`` on."""
    mask = ((1 << bits) - 1) << (base + max(shift, 0))
    moved = (offsets & mask) >> shift if shift >= 0 else (offsets & mask) << -shift
    return offsets ^ moved


def parse(text: str) -> StaticLayout:
    """Returns the layout that ``text`` describes.

    Raises:
        OperandError: the text is no layout, or has sizes that only the kernel knows or coordinates as strides.
    """
    text = text.strip().removesuffix(">").removeprefix("!cute.layout<").strip('"')
    match = _SWIZZLED.fullmatch(text)
    if match:
        bits, base, shift, first = map(int, match.groups()[:4])
        text, swizzle = match[5], (bits, base, shift)
    else:
        swizzle, first = None, 0
    if "?" in text or "@" in text:
        hint = "Sizes that only the kernel knows, and strides that are coordinates, cannot be drawn."
        raise OperandError.of("layout", got=repr(text), expected=EXAMPLE, hint=hint)
    shape, colon, stride = text.partition(":")
    trees = [_tree(part) for part in (shape, stride)] if colon else [None, None]
    if None in trees or not _alike(*trees):
        raise OperandError.of("layout", got=repr(text), expected=EXAMPLE)
    return StaticLayout(*trees, swizzle, first)


def _tree(text: str) -> Tree | None:
    """Returns the tree that integers in parentheses describe, None for any other text."""
    bare = text.replace(" ", "")
    if not re.fullmatch(r"[\d,()_-]+", bare):
        return None
    words = re.findall(r"[()]|-?\d+", bare)
    stack: list[list] = [[]]
    for word in words:
        if word == "(":
            stack.append([])
        elif word == ")":
            if len(stack) < 2:
                return None
            done = tuple(stack.pop())
            stack[-1].append(done)
        else:
            stack[-1].append(int(word))
    return stack[0][0] if len(stack) == 1 and len(stack[0]) == 1 else None


def _alike(shape: Tree, stride: Tree) -> bool:
    """Returns whether two trees have the same form, and every size is at least 1."""
    if isinstance(shape, int):
        return isinstance(stride, int) and shape >= 1
    return isinstance(stride, tuple) and len(shape) == len(stride) and all(map(_alike, shape, stride))


def layout_of(given: Any) -> StaticLayout:
    """Returns the layout of a text, of an object of CuTe, or of what a function makes.

    CuTe's algebra works only in a traced function: ``lambda: cute.make_layout((8, 4))`` is traced, which needs no GPU.
    """
    if isinstance(given, StaticLayout):
        return given
    if isinstance(given, str):
        return parse(given)
    return parse(traced(given) if callable(given) and ":" not in str(given) else str(given))


def traced(make: Callable[[], Any]) -> str:
    """Traces ``make`` and returns its result as CuTe writes it, or the layout of a result that has one (a tensor)."""
    import cutlass.cute as cute

    found: list[str] = []

    def evaluate() -> None:
        made = make()
        found.append(str(getattr(made, "layout", made)))

    @cute.jit
    def trace():
        evaluate()

    trace()
    return found[0]
