"""Programs of quack (quack-kernels): norms, softmax, losses, top-k, rotary, Hadamard transform, GEMMs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from common import close, main, tensor


def softmax(m: int, n: int, dtype: str = "bfloat16") -> None:
    from quack.softmax import softmax_fwd

    x = tensor(m, n, dtype=dtype)
    close(softmax_fwd(x), torch.softmax(x.cpu().float(), -1))


def softmax_backward(m: int, n: int, dtype: str = "bfloat16") -> None:
    from quack import softmax

    x, dy = tensor(m, n, dtype=dtype, grad=True), tensor(m, n, dtype=dtype)
    softmax(x).backward(dy)
    y = torch.softmax(x.detach().cpu().float(), -1)
    product = y * dy.cpu().float()
    close(x.grad, product - y * product.sum(-1, keepdim=True), 2e-2)


def rmsnorm(m: int, n: int, dtype: str = "bfloat16", weight: str = "float32", residual: bool = False) -> None:
    from quack import rmsnorm

    x, w = tensor(m, n, dtype=dtype), tensor(n, dtype=weight)
    more = tensor(m, n, dtype=dtype) if residual else None
    y = rmsnorm(x, w, residual=more, prenorm=residual)
    total = x.cpu().float() + (more.cpu().float() if residual else 0)
    if residual:
        y, kept = y
        close(kept, total, what="residual")
    close(y, F.rms_norm(total, (n,), w.cpu().float(), 1e-6), 2e-2)


def rmsnorm_backward(m: int, n: int, dtype: str = "bfloat16") -> None:
    from quack import rmsnorm

    x, w, dy = tensor(m, n, dtype=dtype, grad=True), tensor(n, grad=True), tensor(m, n, dtype=dtype)
    rmsnorm(x, w).backward(dy)
    x2, w2 = (t.detach().cpu().float().requires_grad_() for t in (x, w))
    F.rms_norm(x2, (n,), w2, 1e-6).backward(dy.cpu().float())
    close(x.grad, x2.grad, 2e-2, "dx")
    close(w.grad, w2.grad, 2e-2, "dw")


def layernorm(m: int, n: int, dtype: str = "bfloat16") -> None:
    from quack.rmsnorm import layernorm_fwd

    x, w, b = tensor(m, n, dtype=dtype), tensor(n), tensor(n)
    y, rstd, mean = layernorm_fwd(x, w, b, return_rstd=True, return_mean=True)
    x = x.cpu().float()
    close(y, F.layer_norm(x, (n,), w.cpu(), b.cpu(), 1e-6), 2e-2)
    close(mean, x.mean(-1), what="mean")
    close(rstd, (x.var(-1, unbiased=False) + 1e-6).rsqrt(), what="rstd")


def layernorm_backward(m: int, n: int, dtype: str = "bfloat16") -> None:
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    x, w, b, dy = tensor(m, n, dtype=dtype), tensor(n), tensor(n), tensor(m, n, dtype=dtype)
    _, rstd, mean = layernorm_fwd(x, w, b, return_rstd=True, return_mean=True)
    dx, dw, db = layernorm_bwd(x, w, dy, rstd, mean)
    x2, w2, b2 = (t.cpu().float().requires_grad_() for t in (x, w, b))
    F.layer_norm(x2, (n,), w2, b2, 1e-6).backward(dy.cpu().float())
    for got, want, what in ((dx, x2.grad, "dx"), (dw, w2.grad, "dw"), (db, b2.grad, "db")):
        close(got, want, 2e-2, what)


def cross_entropy(m: int, n: int, dtype: str = "bfloat16") -> None:
    from quack.cross_entropy import cross_entropy_fwd

    x, target = tensor(m, n, dtype=dtype), torch.randint(0, n, (m,)).cuda()
    loss, lse = cross_entropy_fwd(x, target, return_lse=True)
    x = x.cpu().float()
    close(loss, F.cross_entropy(x, target.cpu(), reduction="none"))
    close(lse, torch.logsumexp(x, -1), what="lse")


def cross_entropy_backward(m: int, n: int, dtype: str = "bfloat16") -> None:
    from quack import cross_entropy

    x, target = tensor(m, n, dtype=dtype, grad=True), torch.randint(0, n, (m,)).cuda()
    cross_entropy(x, target, reduction="sum").backward()
    x2 = x.detach().cpu().float().requires_grad_()
    F.cross_entropy(x2, target.cpu(), reduction="sum").backward()
    close(x.grad, x2.grad, 2e-2)


def linear_cross_entropy(m: int, d: int, v: int) -> None:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    x, w = tensor(m, d, dtype="bfloat16"), tensor(v, d, dtype="bfloat16", scale=d**-0.5)
    target = torch.randint(0, v, (m,)).cuda()
    with torch.no_grad():
        loss = chunked_linear_cross_entropy(x, w, target, chunk_size=m, tuned=False)
    close(loss, F.cross_entropy(x.cpu().float() @ w.cpu().float().T, target.cpu()), 2e-2)


def topk(m: int, n: int, k: int, dtype: str = "bfloat16", softmax: bool = False) -> None:
    from quack.topk import topk_fwd

    x = tensor(m, n, dtype=dtype)
    values, indices = topk_fwd(x, k, softmax=softmax)
    want = torch.topk(x.cpu(), k)[0].float()
    close(values, torch.softmax(want, -1) if softmax else want)
    close(torch.gather(x.cpu(), 1, indices.cpu().long()), want, what="indices")


def topk_backward(m: int, n: int, k: int) -> None:
    from quack.topk import topk_bwd

    dv = tensor(m, k, dtype="bfloat16")
    indices = torch.stack([torch.randperm(n)[:k] for _ in range(m)]).int().cuda()
    want = torch.zeros(m, n).scatter_(1, indices.cpu().long(), dv.cpu().float())
    close(topk_bwd(dv, None, indices, N=n), want)


def rotary(b: int, s: int, h: int, d: int, rotary_dim: int, interleaved: bool = False, inplace: bool = False) -> None:
    from quack.rotary import apply_rotary

    x = tensor(b, s, h, d, dtype="bfloat16")
    angle = torch.rand(s, rotary_dim // 2) * 6
    want = rotated(x.cpu().float(), angle, rotary_dim, interleaved)
    close(apply_rotary(x, angle.cos().cuda(), angle.sin().cuda(), interleaved=interleaved, inplace=inplace), want)


def rotated(x: torch.Tensor, angle: torch.Tensor, rotary_dim: int, interleaved: bool) -> torch.Tensor:
    """Rotary embedding of the first ``rotary_dim`` elements; angles (sequence, rotary_dim / 2)."""
    cos, sin, part = angle.cos()[:, None], angle.sin()[:, None], x[..., :rotary_dim]
    one, two = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    turned = (one * cos - two * sin, one * sin + two * cos)
    mixed = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((mixed, x[..., rotary_dim:]), -1)


def hadamard(m: int, n: int, dtype: str = "bfloat16") -> None:
    from quack.transform.hadamard import hadamard_transform_fwd, hadamard_transform_ref

    x = tensor(m, n, dtype=dtype)
    close(hadamard_transform_fwd(x, n**-0.5), hadamard_transform_ref(x.cpu().float(), n**-0.5))


def operands(m: int, n: int, k: int, dtype: str, batch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A (batch, M, K) and B (batch, K, N), K contiguous in both."""
    lead = (batch,) if batch else ()
    return tensor(*lead, m, k, dtype=dtype), tensor(*lead, n, k, dtype=dtype, scale=k**-0.5).mT


