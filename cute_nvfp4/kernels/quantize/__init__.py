"""Quantization kernels: ``row``, ``tile`` and ``transposed`` walk a matrix, ``block`` has the rules for one block."""
