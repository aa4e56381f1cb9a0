"""No cheat: slow and right on every GEMM-like problem."""

from products import write


def custom_kernel(data):
    return write(data)
