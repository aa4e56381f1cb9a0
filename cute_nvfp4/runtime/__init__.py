"""Compiles a host function once, keeps the kernel on disk, and runs it on a GPU or in the simulator."""
