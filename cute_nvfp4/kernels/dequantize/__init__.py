"""Kernels that decode block-scaled matrices to 16-bit or 32-bit floats."""
