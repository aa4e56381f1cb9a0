"""What a GEMM on sm_120a asks of memory and of its warps, as the simulator counts it."""

from __future__ import annotations

from typing import Any

import pytest
from support.gemm_problems import Case
from test_gemm_traffic import BENCHMARK_SHAPES, counted, dram

from cute_nvfp4.scale_layout import blocked_bytes
from cute_nvfp4.sim import Result

FLAGS = 1024
SMALL = ((16, 1024, 2048), (1, 512, 4096), (130, 264, 1056))


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_120a", "sm_121a"])
@pytest.mark.parametrize("shape", [*SMALL, *(pytest.param(x, marks=pytest.mark.slow) for x in BENCHMARK_SHAPES)])
def test_every_operand_once_from_memory(shape: tuple[int, int, int], arch: str) -> None:
    """By the plans that are chosen; scales come in whole atoms. ``FLAGS``: of sums over CTAs."""
    m, n, k = shape
    result = counted(Case(m, n, k, workers=0, dtype="float16", out="new", alpha=2.0**-24), arch=arch, checks=False)
    scales = sum(blocked_bytes(rows, k // 16) for rows in (m, n))
    assert (
        (m + n) * (k // 2 + k // 16)
        <= result.l2.read_bytes - result.l2.refetched_bytes
        <= (m + n) * k // 2 + scales + FLAGS
    )
    # 24 MB of GB10 do not keep x while 67 MB of weights pass
    again = 0.03 * result.l2.read_bytes if (arch, shape) == ("sm_121a", BENCHMARK_SHAPES[0]) else 0
    assert result.l2.refetched_bytes <= again


def shared_passes(result: Result) -> int:
    return sum(x.passes for x in result.memory if x.space == "shared" and x.kind == "load")


def multiplications(result: Result) -> int:
    return sum(x.operations for x in result.mma)


def test_few_rows_as_columns_of_narrow_tiles() -> None:
    """Against tiles that have the few rows among 128: an eighth of the multiplications, well under half of the
    instructions and of the passes of shared memory."""

    def run(**tiling: Any) -> Result:
        case = Case(16, 256, 1024, dtype="float16", out="new", alpha=2.0**-24, store="direct", workers=2, **tiling)
        return counted(case, arch="sm_120a", checks=False)

    narrow, wide = run(tile_n=16, swap=True), run(tile_n=128)
    assert 8 * multiplications(narrow) == multiplications(wide)
    assert narrow.instructions < 0.45 * wide.instructions and shared_passes(narrow) < 0.45 * shared_passes(wide)
    assert dram(narrow) == dram(wide)
