"""Quantization kernels: ``row``, ``tile`` and ``transposed`` walk a matrix; ``block`` quantizes one block."""
