"""The machine that executes kernels: warps, memory, barriers, clusters, asynchronous engines."""
