"""Whether torch's inductor can compile on this processor for this interpreter."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

COMPILER = any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))
# with ATEN_CPU_CAPABILITY=default, inductor of torch 2.13 writes vector code without its headers
VECTORS = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
# Debian and Ubuntu have the interpreter's headers in a package of their own, such as python3.14-dev.
HEADER = Path(sysconfig.get_path("include"), "Python.h").is_file()
needs_compiler = pytest.mark.skipif(
    not (COMPILER and HEADER and VECTORS),
    reason="inductor needs a C++ compiler, Python.h, and vector instructions that torch may use",
)
