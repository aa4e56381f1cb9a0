"""docs/row_ranges.py: for which numbers of rows a product has another kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import cute_nvfp4 as nv
from cute_nvfp4.runtime.kernel import Kernel, planning_only

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import row_ranges


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_call_for_each_first_number_of_rows_has_every_kernel(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k, used = 328, 656, {}  # of no other test: plans that are made here launch nothing
    launcher = Kernel.launcher

    def heard(self: Kernel, config: object, *rest: object) -> object:
        used.setdefault((self.name, config), len(used))
        return launcher(self, config, *rest)

    weight = nv.prepare_weight(nv.quantize(torch.ones(n, k)), dtype=getattr(torch, dtype), backend="sim")
    monkeypatch.setattr(Kernel, "launcher", heard)

    def kernels(rows: object) -> set:
        used.clear()
        with planning_only(), nv.simulating("sm_90a"):
            for m in rows:
                nv.gemm(torch.ones(m, k, dtype=torch.bfloat16), weight)
        return set(used)

    monkeypatch.setattr(row_ranges, "ROWS", range(1, 65))
    first = row_ranges.first_rows("sm_90a", n=n, k=k, dtype=dtype)
    assert 1 < len(first) < 16
    called = kernels(first)
    assert called and not kernels(first), "a plan that is kept asks for no launcher"
    assert kernels(range(1, 65)) <= called
