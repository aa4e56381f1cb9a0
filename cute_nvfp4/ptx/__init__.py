"""Device functions in inline PTX, one file for each chapter of the ISA; none depends on a kernel.

``arithmetic``, ``half``: arithmetic on one or two values in a register. ``convert``, ``encode``: from and to narrow
types. ``move``: bits and bytes. ``memory``: loads and stores with cache policies. ``async_copy``, ``mbarrier``,
``cluster``: asynchronous copies and barriers. ``warp``: reductions over lanes. ``matrix``, ``mma``, ``tcgen05``: tensor
cores.

Where architectures differ, a helper takes the :class:`~cute_nvfp4.target.Architecture` it is traced for and
chooses its instructions; the values it returns are the same on each.
"""
