"""Names of kernels as they were written."""

from __future__ import annotations

import re


def short(kernel: str) -> str:
    """A kernel's name as it was written: without what the DSL puts before it and the arguments that it puts after."""
    found = re.match(r"kernel_cutlass_(\w+?)_(?:object|tensor(?=ptr|\d)|ptr|__main__|[A-Z\d])", kernel)
    return found[1] if found else kernel[:60]
