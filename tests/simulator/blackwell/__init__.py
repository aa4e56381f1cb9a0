"""Simple sm_100a kernels of four NVFP4 problems, with which the tests try the simulator's tensor-core half.

``gemm``: one tile a CTA, TMA in and plain stores out. ``dual``: the same with two accumulators and a gated epilogue.
``group``: the same over a list of problems, with tensor maps that the kernel rewrites. ``pair``: a persistent kernel
on pairs of CTAs, with multicast and TMA stores. ``shapes`` has the forty shapes, data and exact answers.
"""
