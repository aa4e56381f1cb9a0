"""No cheat: returns a new tensor of its own, and loads parts of torch that patch torch itself."""

import torch
import torch._dynamo
from honest import gemv


def custom_kernel(data):
    torch.manual_seed(0)
    return gemv(data)
