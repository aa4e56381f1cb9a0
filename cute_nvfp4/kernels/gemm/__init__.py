"""Block-scaled GEMMs: what all architectures share, and a folder for each architecture's kernel.

``config`` says what is compiled, ``limits`` what is refused, and ``arguments`` what the host function takes.
``problem`` and ``group_source`` join what varies: ``tile_scheduler``, ``operand_source`` and ``epilogue``.
``pipeline_graph`` declares the barriers between roles. ``sm100`` is the tcgen05 kernel; ``packed`` has what kernels of
packed weights share. ``docs/explanation/walks.md`` walks through both.
"""
