"""Random bits that depend on a seed and an element's index, and on nothing else.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the generator of
cuRAND: ten rounds of two 32 × 32 → 64-bit multiplications. Four consecutive elements share one evaluation. The order
of evaluation, the device and the slabs do not matter, so every backend draws the same numbers.
"""

from __future__ import annotations

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_MASK = 0xFFFFFFFF


def _multiply(a: torch.Tensor, constant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of the product of 32-bit numbers held in int64.

    The product wraps around in int64, but its 64 bits are right, and the mask removes the sign that the shift copies.
    """
    # the constant counts as signed, because torch takes no Python integer of 64 bits
    product = a * constant
    return (product >> 32) & _MASK, product & _MASK


def philox4x32(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 of four counter words and two key words: 32-bit values in int64 tensors of one shape, or ints."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return c0, c1, c2, c3


def key_of(seed: int) -> tuple[int, int]:
    """The low and the high half of a seed."""
    return seed & _MASK, (seed >> 32) & _MASK


def random_bits(seed: int, index: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """32 random bits for each element of ``index`` (int64, not negative), as int64 in [0, 2**32).

    The counter is (low half of index // 4, high half of it, ``stream``, 0), the key is the halves of ``seed``, and word
    index % 4 of the result is taken. ``stream`` separates draws for different purposes.
    """
    if index.dtype is not torch.int64:
        raise OperandTypeError.of("index of random bits", got=index.dtype, expected="torch.int64")
    group, word = index >> 2, index & 3
    counter = (group & _MASK, group >> 32, torch.full_like(group, stream), torch.zeros_like(group))
    words = philox4x32(counter, key_of(seed))
    result = words[3]
    for number in (2, 1, 0):
        result = torch.where(word == number, words[number], result)
    return result


def uniform(seed: int, index: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """Float32 values in [0, 1), multiples of 2**-24: the upper 24 of ``random_bits``."""
    return (random_bits(seed, index, stream) >> 8).to(torch.float32) * 2.0**-24


def resolve_seed(generator: int | torch.Generator | None) -> int:
    """A seed in [0, 2**63): the one given, or one drawn from a torch generator (None: torch's default one)."""
    if isinstance(generator, int) and not isinstance(generator, bool):
        if not 0 <= generator < 2**63:
            raise OperandError.of("seed", got=generator, expected="0 <= seed < 2**63")
        return generator
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OperandTypeError.of(
            "generator", got=type(generator).__name__, expected="an int, a torch.Generator or None"
        )
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device, dtype=torch.int64))
