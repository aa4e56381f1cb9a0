"""``nvfp4_dual_gemm``: C = silu(A B1ᵀ) ∘ (A B2ᵀ) with NVFP4 operands."""
