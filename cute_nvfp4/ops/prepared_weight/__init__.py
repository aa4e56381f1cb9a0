"""Products with prepared weights: weights that were packed once for the tensor cores of sm_90a, sm_100a and sm_120a.

``gemm`` is one product, gated or not; ``rows`` are rows of one matrix times a stack of weights; ``groups`` is a list of
products.
"""
