"""The names of kernels as their source has them."""

from __future__ import annotations

import re


def short(kernel: str) -> str:
    """Returns a kernel's name without the DSL's prefix and arguments, or 60 characters of a name of another form."""
    found = re.match(r"kernel_cutlass_(\w+?)_(?:object|tensor(?=ptr|\d)|ptr|__main__|[A-Z\d])", kernel)
    return found[1] if found else kernel[:60]
