"""Exact arithmetic of the GPU as pure functions on numpy arrays, independent of instructions and warps."""
