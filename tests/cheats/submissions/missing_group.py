"""Returns every group but the last."""

from products import answers


def custom_kernel(data):
    return answers(data)[:-1]
