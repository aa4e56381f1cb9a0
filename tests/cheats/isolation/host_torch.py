"""Launches no kernel: torch does all of the work."""

from honest import gemv


def custom_kernel(data):
    data[-1].copy_(gemv(data))
    return data[-1]
