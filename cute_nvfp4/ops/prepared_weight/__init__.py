"""Products with prepared weights: weights that were packed once for the tensor cores of sm_90a, sm_100a and sm_120a.

``gemm`` computes one product, gated or not; ``rows`` multiplies rows of groups by a stack of weights; ``groups``
computes a list of products.
"""
