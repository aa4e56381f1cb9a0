"""The JSON of all reports. Floats have six significant digits, which is more than the accuracy of any figure."""

from __future__ import annotations

import json
from typing import Any


def json_text(content: Any, indent: int | None = 2) -> str:
    """Returns ``content`` as JSON, with ``str`` of what JSON has no type for. Raises ValueError for NaN or infinity."""
    return json.dumps(_rounded(content), indent=indent, default=str, allow_nan=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value
