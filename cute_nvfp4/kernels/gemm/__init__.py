"""Block-scaled GEMMs: what every architecture shares, and a folder for each architecture's kernel.

``config`` says what is compiled (``limits``: why not), ``arguments`` what the host function takes. ``problem`` and
``group_source`` join what varies: ``tile_scheduler``, ``operand_source`` and ``epilogue`` functions. ``pipeline_graph``
says which barrier joins whom. ``sm100`` is the tcgen05 kernel, ``packed`` is what those of packed weights share;
``docs/explanation/walks.md`` walks through both.
"""
