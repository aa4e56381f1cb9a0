"""Marks: ``gpu`` tests are skipped without CUDA, ``slow`` ones run only when ``-m`` names them.

Of files in which every test compiles a kernel, the default run takes every n-th test (``SAMPLED``), so that all fit
into a quarter of an hour on two cores; ``-m "slow or not slow"`` runs everything.

This file also puts ``tests/`` on the path, for the modules that several folders of tests share.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_nvfp4 import simulating

SAMPLED = {
    "test_gated_gemm.py": 3,
    "test_gated_gemm_mutations.py": 3,
    "test_gated_gemm_quantized.py": 2,
    "test_gemm_mutations.py": 2,
    "test_grouped_gemm.py": 3,
    "test_grouped_gemm_mutations.py": 3,
    "test_quantize.py": 4,
    "test_quantize_cubin.py": 4,
    "test_quantize_mutations.py": 4,
    "test_quantize_optimal.py": 3,
    "test_quantize_rotated.py": 4,
    "test_quantize_tiles.py": 9,
    "test_quantize_transposed.py": 6,
    "test_quantize_variant_cubin.py": 12,
    "test_quantize_variant_mutations.py": 2,
}
"""Of how many tests in a file one is in the default run."""


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Tests of ``SAMPLED`` files but every n-th."""
    seen: dict[str, int] = dict.fromkeys(SAMPLED, 0)
    left_out = set()
    for item in items:
        name = item.path.name
        if name in SAMPLED and not item.get_closest_marker("slow"):
            if seen[name] % SAMPLED[name]:
                left_out.add(item)
            seen[name] += 1
    return left_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    expression = config.getoption("markexpr")
    if "slow" not in expression:
        # a test named on the command line is wanted, sampled or not
        named = any("::" in argument for argument in config.args) or config.getoption("keyword")
        slow = {item for item in items if item.get_closest_marker("slow")} | (set() if named else _left_out(items))
        if slow:
            config.hook.pytest_deselected(items=list(slow))
            items[:] = [item for item in items if item not in slow]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _simulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels that are called in ``sim`` and ``fuzz`` run in the simulator."""
    if request.path.parent.name in ("sim", "fuzz"):
        with simulating():
            yield
    else:
        yield
