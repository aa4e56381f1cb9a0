"""The kernel that quantizes or decodes x ahead of a GEMM of packed weights, whose host function launches both."""

from __future__ import annotations

from typing import Any

from ...dequantize.config import DequantizeConfig, GroupRowsConfig
from ...dequantize.group_rows import DequantizeGroupRows
from ...dequantize.kernel import Dequantize
from ...quantize.fp8_rows import Fp8Rows

HOSTS = {DequantizeConfig: Dequantize, GroupRowsConfig: DequantizeGroupRows}


def first_kernel(config: Any) -> Any:
    """The host function of the kernel that ``config`` describes."""
    return HOSTS.get(type(config), Fp8Rows)(config)
