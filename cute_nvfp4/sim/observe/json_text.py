"""How every report becomes JSON: floats with six significant digits, which is more than any of them is good for."""

from __future__ import annotations

import json
from typing import Any


def json_text(content: Any, indent: int | None = 2) -> str:
    """``content`` as JSON; what JSON does not know is written as its ``str``, and a NaN or infinity is a ValueError."""
    return json.dumps(_rounded(content), indent=indent, default=str, allow_nan=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value
