"""Leaves out the gate."""

from products import product


def custom_kernel(data):
    a, b1, b2, sfa, sfb1, sfb2 = data[:6]
    data[-1].copy_(product(a, b1, sfa, sfb1) * product(a, b2, sfa, sfb2))
    return data[-1]
