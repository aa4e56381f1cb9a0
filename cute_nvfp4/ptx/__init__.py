"""Inline-PTX device helpers, one file a theme. Nothing here knows of a kernel.

``convert``: packed decodes. ``fma``: f16x2 arithmetic and fused decode-FMA blocks. ``mma``: integer tensor-core
products. ``memory``: wide global and shared accesses with cache policies. ``warp``: reductions over lanes.

Where architectures differ, a helper takes the :class:`~cute_nvfp4.target.Architecture` it is traced for and
chooses its instructions; the values it returns are the same on each.
"""
