"""The server of ``forked`` imports this, so that its forks use stored kernels without reading the files again."""

from __future__ import annotations

import os
from pathlib import Path

from . import stored_kernels

stored_kernels.load()
stored_kernels.install()
if _folder := os.environ.get(stored_kernels.NOTE):
    stored_kernels.note(Path(_folder), "forked")
