"""``nvfp4_gemm``: C = A Bᵀ with NVFP4 operands."""
