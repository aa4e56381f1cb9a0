"""Names and widths of the special registers (PTX ISA, "Special Registers"); ``machine.special`` has their values."""

from __future__ import annotations

_VECTORS = ("%tid", "%ntid", "%ctaid", "%nctaid", "%cluster_ctaid", "%cluster_nctaid", "%clusterid", "%nclusterid")
_SCALARS = (
    *("%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%dynamic_smem_size", "%total_smem_size", "WARP_SZ"),
    *(f"%lanemask_{c}" for c in ("eq", "lt", "le", "gt", "ge")),
    *("%clock", "%clock_hi", "%globaltimer_lo", "%cluster_ctarank", "%cluster_nctarank"),
)
BITS = {
    **{f"{name}.{axis}": 32 for name in _VECTORS for axis in "xyz"},
    **dict.fromkeys(_SCALARS, 32),
    **{"%gridid": 64, "%clock64": 64, "%globaltimer": 64, "%is_explicit_cluster": 1},
}
"""Maps the name of each special register to its width in bits."""
TIMED = {"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo"}
"""Registers that change while a kernel runs, so that each use reads them anew."""
