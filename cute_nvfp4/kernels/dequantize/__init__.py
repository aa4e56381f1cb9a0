"""Block-scaled matrices to 16-bit or 32-bit numbers."""
