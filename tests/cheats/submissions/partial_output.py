"""Writes every row but the last."""

from honest import gemv


def custom_kernel(data):
    data[-1][:-1] = gemv(data)[:-1]
    return data[-1]
