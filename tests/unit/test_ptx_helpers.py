"""Every device helper over all its inputs: a small kernel, in the simulator or on a GPU, against an oracle."""

from __future__ import annotations

import numpy as np
import pytest
from support import backends, ptx_kernels
from support.ptx_cases import CASES, Case

pytestmark = pytest.mark.kernels
PAIRS = [pytest.param(case, arch, id=f"{case.body}-{arch}") for case in CASES for arch in case.archs]


@pytest.mark.parametrize("case,arch", PAIRS)
def test_helper(case: Case, arch: str) -> None:
    if reason := backends.why_skipped((arch,)):
        pytest.skip(reason)
    words, data = case.inputs()
    found = ptx_kernels.run(case.body, words, data, arch=arch, backend=backends.backend())
    np.testing.assert_array_equal(found, case.expected(words, data))
