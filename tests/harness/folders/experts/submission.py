"""A CTA for each token and each of its experts, whose results are added in memory. FAULT: "", "wrong" (no weights),
"race" (the two CTAs of a token add without atomics)."""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass.cute.runtime import from_dlpack
from task import input_t, output_t

FAULT = ""


@cute.kernel
def experts_kernel(
    x: cute.Tensor, weights: cute.Tensor, chosen: cute.Tensor, probability: cute.Tensor, out: cute.Tensor
):
    column, _, _ = cute.arch.thread_idx()
    token, k, _ = cute.arch.block_idx()
    expert, total = chosen[token, k], cutlass.Float32(0)
    for i in cutlass.range(x.shape[1]):
        total += x[token, i] * weights[expert, column, i]
    if cutlass.const_expr(FAULT != "wrong"):
        total *= probability[token, k]
    if cutlass.const_expr(FAULT == "race"):
        out[token, column] = out[token, column] + total
    else:
        cute.arch.atomic_add(out.iterator + cute.crd2idx((token, column), out.layout), total)


@cute.jit
def experts(
    x: cute.Tensor, weights: cute.Tensor, chosen: cute.Tensor, probability: cute.Tensor, out: cute.Tensor,
    stream: driver.CUstream,
):  # fmt: skip
    kernel = experts_kernel(x, weights, chosen, probability, out)
    kernel.launch(grid=(x.shape[0], 2, 1), block=(out.shape[1], 1, 1), stream=stream)


_compiled = None


def custom_kernel(data: input_t) -> output_t:
    global _compiled
    x, weights, config, chosen, probability = data
    stacked = torch.stack([weights[f"expert{i}"] for i in range(config["experts"])])
    out = torch.zeros(x.shape[0], stacked.shape[1], device=x.device)
    tensors = [
        from_dlpack(t, assumed_align=4).mark_layout_dynamic(leading_dim=t.dim() - 1)
        for t in (x, stacked, chosen, probability, out)
    ]
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    if _compiled is None:
        _compiled = cute.compile(experts, *tensors, stream)
    _compiled(*tensors, stream)
    return out
