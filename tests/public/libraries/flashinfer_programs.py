"""Programs of FlashInfer (flashinfer-python): its kernels written in the CuTe DSL."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import close, main, tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fp4_values(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 of packed bytes (…, K / 2): fp32 (…, K)."""
    codes = codes.cpu().view(torch.uint8)
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    return E2M1[both & 7] * torch.where(both > 7, -1.0, 1.0)


def unswizzled(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scale factors of the 128x4 layout as a matrix (rows, columns)."""
    tiles = scales.cpu().reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -1)[:rows, :columns]


def dequantized(codes: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """fp32 (M, K) of codes and row-major scale factors (M, K / block), UE8M0 where block is 32."""
    values = codes.cpu().float() if codes.dtype == torch.float8_e4m3fn else fp4_values(codes)
    kind = torch.float8_e4m3fn if block == 16 else torch.float8_e8m0fnu
    return values * scales.cpu().view(kind).float().repeat_interleave(block, -1)


def normed(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return F.rms_norm(x.cpu().float(), x.shape[-1:], w.cpu().float(), eps)


def rmsnorm(m: int, n: int, dtype: str = "bfloat16", gemma: bool = False) -> None:
    from flashinfer.norm import gemma_rmsnorm, rmsnorm

    x, w = tensor(m, n, dtype=dtype), tensor(n, dtype=dtype)
    close((gemma_rmsnorm if gemma else rmsnorm)(x, w), normed(x, w.cpu().float() + gemma), 2e-2)


def rmsnorm_quant(m: int, n: int) -> None:
    from flashinfer.norm import rmsnorm_quant

    x, w = tensor(m, n, dtype="bfloat16"), tensor(n, dtype="bfloat16")
    out = torch.empty(m, n, dtype=torch.float8_e4m3fn, device="cuda")
    rmsnorm_quant(out, x, w, torch.tensor([0.5]).cuda())
    close(out, normed(x, w) / 0.5, 5e-2)


def fused_add_rmsnorm(m: int, n: int, dtype: str = "bfloat16") -> None:
    from flashinfer.norm import fused_add_rmsnorm

    x, residual, w = tensor(m, n, dtype=dtype), tensor(m, n, dtype=dtype), tensor(n, dtype=dtype)
    total = x.cpu().float() + residual.cpu().float()
    fused_add_rmsnorm(x, residual, w)
    close(residual, total, 2e-2, "residual")
    close(x, normed(total, w), 2e-2)


def layernorm(m: int, n: int) -> None:
    from flashinfer.norm import layernorm

    x, g, b = tensor(m, n, dtype="bfloat16"), tensor(n), tensor(n)
    close(layernorm(x, g, b), F.layer_norm(x.cpu().float(), (n,), g.cpu(), b.cpu(), 1e-6), 2e-2)


def gated_residual_rmsnorm(m: int) -> None:
    from flashinfer.norm import gated_residual_rmsnorm

    n = 8192
    branch, residual, w = tensor(m, n, dtype="bfloat16"), tensor(m, n), tensor(n, dtype="bfloat16")
    alpha, beta = tensor(n), tensor(n)
    got = gated_residual_rmsnorm(branch, residual, w, alpha, beta)
    weighted = branch.cpu().float() * w.cpu().float()
    close(got, alpha.cpu() * residual.cpu() + beta.cpu() * F.rms_norm(weighted, (n,), None, 1e-6), 2e-2)


def rmsnorm_sigmoid_gate(m: int, heads: int) -> None:
    from flashinfer.norm import rmsnorm_sigmoid_gate

    x, gate = tensor(m, heads, 64, dtype="bfloat16"), tensor(m, heads, 64, dtype="bfloat16")
    want = F.rms_norm(x.cpu().float(), (64,), None, 1e-5) * torch.sigmoid(gate.cpu().float())
    rmsnorm_sigmoid_gate(x, gate)
    close(x, want, 2e-2)


def rmsnorm_fp4quant(m: int, n: int, block: int = 16, swizzled: bool = False, add: bool = False) -> None:
    from flashinfer.cute_dsl.add_rmsnorm_fp4quant import add_rmsnorm_fp4quant
    from flashinfer.cute_dsl.rmsnorm_fp4quant import rmsnorm_fp4quant

    x, w = tensor(m, n, dtype="float16"), tensor(n, dtype="float16")
    total = x.cpu().float()
    if add:
        residual = tensor(m, n, dtype="float16")
        total = total + residual.cpu().float()
        codes, scales = add_rmsnorm_fp4quant(x, residual, w, block_size=block, is_sf_swizzled_layout=swizzled)[:2]
    else:
        codes, scales = rmsnorm_fp4quant(x, w, block_size=block, is_sf_swizzled_layout=swizzled)
    scales = unswizzled(scales.view(torch.uint8), m, n // block) if swizzled else scales
    close(dequantized(codes, scales, block), normed(total, w), 0.15)


def nvfp4_quantize(m: int, n: int, dtype: str = "bfloat16", silu: bool = False) -> None:
    from flashinfer import SfLayout, nvfp4_quantize

    x = tensor(m, n, dtype=dtype)
    codes, scales = nvfp4_quantize(x, torch.tensor([2.0]).cuda(), sfLayout=SfLayout.layout_128x4, backend="cute-dsl")
    close(dequantized(codes, unswizzled(scales.view(torch.uint8), m, n // 16), 16) / 2.0, x, 0.15)


def mxfp4_quantize(m: int, n: int, dtype: str = "bfloat16") -> None:
    from flashinfer import mxfp4_quantize

    x = tensor(m, n, dtype=dtype)
    codes, scales = mxfp4_quantize(x, backend="cute-dsl")
    close(dequantized(codes, unswizzled(scales.view(torch.uint8), m, n // 32), 32), x, 0.2)


def mxfp8_quantize(m: int, n: int, dtype: str = "bfloat16", swizzled: bool = True) -> None:
    from flashinfer import mxfp8_quantize

    x = tensor(m, n, dtype=dtype)
    codes, scales = mxfp8_quantize(x, is_sf_swizzled_layout=swizzled, backend="cute-dsl")
    scales = scales.view(torch.uint8)
    scales = unswizzled(scales, m, n // 32) if swizzled else scales.reshape(m, n // 32)
    close(dequantized(codes.view(torch.float8_e4m3fn), scales, 32), x, 5e-2)


def quantized(rows: int, k: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and swizzled scale factors from the library's own quantizer, and the numbers they stand for."""
    from flashinfer import SfLayout, mxfp8_quantize, nvfp4_quantize

    x = tensor(rows, k, dtype="bfloat16")
    if kind == "mxfp8":
        codes, scales = mxfp8_quantize(x, is_sf_swizzled_layout=True, backend="cute-dsl")
        codes = codes.view(torch.float8_e4m3fn)
    else:
        codes, scales = nvfp4_quantize(
            x, torch.tensor([1.0]).cuda(), sfLayout=SfLayout.layout_128x4, backend="cute-dsl"
        )
    block = 32 if kind == "mxfp8" else 16
    return codes, scales, dequantized(codes, unswizzled(scales.view(torch.uint8), rows, k // block), block)


def mm_fp4(m: int, n: int, k: int, backend: str = "cute-dsl") -> None:
    from flashinfer import mm_fp4

    (a, sfa, wa), (b, sfb, wb) = quantized(m, k, "nvfp4"), quantized(n, k, "nvfp4")
    got = mm_fp4(a, b.T, sfa, sfb.T, torch.tensor([1.0]).cuda(), torch.bfloat16, backend=backend)
    close(got, wa @ wb.T, 2e-2)


def mm_fp4_published(points: str, sms: int) -> None:
    """mm_fp4 at ``points`` ("1x512x7168,…": M, N and K) on ``sms`` multiprocessors, by the tactic of the times that
    FlashInfer has published (its pull request 2540): tiles of 128 x 128, no cluster, no swap, no prefetch. Compares
    nothing."""
    from flashinfer import mm_fp4
    from flashinfer.cute_dsl import utils
    from flashinfer.gemm import gemm_base

    utils.get_max_active_clusters = lambda size: sms // size
    gemm_base._select_sm100_mm_fp4_splitk_tactic = lambda *given: None
    gemm_base._select_sm100_mm_fp4_cute_dsl_tactic = lambda *given: ((128, 128), (1, 1), False, False, "sm100", None)
    for point in points.split(","):
        m, n, k = map(int, point.split("x"))
        a, b = (torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8).cuda() for rows in (m, n))
        padded = (-(-rows // 128) * 128 for rows in (m, n))
        sfa, sfb = (torch.full((rows, -(-k // 64) * 4), 0x38, dtype=torch.uint8).cuda() for rows in padded)
        mm_fp4(a, b.T, sfa, sfb.T, torch.tensor([1.0]).cuda(), torch.bfloat16, backend="cute-dsl")


def grouped_gemm_published(points: str, pair: bool = False) -> None:
    """grouped_gemm_nt_masked at ``points`` ("4096x7168:231/255,…": N, K, and the rows of each group), as FlashInfer's
    ``bench_cute_dsl_blockscaled_gemm.py`` calls it: 4096 rows a group of which those are wanted, tiles of 128 x 128, no
    cluster; or of 256 x 128 by a ``pair``. Elements are zeros, which cost no memory here; compares nothing."""
    from flashinfer.gemm import grouped_gemm_nt_masked

    kinds = {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "c_dtype": "bfloat16", "sf_vec_size": 16}
    kinds |= {"mma_tiler_mn": (256, 128), "cluster_shape_mn": (2, 1)} if pair else {}
    for point in points.split(","):
        shape, rows = point.split(":")
        (n, k), wanted, most = map(int, shape.split("x")), [int(m) for m in rows.split("/")], 4096
        groups = len(wanted)
        operands = []
        for size in (most, n):
            codes = torch.zeros(groups, size, k // 2, dtype=torch.uint8, device="cuda")
            scales = torch.zeros(groups, size // 128, k // 64, 32, 4, 4, dtype=torch.uint8, device="cuda")
            operands.append((codes.permute(1, 2, 0), scales.view(torch.float8_e4m3fn).permute(3, 4, 1, 5, 2, 0)))
        out = torch.empty(groups, most, n, dtype=torch.bfloat16, device="cuda").permute(1, 2, 0)
        grouped_gemm_nt_masked(*operands, out, torch.tensor(wanted).int().cuda(), **kinds)


def mm_mxfp8(m: int, n: int, k: int, backend: str = "cute-dsl") -> None:
    from flashinfer import mm_mxfp8

    (a, sfa, wa), (b, sfb, wb) = quantized(m, k, "mxfp8"), quantized(n, k, "mxfp8")
    close(mm_mxfp8(a, b.T, sfa, sfb, out_dtype=torch.bfloat16, backend=backend), wa @ wb.T, 2e-2)


def gemm_bf16(m: int, n: int, k: int, how: str) -> None:
    from flashinfer.gemm.kernels import dense_bf16_gemm_direct as direct
    from flashinfer.gemm.kernels import dense_bf16_gemm_sm100_splitk as splitk
    from flashinfer.gemm.kernels import dense_bf16_gemm_warp_splitk as warp

    a, b = tensor(m, k, dtype="bfloat16"), tensor(n, k, dtype="bfloat16", scale=k**-0.5).T
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    if how == "direct":
        direct.run_direct_dense(a, b, out, False, direct.default_tactic(m, n, k))
    elif how == "splitk":
        splitk.run_splitk_dense(a, b, None, out, False, splitk.default_tactic(m, n, k))
    else:
        warp.run_warp_splitk_dense(a, b, out, False, warp.default_tactic(m, n, k))
    close(out, a.cpu().float() @ b.cpu().float(), 2e-2)


def grouped_gemm_fp8_contiguous(groups: int, n: int, k: int) -> None:
    from flashinfer.gemm.kernels.grouped_gemm_contiguous_blackwell import (
        grouped_gemm_fp8_nt_groupwise_contiguous_sm100 as call,
    )

    m = groups * 128
    a, b = tensor(m, k).to(torch.float8_e4m3fn), tensor(groups, n, k).to(torch.float8_e4m3fn)
    sa, sb = torch.rand(m, k // 128).cuda(), torch.rand(groups, n // 128, k // 128).cuda()
    index = torch.arange(groups).repeat_interleave(128).int().cuda()
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    call(a, b, sa, sb, index, out)
    wide = a.cpu().float() * sa.cpu().repeat_interleave(128, 1)
    weights = b.cpu().float() * sb.cpu().repeat_interleave(128, 1).repeat_interleave(128, 2)
    close(out, torch.cat([x @ w.T for x, w in zip(wide.split(128), weights, strict=True)]), 2e-2)


def normalize_qk(rows: int, heads: int, d: int) -> None:
    from flashinfer.gdn_kernels.qk_l2norm import normalize_qk

    q, k = tensor(rows, heads, d, dtype="bfloat16"), tensor(rows, heads, d, dtype="bfloat16")
    for got, x in zip(normalize_qk(q, k), (q, k), strict=True):
        close(got, x.cpu().float() * (x.cpu().float().square().sum(-1, keepdim=True) + 1e-6).rsqrt(), 2e-2)


def delta_rule(q, k, v, decay, beta, state, scale):
    """One token after the other: S = decay S + k (beta (v - decay S k)), o = S q; state (heads, V, K)."""
    out = []
    for t in range(q.shape[0]):
        state = state * decay[t][:, None, None]
        error = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + error[:, :, None] * k[t][:, None, :]
        out.append(torch.einsum("hvk,hk->hv", state, q[t]) * scale)
    return torch.stack(out), state


def gdn_decode(b: int, h: int, hv: int, pretranspose: bool = True, d: int = 128) -> None:
    from flashinfer.gdn_decode import gated_delta_rule_decode, gated_delta_rule_decode_pretranspose

    q, k, v = (tensor(b, 1, n, d, dtype="bfloat16") for n in (h, h, hv))
    a, beta = tensor(b, 1, hv, dtype="bfloat16"), tensor(b, 1, hv, dtype="bfloat16")
    a_log, bias = tensor(hv), tensor(hv)
    state = tensor(b, hv, d, d, scale=0.1)
    call = gated_delta_rule_decode_pretranspose if pretranspose else gated_delta_rule_decode
    before = state.cpu() if pretranspose else state.cpu().mT
    got, after = call(q, k, v, state, a_log, a, bias, beta)
    decay = torch.exp(-torch.exp(a_log.cpu()) * F.softplus(a.cpu().float() + bias.cpu()))
    unit = [F.normalize(t.cpu().float(), dim=-1).repeat_interleave(hv // h, 2) for t in (q, k)]
    for i in range(b):
        want, state_want = delta_rule(
            unit[0][i],
            unit[1][i],
            v.cpu().float()[i],
            decay[i],
            torch.sigmoid(beta.cpu().float()[i]),
            before[i],
            d**-0.5,
        )
        close(got[i], want, 2e-2, "output")
        close(after.cpu()[i] if pretranspose else after.cpu()[i].mT, state_want, 2e-2, "state")


def gdn_prefill(lengths: list[int], h: int = 1, hv: int = 1, d: int = 128, parallel: bool = False) -> None:
    """The whole of each sequence; ``parallel`` cuts it into chunks that go on at the same time."""
    from flashinfer.gdn_kernels.blackwell.gdn_cp_prefill import cp_delta_rule_dsl_sm100
    from flashinfer.gdn_kernels.blackwell.gdn_prefill import chunk_gated_delta_rule_sm100

    total = sum(lengths)
    q, k = (F.normalize(tensor(total, h, d), dim=-1).bfloat16() for _ in range(2))
    v = tensor(total, hv, d, dtype="bfloat16")
    gate, beta = torch.rand(total, hv).mul(0.5).add(0.5).cuda(), torch.rand(total, hv).cuda()
    out = torch.empty(total, hv, d, dtype=torch.bfloat16, device="cuda")
    last = torch.empty(len(lengths), hv, d, d, device="cuda")
    starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    if parallel:
        more = {"max_seqlen": max(lengths), "cp_chunk_len": 64}
        cp_delta_rule_dsl_sm100(out, last, q, k, v, gate, beta, starts, d**-0.5, **more)
    else:
        chunk_gated_delta_rule_sm100(q, k, v, gate, beta, out, starts, None, last, d**-0.5)
    for i, n in enumerate(lengths):
        part = slice(sum(lengths[:i]), sum(lengths[:i]) + n)
        args = [t.cpu().float()[part] for t in (q, k, v, gate, beta)]
        args[:2] = [t.repeat_interleave(hv // h, 1) for t in args[:2]]
        want, state = delta_rule(*args, torch.zeros(hv, d, d), d**-0.5)
        close(out[part], want, 4e-2, "output")
        close(last[i], state, 4e-2, "state")


def recurrent_kda(b: int, h: int, d: int = 128) -> None:
    from flashinfer.kda_kernels.recurrent_kda import run_recurrent_kda

    q, k, v = (tensor(b, 1, h, d, dtype="bfloat16") for _ in range(3))
    g = -torch.rand(b, 1, h, d).bfloat16().cuda()
    beta = torch.rand(b, 1, h).bfloat16().cuda()
    state = tensor(b, h, d, d, dtype="bfloat16", scale=0.1)
    before = state.cpu().float()
    out, _ = run_recurrent_kda(q, k, v, g, beta, initial_state=state, output_final_state=True)
    unit = [F.normalize(t.cpu().float(), dim=-1)[:, 0] for t in (q, k)]
    now = before * torch.exp(g.cpu().float()[:, 0])[:, :, None, :]
    error = (v.cpu().float()[:, 0] - torch.einsum("bhvk,bhk->bhv", now, unit[1])) * beta.cpu().float()[:, 0, :, None]
    now = now + error[..., None] * unit[1][:, :, None, :]
    close(out[:, 0], torch.einsum("bhvk,bhk->bhv", now, unit[0]) * d**-0.5, 3e-2)


def top_k_varlen(rows: int, n: int, k: int, backend: str = "radix", dtype: str = "float32") -> None:
    from flashinfer.topk_varlen.topk_varlen import top_k_varlen

    x = tensor(rows, n, dtype=dtype)
    lengths = torch.tensor([n - 13 * i for i in range(rows)]).int().cuda()
    got = top_k_varlen(x, lengths, k, backend=backend)
    got = got[0] if isinstance(got, tuple) else got
    for i in range(rows):
        want = torch.topk(x.cpu()[i, : int(lengths[i])].float(), k)[0]
        close(x.cpu()[i][got.cpu()[i].long()].float().sort(descending=True)[0], want, 1e-6, f"row {i}")


def fp8_paged_mqa_logits(b: int, next_n: int, heads: int, blocks: int, block: int = 64, d: int = 128) -> None:
    from flashinfer.attn_scores.attn_scores import fp8_paged_mqa_logits

    length = blocks * block
    q = tensor(b, next_n, heads, d).to(torch.float8_e4m3fn)
    keys, scale = torch.randn(b * blocks, block, d).to(torch.float8_e4m3fn), torch.rand(b * blocks, block)
    fused = torch.cat(
        (keys.view(torch.uint8).reshape(b * blocks, -1), scale.view(torch.uint8).reshape(b * blocks, -1)), 1
    )
    fused = fused.reshape(b * blocks, block, 1, d + 4).cuda()
    weights = tensor(b * next_n, heads)
    table = torch.randperm(b * blocks).reshape(b, blocks).int().cuda()
    lengths = torch.tensor([length - 5 * i for i in range(b)]).int().cuda()
    got = fp8_paged_mqa_logits(q, fused, weights, table, lengths, length)
    for i in range(b):
        k = keys[table.cpu()[i].long()].float().reshape(length, d)
        s = scale[table.cpu()[i].long()].reshape(length)
        for t in range(next_n):
            seen = int(lengths[i]) - (next_n - 1 - t)
            each = torch.relu(q.cpu().float()[i, t] @ k.T) * weights.cpu()[i * next_n + t][:, None]
            close(got[i * next_n + t, :seen], (each.sum(0) * s)[:seen], 2e-2)


def moe_unpermute(tokens: int, top_k: int, n: int) -> None:
    from flashinfer.fused_moe.cute_dsl.blackwell.moe_finalize import moe_unpermute

    rows = tensor(tokens * top_k, n, dtype="bfloat16")
    index = torch.randperm(tokens * top_k).reshape(tokens, top_k).int().cuda()
    scales = torch.rand(tokens, top_k).cuda()
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda")
    moe_unpermute(rows, out, index, scales, tokens, top_k)
    close(out, (rows.cpu().float()[index.cpu().long()] * scales.cpu()[..., None]).sum(1), 2e-2)


if __name__ == "__main__":
    main(globals())
