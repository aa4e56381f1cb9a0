"""Every device helper on the GPU that is there: the cases and oracles of the simulator's tests."""

from __future__ import annotations

import numpy as np
import ptx_kernels
import pytest
import torch
from ptx_cases import CASES, Case

from cute_nvfp4.target import ARCHITECTURES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.body)
def test_helper(case: Case) -> None:
    capability = torch.cuda.get_device_capability()
    names = [name for name in case.archs if ARCHITECTURES[name].capability == capability]
    if not names:
        pytest.skip(f"{case.body} is for {', '.join(case.archs)}, the device is of capability {capability}")
    words, data = case.inputs()
    found = ptx_kernels.run(case.body, words, data, arch=names[0], backend="cuda")
    np.testing.assert_array_equal(found, case.expected(words, data))
