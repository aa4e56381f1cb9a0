"""``nvfp4_gemv``: c = A b with NVFP4 operands."""
