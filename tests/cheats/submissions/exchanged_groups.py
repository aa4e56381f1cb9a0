"""Computes every group, and returns them in the wrong order."""

from products import answers


def custom_kernel(data):
    return answers(data)[::-1]
