"""Kernels between the products of a mixture of experts: routing maps, gather, activation, combination."""
