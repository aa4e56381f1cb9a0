"""Kernels that access the memory of other GPUs of the host."""
