"""The GEMM of sm_120a and sm_121a, on warp-level ``mma.sync`` with block scales: no tensor memory, no multicast.

``warp_tile`` says which rows and columns of a tile a warp and a lane have, ``loader`` and ``mainloop`` fill and empty
the stages, ``epilogue`` takes the accumulators from registers to the output; ``kernel`` joins them, ``host`` launches.
"""
