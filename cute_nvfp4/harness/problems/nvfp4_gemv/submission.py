#!POPCORN leaderboard nvfp4_gemv
#!POPCORN gpu B200

"""cute_nvfp4's GEMV as a submission, with nothing that another contestant could not write."""

from __future__ import annotations

from task import input_t, output_t

from cute_nvfp4 import BlockScaledTensor, gemv


def custom_kernel(data: input_t) -> output_t:
    """c = A b from (a, b, sfa, sfb, sfa_permuted, sfb_permuted, c); a is (M, K/2, L), c is (M, 1, L)."""
    a, b, _, _, sfa_permuted, sfb_permuted, c = data
    gemv(
        BlockScaledTensor.from_problem(a, sfa_permuted),
        BlockScaledTensor.from_problem(b, sfb_permuted),
        out=c[:, 0, :].t(),
    )
    return c
