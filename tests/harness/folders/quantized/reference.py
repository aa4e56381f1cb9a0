"""A product of quantized matrices, as sums of codes and as scaled values."""

import torch
from task import input_t, output_t
from utils import verbose_allclose, verbose_allequal


def generate_input(m: int, n: int, k: int, seed: int) -> input_t:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    codes = [torch.randint(-128, 128, (rows, k), device="cuda", generator=generator) for rows in (m, n)]
    scales = [torch.rand(rows, device="cuda", generator=generator) + 0.01 for rows in (m, n)]
    return [(code.to(torch.int8), scale) for code, scale in zip(codes, scales)]


def ref_kernel(data: input_t) -> output_t:
    (a, scale_a), (b, scale_b) = data
    sums = (a.double() @ b.double().t()).int()  # exact; CUDA has no product of integers here
    return sums * scale_a[:, None] * scale_b[None, :], sums


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    values, sums = ref_kernel(data)
    lines = verbose_allequal(output[1], sums)[1] + verbose_allclose(output[0], values, rtol=1e-5)[1]
    return not lines, "\n".join(lines)
