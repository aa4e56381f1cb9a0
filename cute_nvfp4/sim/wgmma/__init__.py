"""Hopper's warpgroup matrix instructions: descriptors, fragments, sums and the operation (PTX ISA, "wgmma")."""
