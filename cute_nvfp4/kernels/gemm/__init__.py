"""Block-scaled GEMMs: what every architecture shares, and a folder for each architecture's kernel.

``config`` says what is compiled, ``tile_scheduler`` which tiles a cluster computes, ``operand_source`` where a tile's
operands are found, ``gates`` what an epilogue applies, ``pipeline_graph`` which barrier joins whom. ``sm100`` is the
tcgen05 kernel.
"""
