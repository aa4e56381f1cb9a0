"""Programs of FlashAttention-4 (flash-attn-4): attention forward, backward, and its smaller kernels."""

from __future__ import annotations

import torch
from common import close, main, tensor


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, window: tuple = (None, None),
    softcap: float = 0.0, sink: torch.Tensor | None = None, scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of (batch, sequence, heads, head size) in fp32 on the host: output and lse (batch, heads, sequence)."""
    q, k, v = (t.cpu().float().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    score = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    rows, columns = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], torch.arange(k.shape[2])
    left, right = window[0], 0 if causal else window[1]
    if right is not None:
        score = score.masked_fill(columns > rows + right, -torch.inf)
    if left is not None:
        score = score.masked_fill(columns < rows - left, -torch.inf)
    full = (
        score if sink is None else torch.cat((score, sink.cpu().float()[:, None, None].expand(*score.shape[:3], 1)), -1)
    )
    lse = torch.logsumexp(full, -1)
    weights = torch.exp(score - lse[..., None]).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2), lse


def inputs(b: int, sq: int, sk: int, h: int, hk: int, d: int, dv: int, dtype: str) -> tuple[torch.Tensor, ...]:
    return tensor(b, sq, h, d, dtype=dtype), tensor(b, sk, hk, d, dtype=dtype), tensor(b, sk, hk, dv, dtype=dtype)


def forward(
    b: int = 1, sq: int = 256, sk: int = 256, h: int = 1, hk: int = 1, d: int = 64, dv: int = 0,
    dtype: str = "bfloat16", causal: bool = False, window: tuple = (None, None), softcap: float = 0.0,
    sink: bool = False, num_splits: int = 1, pack_gqa: bool | None = None,
) -> None:  # fmt: skip
    from flash_attn.cute.interface import flash_attn_func

    q, k, v = inputs(b, sq, sk, h, hk, d, dv or d, dtype)
    extra = tensor(h, dtype="bfloat16") if sink else None
    with torch.no_grad():
        out, lse = flash_attn_func(
            q, k, v, causal=causal, window_size=window, softcap=softcap, learnable_sink=extra,
            num_splits=num_splits, pack_gqa=pack_gqa, return_lse=True,
        )  # fmt: skip
    want, want_lse = reference(q, k, v, causal, window, softcap, extra)
    close(out, want, 2e-2)
    close(lse, want_lse, what="lse")


def forward_varlen(
    lengths_q: list, lengths_k: list, h: int = 1, hk: int = 1, d: int = 64, causal: bool = False
) -> None:
    from flash_attn.cute.interface import flash_attn_varlen_func

    q, k, v = inputs(1, sum(lengths_q), sum(lengths_k), h, hk, d, d, "bfloat16")
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().cuda() for n in (lengths_q, lengths_k))
    with torch.no_grad():
        got = flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
            max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k), causal=causal,
        )  # fmt: skip
    got = got[0] if isinstance(got, tuple) else got
    parts = zip(q.split(lengths_q, 1), k.split(lengths_k, 1), v.split(lengths_k, 1), strict=True)
    close(got, torch.cat([reference(*part, causal)[0][0] for part in parts]), 2e-2)


def forward_paged(b: int, sq: int, pages: int, page: int, h: int = 4, hk: int = 1, d: int = 128) -> None:
    from flash_attn.cute.interface import flash_attn_varlen_func

    q = tensor(b, sq, h, d, dtype="bfloat16")
    k, v = (tensor(b * pages, page, hk, d, dtype="bfloat16") for _ in range(2))
    table = torch.randperm(b * pages).reshape(b, pages).int().cuda()
    used = torch.tensor([pages * page - 7 * i for i in range(b)]).int().cuda()
    with torch.no_grad():
        got = flash_attn_varlen_func(q, k, v, seqused_k=used, page_table=table, max_seqlen_k=pages * page)
    got = got[0] if isinstance(got, tuple) else got
    for i in range(b):
        n, rows = int(used[i]), table[i].cpu().long()
        keys, values = (t.cpu()[rows].reshape(1, -1, hk, d)[:, :n] for t in (k, v))
        close(got[i : i + 1], reference(q[i : i + 1], keys, values)[0], 2e-2, f"sequence {i}")


def forward_score_mod(sq: int = 256, sk: int = 256, h: int = 2, d: int = 64) -> None:
    from flash_attention_mods import relative_bias
    from flash_attn.cute.interface import flash_attn_func

    q, k, v = inputs(1, sq, sk, h, h, d, d, "bfloat16")
    with torch.no_grad():
        got = flash_attn_func(q, k, v, score_mod=relative_bias)
    got = got[0] if isinstance(got, tuple) else got
    q, k, v = (t.cpu().float().transpose(1, 2) for t in (q, k, v))
    away = (torch.arange(sq)[:, None] - torch.arange(sk)).abs().float()
    close(got, (torch.softmax(q @ k.mT * d**-0.5 - away * 0.1, -1) @ v).transpose(1, 2), 2e-2)


def forward_block_sparse(sq: int = 256, sk: int = 512, h: int = 1, d: int = 128) -> None:
    from flash_attention_mods import first_half
    from flash_attn.cute.interface import flash_attn_func

    q, k, v = inputs(1, sq, sk, h, h, d, d, "bfloat16")
    with torch.no_grad():
        got = flash_attn_func(q, k, v, mask_mod=first_half)
    got = got[0] if isinstance(got, tuple) else got
    close(got, reference(q, k[:, : sk // 2], v[:, : sk // 2])[0], 2e-2)


def combine(splits: int = 3, b: int = 2, s: int = 33, h: int = 2, d: int = 64) -> None:
    from flash_attn.cute.interface import flash_attn_combine

    part, lse = tensor(splits, b, s, h, d), tensor(splits, b, h, s).mT
    out, total = flash_attn_combine(part, lse, out_dtype=torch.bfloat16)
    want = torch.logsumexp(lse.cpu(), 0)
    close(out, (part.cpu() * torch.exp(lse.cpu() - want)[..., None]).sum(0), 2e-2)
    close(total, want, what="lse")


def backward(
    b: int = 1, sq: int = 128, sk: int = 128, h: int = 1, hk: int = 1, d: int = 64, dtype: str = "bfloat16",
    causal: bool = False, deterministic: bool = False,
) -> None:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v = inputs(b, sq, sk, h, hk, d, d, dtype)
    dout = tensor(b, sq, h, d, dtype=dtype)
    leaves = [t.cpu().float().requires_grad_() for t in (q, k, v)]
    out, lse = reference(*leaves, causal)
    out.backward(dout.cpu().float())
    got = _flash_attn_bwd(
        q, k, v, out.detach().to(q.dtype).cuda(), dout, lse.detach().float().contiguous().cuda(),
        causal=causal, deterministic=deterministic,
    )  # fmt: skip
    for name, mine, leaf in zip(("dq", "dk", "dv"), got, leaves, strict=False):
        close(mine, leaf.grad, 3e-2, name)


def autograd(b: int = 1, s: int = 128, h: int = 1, d: int = 64, causal: bool = True) -> None:
    from flash_attn.cute.interface import flash_attn_func

    q, k, v = (t.requires_grad_() for t in inputs(b, s, s, h, h, d, d, "bfloat16"))
    got = flash_attn_func(q, k, v, causal=causal)
    got = got[0] if isinstance(got, tuple) else got
    leaves = [t.detach().cpu().float().requires_grad_() for t in (q, k, v)]
    want, _ = reference(*leaves, causal)
    close(got, want, 2e-2)
    dout = tensor(b, s, h, d, dtype="bfloat16")
    got.backward(dout)
    want.backward(dout.cpu().float())
    for name, mine, leaf in zip("qkv", (q, k, v), leaves, strict=True):
        close(mine.grad, leaf.grad, 3e-2, f"d{name}")


if __name__ == "__main__":
    main(globals())
