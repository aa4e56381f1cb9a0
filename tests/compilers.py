"""Whether torch's inductor can compile for this processor."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

COMPILER = any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))
# with ATEN_CPU_CAPABILITY=default, inductor of torch 2.13 writes vector code and leaves out its headers
VECTORS = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
needs_compiler = pytest.mark.skipif(
    not (COMPILER and VECTORS), reason="inductor needs a C++ compiler, and vector instructions that torch may use"
)
