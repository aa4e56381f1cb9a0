"""Not a cheat: returns a tensor of its own, freshly computed."""

from honest import gemv


def custom_kernel(data):
    return gemv(data)
