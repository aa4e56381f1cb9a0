"""What executes: warps, memory, barriers, clusters, asynchronous engines."""
