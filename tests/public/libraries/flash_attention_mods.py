"""What attention with changed scores is called with: functions that the DSL compiles into the kernel."""

import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def relative_bias(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """A tenth less for each place between query and key."""
    away = (q_idx - kv_idx).to(Float32)
    return score - cute.where(away < cute.full_like(away, 0.0), -away, away) * cute.full_like(away, 0.1)


@cute.jit
def first_half(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """Only the first half of the keys is seen."""
    return n_idx < cute.full_like(n_idx, Int32(seqlen_info.seqlen_k // 2))
