"""CuTe DSL kernels from Python to numbers, for both architectures in one process."""

from __future__ import annotations

import pytest
import torch
from dsl_kernels import BLOCK, collatz, histogram, row_sum, scale, simulate

from cute_nvfp4.sim import GlobalMemory, OutOfBounds, ReadOnlyWrite

ARCHS = ("sm_100a", "sm_90a")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("n", [1, 31, BLOCK, 1000, 70001])
def test_elementwise_with_tail(n: int, arch: str) -> None:
    x, y = torch.randn(n), torch.full((n,), torch.nan)
    result = simulate(scale, [x, y], [n], arch, counters=True)
    assert torch.equal(y, x * 2 + 1)
    load, store = result.memory
    assert (load.kind, store.kind) == ("load", "store") and load.bytes == store.bytes == 4 * n
    assert load.requests == -(-n // 32)
    assert result.opcodes["fma.rn.f32"] == -(-n // 32)
    assert 4 * n <= result.distinct_bytes["load"] <= 4 * n + 64


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rows,n", [(1, 1), (5, 127), (70, 1000), (300, 64)])
def test_reduction_over_warps(rows: int, n: int, arch: str) -> None:
    x, y = torch.randint(-50, 50, (rows, n)).float(), torch.full((rows,), torch.nan)
    simulate(row_sum, [x, y], [n, rows], arch, warps_per_wave=64)
    assert torch.equal(y, x.sum(1))


@pytest.mark.parametrize("arch", ARCHS)
def test_lanes_that_loop_differently(arch: str) -> None:
    n = 1000
    x, y = torch.arange(1, n + 1, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    simulate(collatz, [x, y], [n], arch)

    def steps(v: int) -> int:
        count = 0
        while v != 1:
            v, count = (v // 2 if v % 2 == 0 else 3 * v + 1), count + 1
        return count

    assert y.tolist() == [steps(v) for v in range(1, n + 1)]


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics(arch: str) -> None:
    n = 5000
    x, y = torch.randint(0, 16, (n,), dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    simulate(histogram, [x, y], [n], arch)
    assert torch.equal(y.long(), torch.bincount(x, minlength=16))


def test_out_of_bounds_names_everything() -> None:
    n = 1000
    x, y = torch.randn(n), torch.zeros(n)
    memory = GlobalMemory()
    memory.add(x, "x")
    memory.add(y[:900], "result")
    with pytest.raises(OutOfBounds) as error:
        simulate(scale, [x, y], [n], memory=memory)
    text = str(error.value)
    assert "st.global.b32" in text and "0 bytes past the end of tensor 'result' (3600 bytes)" in text
    assert "CTA (7, 0, 0), thread (4, 0, 0)" in text and hex(y.data_ptr() + 3600) in text


def test_source_lines_are_in_errors() -> None:
    x = torch.zeros(64)
    memory = GlobalMemory()
    memory.add(x, "x")
    with pytest.raises(OutOfBounds, match=r"dsl_kernels\.py:\d+\)"):
        simulate(scale, [x, x], [100], memory=memory, lines=True)


def test_read_only() -> None:
    x, y = torch.randn(64), torch.zeros(64)
    memory = GlobalMemory()
    memory.add(x, "x", writable=False)
    memory.add(y, "y", writable=False)
    with pytest.raises(ReadOnlyWrite, match="tensor 'y' is read-only"):
        simulate(scale, [x, y], [64], memory=memory)
