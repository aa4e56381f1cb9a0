"""Every device helper over all its inputs: a small kernel, compiled, executed in the simulator, against an oracle."""

from __future__ import annotations

import numpy as np
import ptx_kernels
import pytest
from ptx_cases import CASES, Case

PAIRS = [pytest.param(case, arch, id=f"{case.body}-{arch}") for case in CASES for arch in case.archs]


@pytest.mark.parametrize("case,arch", PAIRS)
def test_helper(case: Case, arch: str) -> None:
    words, data = case.inputs()
    found = ptx_kernels.run(case.body, words, data, arch=arch)
    np.testing.assert_array_equal(found, case.expected(words, data))
