"""No cheat: returns tensors of its own, and a tuple where a list is wanted."""

from products import answers, returned


def custom_kernel(data):
    out = returned(data, answers(data))
    return tuple(out) if isinstance(out, list) else out
