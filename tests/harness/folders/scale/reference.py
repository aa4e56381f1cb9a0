"""A scaled sum of two vectors, alpha * x + y."""

import torch
from task import input_t, output_t
from utils import make_match_reference


def generate_input(size: int, seed: int) -> input_t:
    generator = torch.Generator(device="cuda")
    generator.manual_seed(seed)
    x = torch.randn(size, device="cuda", dtype=torch.float32, generator=generator)
    y = torch.randn(size, device="cuda", dtype=torch.float32, generator=generator)
    return x, y, 0.75, torch.empty_like(x)


def ref_kernel(data: input_t) -> output_t:
    x, y, alpha, out = data
    out[...] = alpha * x + y
    return out


check_implementation = make_match_reference(ref_kernel, rtol=1e-5, atol=1e-5)
