"""The random Hadamard transform: an orthogonal rotation of every 16 elements along K that spreads outliers.

y = (x ∘ signs) · H / √n with H the Sylvester-ordered Hadamard matrix, H[i, j] = (−1)^popcount(i & j), and random signs.
If both operands of a product are rotated alike along K, the product is unchanged: (A R)(B R)ᵀ = A R Rᵀ Bᵀ = A Bᵀ.
Its use before 4-bit quantization: NVIDIA, "Pretraining Large Language Models with NVFP4" (2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.quantization.philox import key_of, philox4x32

# keeps the signs' random bits apart from those of stochastic rounding with the same seed
_SIGN_STREAM = 1 << 16
_MAX_SIZE = 256


@dataclass(frozen=True)
class Hadamard:
    """A rotation of every ``len(signs)`` elements, a power of two up to 256. signs: +1 or −1 each."""

    signs: tuple[int, ...]

    def __post_init__(self) -> None:
        size = len(self.signs)
        if size < 2 or size > _MAX_SIZE or size & (size - 1):
            raise OperandError.of("size of a Hadamard transform", got=size, expected="a power of two, 2 … 256")
        if any(sign not in (-1, 1) for sign in self.signs):
            raise OperandError.of("signs of a Hadamard transform", got=self.signs, expected="+1 or −1 each")

    @classmethod
    def from_seed(cls, seed: int, size: int = 16) -> Hadamard:
        """Draws the signs from ``seed``: if bit 31 of ``philox.random_bits`` of an element's index is set, −1."""
        # with Python's integers, which torch.compile traces without reading a tensor
        groups = (philox4x32((group, 0, _SIGN_STREAM, 0), key_of(seed)) for group in range(-(-size // 4)))
        words = [word for group in groups for word in group]
        return cls(tuple(1 - 2 * (word >> 31) for word in words[:size]))

    @property
    def size(self) -> int:
        """The number of elements that are rotated together."""
        return len(self.signs)

    def matrix(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
        """The (size, size) matrix R: a row vector x becomes x · R."""
        return self._rotate(torch.eye(self.size, device=device)).to(dtype)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x · R along the last dimension, computed in float32 and returned in the dtype of ``x`` (one rounding)."""
        self._check(x)
        return self._rotate(x.to(torch.float32)).to(x.dtype)

    def unrotate(self, x: torch.Tensor) -> torch.Tensor:
        """x · Rᵀ along the last dimension: the inverse of ``rotate``, up to rounding."""
        self._check(x)
        rotated = _butterflies(x.to(torch.float32).unflatten(-1, (-1, self.size)))
        return (rotated * self._sign_tensor(x)).flatten(-2).to(x.dtype)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        return _butterflies(x.unflatten(-1, (-1, self.size)) * self._sign_tensor(x)).flatten(-2)

    def _sign_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.signs, dtype=torch.float32, device=x.device)

    def _check(self, x: torch.Tensor) -> None:
        if x.ndim == 0 or x.shape[-1] % self.size:
            raise OperandError.of(
                "x to rotate", got=f"shape {tuple(x.shape)}", expected=f"a last size divisible by {self.size}"
            )


def _butterflies(x: torch.Tensor) -> torch.Tensor:
    """x · H / √n over the last dimension, by additions at distance 1, 2, 4, … in that order, then one product."""
    size = x.shape[-1]
    distance = 1
    while distance < size:
        pairs = x.unflatten(-1, (-1, 2, distance))
        even, odd = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((even + odd, even - odd), dim=-2).flatten(-3)
        distance *= 2
    return x * size**-0.5


def resolve_hadamard(hadamard: Hadamard | int | None) -> Hadamard | None:
    """The rotation, or one from a seed; None stays None."""
    if hadamard is None or isinstance(hadamard, Hadamard):
        return hadamard
    if isinstance(hadamard, int) and not isinstance(hadamard, bool):
        return Hadamard.from_seed(hadamard)
    raise OperandTypeError.of("hadamard", got=type(hadamard).__name__, expected="None, a Hadamard or a seed")
