#!POPCORN leaderboard nvfp4_dual_gemm
#!POPCORN gpu B200

"""cute_nvfp4's gated GEMM as a submission, with nothing that another contestant could not write."""

from __future__ import annotations

from task import input_t, output_t

from cute_nvfp4 import BlockScaledTensor, gated_gemm


def custom_kernel(data: input_t) -> output_t:
    """C = silu(A B1ᵀ) ∘ (A B2ᵀ); a is (M, K/2, L), b1 and b2 are (N, K/2, L), c is (M, N, L)."""
    a, b1, b2, _, _, _, sfa_permuted, sfb1_permuted, sfb2_permuted, c = data
    gated_gemm(
        BlockScaledTensor.from_problem(a, sfa_permuted),
        BlockScaledTensor.from_problem(b1, sfb1_permuted),
        BlockScaledTensor.from_problem(b2, sfb2_permuted),
        gate="silu",
        out=c.permute(2, 0, 1),
    )
    return c
