"""``nvfp4_group_gemm``: Cᵢ = Aᵢ Bᵢᵀ for a list of problems with NVFP4 operands."""