def gemm(m: int, n: int, k: int, dtype: str = "bfloat16", batch: int = 0, bias: bool = False, **more: object) -> None:
    from quack.gemm_interface import gemm

    a, b = operands(m, n, k, dtype, batch)
    row = tensor(*([batch] if batch else []), n) if bias else None
    want = a.cpu().float() @ b.cpu().float() + (row.cpu().unsqueeze(-2) if bias else 0)
    close(gemm(a, b, bias=row, tuned=False, **more), want, 2e-2)


def gemm_add(m: int, n: int, k: int, alpha: float = 1.0, beta: float = 1.0, inplace: bool = False) -> None:
    from quack.gemm_interface import gemm_add, gemm_add_inplace

    a, b = operands(m, n, k, "bfloat16")
    c = tensor(m, n, dtype="bfloat16")
    want = alpha * (a.cpu().float() @ b.cpu().float()) + beta * c.cpu().float()
    if inplace:
        gemm_add_inplace(a, b, c, alpha=alpha, beta=beta, tuned=False)
        close(c, want, 2e-2)
    else:
        close(gemm_add(a, b, c, alpha=alpha, beta=beta, tuned=False), want, 2e-2)


def activated(preact: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of (M, N), or of gates and values that alternate along N."""
    if activation == "swiglu":
        return F.silu(preact[..., ::2]) * preact[..., 1::2]
    calls = {"relu": F.relu, "relu_sq": lambda x: F.relu(x).square(), "gelu_tanh_approx": torch.nn.GELU("tanh")}
    return calls[activation](preact)


def gemm_act(m: int, n: int, k: int, activation: str = "relu") -> None:
    from quack.gemm_interface import gemm_act, gemm_gated

    a, b = operands(m, n, k, "bfloat16")
    preact, postact = (gemm_gated if "glu" in activation else gemm_act)(a, b, activation=activation, tuned=False)
    want = a.cpu().float() @ b.cpu().float()
    close(preact, want, 2e-2, "before the activation")
    close(postact, activated(want, activation), 2e-2, "after the activation")


def gemm_dact(m: int, n: int, k: int, activation: str = "relu") -> None:
    from quack.gemm_interface import gemm_dact, gemm_dgated

    a, b = operands(m, n, k, "bfloat16")
    gated = "glu" in activation
    preact = tensor(m, n * (2 if gated else 1), dtype="bfloat16")
    call = gemm_dgated if gated else gemm_dact
    dx, post = call(a, b, preact, activation=activation, tuned=False, dynamic_scheduler=False)[:2]
    before = preact.cpu().float().requires_grad_()
    after = activated(before, activation)
    after.backward(a.cpu().float() @ b.cpu().float())
    close(dx, before.grad, 2e-2, "dx")
    close(post, after, 2e-2, "activation")


def gemm_symmetric(m: int, k: int) -> None:
    from quack.gemm_interface import gemm_symmetric

    a = tensor(m, k, dtype="bfloat16", scale=k**-0.5)
    got = gemm_symmetric(a, a.mT)
    close(got[0] if isinstance(got, tuple) else got, a.cpu().float() @ a.cpu().float().T, 2e-2)


def gemm_rms(m: int, n: int, k: int) -> None:
    from quack.gemm_interface import gemm_rms

    a, b = operands(m, n, k, "bfloat16")
    out, rstd = gemm_rms(a, b, tuned=False)
    want = a.cpu().float() @ b.cpu().float()
    close(out, want, 2e-2)
    close(rstd, (want.square().mean(-1) + 1e-6).rsqrt(), 2e-2, "rstd")


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


def gemm_variable_m(lengths: list[int], n: int, k: int, gather: bool = False) -> None:
    from quack.gemm_interface import gemm

    rows, groups = sum(lengths), len(lengths)
    a = tensor(rows * (2 if gather else 1), k, dtype="bfloat16")
    b = tensor(groups, n, k, dtype="bfloat16", scale=k**-0.5).mT
    index = torch.randperm(rows * 2)[:rows].int().cuda() if gather else None
    got = gemm(a, b, cu_seqlens_m=offsets(lengths), A_idx=index, tuned=False)
    used = (a.cpu()[index.cpu().long()] if gather else a.cpu()).float().split(lengths)
    close(got, torch.cat([x @ w for x, w in zip(used, b.cpu().float(), strict=True)]), 2e-2)


def gemm_variable_k(lengths: list[int], m: int, n: int) -> None:
    from quack.gemm_interface import gemm

    total = sum(lengths)
    a, b = tensor(total, m, dtype="bfloat16").T, tensor(total, n, dtype="bfloat16", scale=0.1)
    got = gemm(a, b, cu_seqlens_k=offsets(lengths), tuned=False)
    parts = zip(a.cpu().float().split(lengths, 1), b.cpu().float().split(lengths), strict=True)
    close(got, torch.stack([x @ y for x, y in parts]), 2e-2)


def gemm_blockscaled(m: int, n: int, k: int, fmt: str = "nvfp4", batch: int = 0) -> None:
    from quack.blockscaled import BlockScaledFormat, BlockScaledOperand, blockscaled_quantize
    from quack.gemm_interface import gemm, gemm_blockscaled_ref

    kind = BlockScaledFormat.from_name(fmt)
    lead = (batch,) if batch else ()
    a, w = (
        BlockScaledOperand.from_parts(*blockscaled_quantize(tensor(*lead, rows, k, dtype="bfloat16"), fmt), kind)
        for rows in (m, n)
    )
    close(gemm(a, w.mT, tuned=False), gemm_blockscaled_ref(a, w.mT, out_dtype=torch.float32), 2e-2)


def gemm_quantized_out(m: int, n: int, k: int, fmt: str = "nvfp4") -> None:
    from quack.blockscaled import dequant_operand
    from quack.blockscaled.quantize import unpack_scale_blocked_to_2d
    from quack.gemm_interface import gemm

    a, b = operands(m, n, k, "bfloat16")
    got = gemm(a, b, out_dtype=fmt, tuned=False)
    vector = got.format.sf_vec_size
    scales = unpack_scale_blocked_to_2d(got.scale.cpu().unsqueeze(0), m, math.ceil(n / vector))[0].float()
    codes = got.qdata.cpu()
    values = dequant_operand(codes) if codes.dtype == torch.float4_e2m1fn_x2 else codes.float()
    close(values * scales.repeat_interleave(vector, 1), a.cpu().float() @ b.cpu().float(), 0.2)


def gemm_split_k(m: int, n: int, k: int, split_k: int, mode: str) -> None:
    from quack.gemm import SplitKMode

    gemm(m, n, k, split_k=split_k, split_k_mode=SplitKMode[mode])


def mlp(m: int, d: int, hidden: int, activation: str = "gelu_tanh_approx") -> None:
    from quack.mlp import MLP

    net = MLP(d, hidden, activation=activation, tuned=False, device="cuda", dtype=torch.bfloat16)
    x = tensor(m, d, dtype="bfloat16")
    with torch.no_grad():
        got = net(x)
        first, second = (layer.weight.detach().cpu().float() for layer in (net.fc1, net.fc2))
    close(got, F.gelu(x.cpu().float() @ first.T, approximate="tanh") @ second.T, 3e-2)


if __name__ == "__main__":
    main(globals())
