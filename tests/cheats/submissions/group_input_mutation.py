"""Gives the right result, but wipes the scales of the second group."""

import torch
from products import write


def custom_kernel(data):
    out = write(data)
    data[2][1][0].view(torch.uint8).zero_()
    return out
