"""A mixture of experts: the prepared experts, the layer, and the four small kernels around its products."""
