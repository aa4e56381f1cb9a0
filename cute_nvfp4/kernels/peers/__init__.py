"""Kernels that reach into the memory of the other GPUs of a host."""
