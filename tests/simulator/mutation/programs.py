"""The kernels whose mutants are tried, each on a problem small enough for hundreds of runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from cute_nvfp4.sim import Result
from tests.simulator.blackwell import programs, shapes

from .judge import Subject


@contextmanager
def _ptx_is(ptx: str) -> Iterator[None]:
    """Within it the kernels of ``blackwell`` run this PTX instead of their own."""
    original = programs.simulate
    programs.simulate = lambda kernel, *args, **options: original(replace(kernel, ptx=ptx), *args, **options)
    try:
        yield
    finally:
        programs.simulate = original


def _products(*sizes: tuple[int, int, int], problem: str = "gemm") -> list[shapes.Product]:
    return [shapes.make(problem, s, "full", shapes.SEED + i) for i, s in enumerate(sizes)]


def _subject(name: str, ptx: str, products: list[shapes.Product], call: Callable[..., Result]) -> Subject:
    def run(ptx: str, **options: object) -> tuple[bool, Result]:
        for product in products:
            product.c.fill_(torch.nan)
        with _ptx_is(ptx):
            result = call(**options)
        try:
            for product in products:
                shapes.check(product)
        except AssertionError:
            return False, result
        return True, result

    return Subject(name, ptx, run)


@functools.cache
def subject(name: str) -> Subject:
    """ "gemm", "dual", "group" or "pair" of ``tests.simulator.blackwell``."""
    if name == "gemm":
        products = _products((200, 136, 2048))
        ptx = programs.compile_gemm(programs.GEMM_TILE).ptx
        return _subject(name, ptx, products, lambda **o: programs.run_gemm(products[0], **o))
    if name == "dual":
        # 9 and 10 tiles of K, so that the ring of three stages ends at different places.
        large, small = products = _products((200, 136, 2304), (24, 40, 2560), problem="dual")

        def two(**options: object) -> Result:
            result = programs.run_dual(large, **options)
            programs.run_dual(small, **options)
            return result

        return _subject(name, programs.compile_gemm(programs.DUAL_TILE).ptx, products, two)
    if name == "group":
        products = _products((96, 128, 512), (40, 264, 256), (136, 128, 1536), problem="group")
        ptx = programs.compile_group(programs.GEMM_TILE).ptx
        return _subject(name, ptx, products, lambda **o: programs.run_group(products, ctas=3, **o))
    if name == "pair":
        # In the small one a cluster has nothing to do, so that only its barriers order the two CTAs.
        large, small = products = _products((500, 264, 1536), (24, 40, 1024))

        def both(**options: object) -> Result:
            result = programs.run_pair(large, clusters=2, **options)
            programs.run_pair(small, clusters=2, **options)
            return result

        return _subject(name, programs.compile_pair(programs.PAIR_TILE).ptx, products, both)
    raise KeyError(f"no kernel {name!r}; there are gemm, dual, group, pair")


NAMES = ("gemm", "dual", "group", "pair")
