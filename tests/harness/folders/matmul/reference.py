"""A matrix product of bfloat16 matrices, the second one transposed."""

import torch
from task import input_t, output_t
from utils import make_match_reference


def generate_input(m: int, n: int, k: int, seed: int) -> input_t:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    a = torch.randn(m, k, device="cuda", generator=generator).to(torch.bfloat16)
    b = torch.randn(n, k, device="cuda", generator=generator).to(torch.bfloat16)
    return {"a": a, "b": b.t(), "out": torch.zeros(m, n, device="cuda")}


def ref_kernel(data: input_t) -> output_t:
    return data["a"].float() @ data["b"].float()


check_implementation = make_match_reference(ref_kernel, rtol=1e-4, atol=1e-4)
