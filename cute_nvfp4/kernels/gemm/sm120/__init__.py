"""The GEMM of sm_120a and sm_121a, on warp-level ``mma.sync`` with block scales: no tensor memory, no multicast.

``warp_tile`` says which rows and columns of a tile a warp and a lane have. ``loader`` fills the stages, ``mainloop``
empties them, ``epilogue`` stores accumulators from registers, ``kernel`` joins them, and ``host`` launches.
"""
