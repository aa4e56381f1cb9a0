"""Programs of cudnn-frontend (nvidia-cudnn-frontend): its kernels written in the CuTe DSL."""

from __future__ import annotations

import math
import sys

import torch
import torch.nn.functional as F
from common import close, main, tensor


def scale_factors(rows: int, k: int, batch: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random scale factors as the MMA reads them (32, 4, rows / 128, 4, K / block / 4, batch), and (batch, rows, K)."""
    columns = k // block
    power = torch.randint(-2, 3, (batch, rows, columns)).float()
    kind = torch.float8_e8m0fnu if block == 32 else torch.float8_e4m3fn
    codes = (2.0**power).to(kind).view(torch.uint8)
    tiles = codes.reshape(batch, rows // 128, 4, 32, columns // 4, 4).permute(0, 1, 4, 3, 2, 5).contiguous()
    return tiles.cuda().permute(3, 4, 1, 5, 2, 0).view(kind), (2.0**power).repeat_interleave(block, 2)


def gemm_amax(m: int, n: int, k: int, kind: str = "mxfp8", tiler: tuple = (128, 128), cluster: tuple = (1, 1)) -> None:
    from cudnn import gemm_amax_wrapper_sm100

    block = 32
    values = [torch.randn(1, rows, k).to(torch.float8_e4m3fn) for rows in (m, n)]
    a, b = (v.cuda().permute(1, 2, 0) for v in values)
    (sfa, wa), (sfb, wb) = scale_factors(m, k, 1, block), scale_factors(n, k, 1, block)
    out = gemm_amax_wrapper_sm100(
        a, b, sfa, sfb, c_dtype=torch.float32, acc_dtype=torch.float32, mma_tiler_mn=tiler, cluster_shape_mn=cluster,
        sf_vec_size=block,
    )  # fmt: skip
    want = (values[0].float() * wa) @ (values[1].float() * wb).mT
    close(out["c_tensor"].permute(2, 0, 1), want)
    close(out["amax_tensor"].reshape(()), want.abs().max(), what="amax")


def gemm_swiglu(m: int, n: int, k: int, batch: int = 1, tiler: tuple = (128, 128), dtype: str = "bfloat16") -> None:
    from cudnn import gemm_swiglu_wrapper_sm100

    a, b = tensor(batch, m, k, dtype=dtype), tensor(batch, n, k, dtype=dtype, scale=k**-0.5)
    out = gemm_swiglu_wrapper_sm100(
        a.permute(1, 2, 0), b.permute(1, 2, 0), ab12_dtype=torch.float32, c_dtype=torch.bfloat16,
        acc_dtype=torch.float32, mma_tiler_mn=tiler,
    )  # fmt: skip
    product = a.cpu().float() @ b.cpu().float().mT
    blocks = product.unflatten(2, (-1, 2, 32))
    value, gate = blocks[..., 0, :].flatten(2), blocks[..., 1, :].flatten(2)
    close(out["ab12_tensor"].permute(2, 0, 1), product, 2e-2, "A B")
    close(out["c_tensor"].permute(2, 0, 1), value * F.silu(gate), 2e-2)


def grouped_gemm(lengths: list[int], n: int, k: int, tiler: tuple = (256, 256)) -> None:
    from cudnn import grouped_gemm_wrapper_sm100

    rows, groups = sum(lengths), len(lengths)
    a, b = tensor(1, rows, k, dtype="bfloat16"), tensor(groups, n, k, dtype="bfloat16", scale=k**-0.5)
    alpha = torch.rand(groups).cuda()
    ends = torch.tensor(lengths).cumsum(0).int().cuda()
    out = grouped_gemm_wrapper_sm100(
        a.permute(1, 2, 0), ends, alpha, b_tensor=b.permute(1, 2, 0), mma_tiler_mn=tiler,
        prob_tensor=torch.ones(rows, 1, 1).cuda(),
    )  # fmt: skip
    parts = zip(a[0].cpu().float().split(lengths), b.cpu().float(), alpha.cpu(), strict=True)
    close(out["d_tensor"][..., 0], torch.cat([x @ w.T * s for x, w, s in parts]), 2e-2)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sequence, heads, head size) without a mask: output, and lse (sequence, heads)."""
    q, k, v = (t.cpu().float().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
    score = q @ k.mT * q.shape[-1] ** -0.5
    return (torch.softmax(score, -1) @ v).transpose(0, 1), torch.logsumexp(score, -1).T


def compression_attention(sq: int, sk: int, h: int = 1, hk: int = 1, d: int = 64) -> None:
    from cudnn import NSA

    q, k, v = (tensor(1, *s, d, dtype="bfloat16").transpose(1, 2) for s in ((sq, h), (sk, hk), (sk, hk)))
    out = NSA.compression_attention_wrapper(q, k, v, enable_lse=True, scale_softmax=d**-0.5)
    assert torch.isfinite(out["o_tensor"].cpu().float()).all()
    full, _ = attention(*(t[0].transpose(0, 1) for t in (q, k, v)))
    # the last query sees every compressed key
    close(out["o_tensor"][0].transpose(0, 1)[-1], full[-1], 2e-2, "last query")


def selection_attention(s: int, blocks: int, h: int = 4, hk: int = 1, d: int = 128, block: int = 64) -> None:
    from cudnn import NSA

    q, k, v = tensor(s, h, d, dtype="bfloat16"), tensor(s, hk, d, dtype="bfloat16"), tensor(s, hk, d, dtype="bfloat16")
    chosen = torch.stack([torch.randperm(s // block)[:blocks].sort()[0] for _ in range(s)])
    index, count = chosen[:, None].int().cuda(), torch.full((s, hk), blocks).int().cuda()
    ends = torch.tensor([0, s]).int().cuda()
    out = NSA.selection_attention_wrapper(
        q, k, v, index, count, ends, ends, block_size=block, scale_softmax=d**-0.5, max_s_q=s, max_s_k=s
    )
    want = []
    for i in range(s):
        rows = (chosen[i][:, None] * block + torch.arange(block)).flatten()
        want.append(attention(q[i : i + 1], k.cpu()[rows], v.cpu()[rows])[0])
    close(out["o_tensor"], torch.cat(want), 2e-2)


def topk_reduction(sq: int, sk: int, h: int = 4, d: int = 128, k_value: int = 16) -> None:
    """Keys stand for 32 places each, blocks for two keys; the first block and the newest are chosen by others."""
    from cudnn import NSA

    q, k = tensor(1, h, sq, d, dtype="bfloat16"), tensor(1, 1, sk, d, dtype="bfloat16")
    q, k = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k))
    out = NSA.topk_reduction_wrapper(q, k, torch.zeros(1, h, sq).cuda(), k_value=k_value)
    score = torch.exp(q.cpu().float() @ k.cpu().float().mT * d**-0.5).sum(1)[0]
    score = (score * ((torch.arange(sk) + 1) * 32 - 1 <= torch.arange(sq)[:, None])).unflatten(1, (-1, 2)).sum(2)
    index, got = (out[name].cpu()[0, 0] for name in ("topk_indices_tensor", "topk_scores_tensor"))
    chosen = index >= 0
    assert chosen[-1].sum() == min(k_value, sq // 64 - 3)
    close(got[chosen], torch.gather(score, 1, index.clamp(min=0).long())[chosen], 2e-2)


def rmsnorm_rht_amax(m: int, n: int, rows_per_cta: int = 2) -> None:
    from cudnn import rmsnorm_rht_amax_wrapper_sm100

    x, w = tensor(m, n, dtype="bfloat16"), tensor(n, dtype="bfloat16")
    out = rmsnorm_rht_amax_wrapper_sm100(x, w, rows_per_cta=rows_per_cta)
    hadamard = torch.ones(1, 1)
    for _ in range(4):
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    want = F.rms_norm(x.cpu().float(), (n,), w.cpu().float(), 1e-5).reshape(m, -1, 16) @ hadamard / 4
    got, amax = list(out.values())[:2]
    close(got, want.reshape(m, n), 2e-2)
    close(amax, want.abs().reshape(m // rows_per_cta, -1).amax(1), what="amax")


def norm_reference(variant: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, groups: int) -> torch.Tensor:
    if variant == "rms_norm":
        return F.rms_norm(x, x.shape[1:], w.reshape(x.shape[1:]), 1e-5)
    if variant == "layer_norm":
        return F.layer_norm(x, x.shape[1:], w.reshape(x.shape[1:]), b.reshape(x.shape[1:]), 1e-5)
    if variant == "group_norm":
        return F.group_norm(x, groups, w, b, 1e-5)
    if variant == "instance_norm":
        return F.instance_norm(x, weight=w, bias=b, eps=1e-5)
    return F.batch_norm(x, None, None, w, b, True, 0.1, 1e-5)


def norm(variant: str, shape: list[int], groups: int = 4, backward: bool = False) -> None:
    import cutlass.experimental.primitives

    # nvidia-cutlass-dsl 4.8.1 has them there
    sys.modules["cutlass.primitives"] = cutlass.experimental.primitives
    from cudnn.norm.bprop.api import norm_bprop
    from cudnn.norm.fprop.api import norm_fprop

    whole = variant in ("rms_norm", "layer_norm")
    size = math.prod(shape[1:]) if whole else shape[1]
    x, w, b = tensor(*shape, dtype="bfloat16"), tensor(size, dtype="bfloat16"), tensor(size, dtype="bfloat16")
    more = {"num_groups": groups} if variant == "group_norm" else {}
    y, mean, rstd = norm_fprop(variant, x, w, None if variant == "rms_norm" else b, **more)
    leaves = [t.detach().cpu().float().requires_grad_() for t in (x, w, b)]
    want = norm_reference(variant, *leaves, groups)
    close(y, want, 2e-2)
    if not backward:
        return
    dy = tensor(*shape, dtype="bfloat16")
    want.backward(dy.cpu().float())
    dx, dw, db = norm_bprop(variant, dy, x, w, mean, rstd, has_beta=variant != "rms_norm", **more)
    close(dx, leaves[0].grad, 3e-2, "dx")
    close(dw.reshape(-1), leaves[1].grad.reshape(-1), 3e-2, "dweight")
    if variant != "rms_norm":
        close(db.reshape(-1), leaves[2].grad.reshape(-1), 3e-2, "dbias")


def tail_rope(tokens: int, heads: int, d: int) -> None:
    from cudnn.rope.tail import tail_rope

    x, angle = tensor(tokens, heads, d, dtype="bfloat16"), torch.rand(tokens, 32) * 6
    out = tail_rope(x, angle.cos().cuda(), angle.sin().cuda())["out"].cpu().float()
    close(out[..., :-64], x[..., :-64], 1e-6, "what is copied")
    tail, cos, sin = x.cpu().float()[..., -64:], angle.cos()[:, None], angle.sin()[:, None]
    one, two = tail[..., ::2], tail[..., 1::2]
    want = torch.stack((one * cos - two * sin, one * sin + two * cos), -1).flatten(-2)
    half = torch.cat((tail[..., :32] * cos - tail[..., 32:] * sin, tail[..., :32] * sin + tail[..., 32:] * cos), -1)
    best = min((want, half), key=lambda w: (w - out[..., -64:]).abs().max().item())
    close(out[..., -64:], best, 2e-2, "what is rotated")


def vision_rope_backward(tokens: int) -> None:
    from cudnn.rope.api import vision_rope_backward_wrapper

    gq, gv = (tensor(16, tokens, 64, dtype="bfloat16").transpose(0, 1) for _ in range(2))
    gk = tensor(16, 64, tokens, dtype="bfloat16").permute(2, 0, 1)
    angle = torch.rand(tokens, 1, 32) * 6
    out = vision_rope_backward_wrapper(gq, gk, gv, angle.cos().cuda(), angle.sin().cuda())["grad_qkv"]
    got = out.cpu().float().reshape(tokens, 3, 16, 64)
    close(got[:, 2], gv, 1e-6, "dv")
    for i, g in enumerate((gq, gk)):
        g, cos, sin = g.cpu().float(), angle.cos(), angle.sin()
        one, two = g.chunk(2, -1)
        close(got[:, i], torch.cat((one * cos + two * sin, two * cos - one * sin), -1), 2e-2, "qk"[i])


def causal_conv1d_update(n: int, d: int, width: int = 4, silu: bool = True) -> None:
    from cudnn.ops import causal_conv1d_update

    x, state, w, b = (tensor(*s, dtype="bfloat16") for s in ((n, d), (n, d, width - 1), (d, width), (d,)))
    window = torch.cat((state.cpu().float(), x.cpu().float()[..., None]), -1)
    want = (window * w.cpu().float()).sum(-1) + b.cpu().float()
    close(causal_conv1d_update(x, state, w, b, "silu" if silu else None), F.silu(want) if silu else want, 2e-2)
    close(state, window[..., 1:], 1e-6, "state")


def causal_conv1d(b: int, d: int, t: int, bias: bool = False) -> None:
    from cudnn.ops import causal_conv1d

    x, w = tensor(b, t, d, dtype="bfloat16").transpose(1, 2), tensor(d, 4, dtype="bfloat16")
    more = tensor(d, dtype="bfloat16") if bias else None
    with torch.no_grad():
        got = causal_conv1d(x, w, more, "silu")
    padded = F.pad(x.cpu().float(), (3, 0))
    want = F.conv1d(padded, w.cpu().float()[:, None], None if more is None else more.cpu().float(), groups=d)
    close(got, F.silu(want), 2e-2)


def nvfp4_block_scale(m: int, k: int) -> None:
    from cudnn.ops import nvfp4_block_scale_dequantize, nvfp4_block_scale_quantize

    x = tensor(1, m, k, dtype="bfloat16")
    one = torch.ones(1, 1, 1).cuda()
    out = nvfp4_block_scale_quantize(x, one)
    back = nvfp4_block_scale_dequantize(out["packed_tensor"], out["scale_tensor"], one)
    close(back if isinstance(back, torch.Tensor) else next(iter(back.values())), x, 0.15)


def csa_compressor(lengths: list[int], d: int = 128, ratio: int = 4, coff: int = 1) -> None:
    from cudnn.csa import csa_compressor_forward_wrapper

    total = sum(lengths)
    kv, score = tensor(total, coff * d, dtype="bfloat16"), tensor(total, coff * d, dtype="bfloat16")
    ape = tensor(ratio, coff * d)
    starts, blocks = (torch.tensor([0, *n]).cumsum(0).int().cuda() for n in (lengths, [x // ratio for x in lengths]))
    got = csa_compressor_forward_wrapper(kv, score, ape, starts, blocks, ratio=ratio, head_dim=d, coff=coff)["out"]
    want = []
    for k, s in zip(kv.cpu().float().split(lengths), score.cpu().float().split(lengths), strict=True):
        whole = len(k) // ratio * ratio
        weights = torch.softmax(s[:whole].reshape(-1, ratio, d) + ape.cpu(), 1)
        want.append((weights * k[:whole].reshape(-1, ratio, d)).sum(1))
    close(got, torch.cat(want), 2e-2)


def indexer_forward(sq: int, sk: int, h: int = 64, d: int = 128, ratio: int = 4) -> None:
    from cudnn import DSA

    q, k, w = (tensor(*s, dtype="bfloat16") for s in ((1, sq, h, d), (1, sk, 1, d), (1, sq, h)))
    got = DSA.indexer_forward_wrapper(q, k, w, ratio=ratio)["scores"].cpu()[0]
    each = torch.relu(torch.einsum("qhd,kd->qhk", q.cpu().float()[0], k.cpu().float()[0, :, 0]))
    want = (each * w.cpu().float()[0, :, :, None]).sum(1)
    seen = torch.isfinite(got)
    assert seen.any()
    close(got[seen], want[seen], 2e-2)


def indexer_top_k(rows: int, n: int, k: int, dtype: str = "float32") -> None:
    from cudnn import DSA

    x = tensor(rows, n, dtype=dtype)
    lengths = torch.tensor([n - 11 * i for i in range(rows)]).int().cuda()
    out = DSA.indexer_top_k_wrapper(x, lengths, k)
    for i in range(rows):
        want = torch.topk(x.cpu()[i, : int(lengths[i])].float(), k)[0]
        got = x.cpu()[i][out["indices"].cpu()[i].long()].float()
        close(got.sort(descending=True)[0], want, 1e-6, f"row {i}")


def compactify(rows: int, k: int) -> None:
    from cudnn.deepseek_sparse_attention.indexer_top_k.api import compactify_wrapper

    index = torch.randint(0, 1000, (rows, k)).masked_fill(torch.rand(rows, k) < 0.3, -1).int()
    out = compactify_wrapper(index.cuda())
    for i in range(rows):
        valid = index[i][index[i] >= 0]
        assert int(out["topk_length"].cpu().reshape(-1)[i]) == len(valid)
        assert torch.equal(out["indices"].cpu()[i, : len(valid)].sort()[0], valid.sort()[0])


def sparse_attention_forward(s: int, sk: int, k: int, h: int = 64, d: int = 512) -> None:
    from cudnn import DSA

    q, kv = tensor(s, h, d, dtype="bfloat16"), tensor(sk, d, dtype="bfloat16")
    index = torch.stack([torch.randperm(sk)[:k] for _ in range(s)]).int()
    out = DSA.sparse_attention_forward_wrapper(q, kv, index.cuda(), softmax_scale=d**-0.5)
    got = out["out"] if "out" in out else next(iter(out.values()))
    for i in range(s):
        rows = kv.cpu().float()[index[i].long()]
        want = torch.softmax(q.cpu().float()[i] @ rows.T * d**-0.5, -1) @ rows
        close(got[i], want[:, : got.shape[-1]], 2e-2, f"query {i}")


if __name__ == "__main__":
    main(globals())
