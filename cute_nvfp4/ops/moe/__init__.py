"""A mixture of experts: prepared experts, the layer, and the four small kernels around its products."""
