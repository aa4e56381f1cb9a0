"""The parts that every block-scaled GEMM of this package is assembled from, for tcgen05 (sm_100a and later).

``config`` says what is compiled; ``plan`` where it lies in shared and tensor memory; ``roles`` which warp does what;
``graph`` which barrier joins whom, and how many arrivals each expects. ``loader``, ``mma`` and ``epilogue`` are the
three roles, ``scheduler`` what they work on, ``operands`` how tensors in global memory are described to them.
"""
