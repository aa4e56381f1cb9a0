"""Inline-PTX device helpers, one file for each chapter of the ISA. Nothing here knows of a kernel.

``arithmetic``, ``half``: numbers, one or two a register. ``convert``, ``encode``: from and to narrow types. ``move``:
bits and bytes. ``memory``: loads and stores with cache policies. ``async_copy``, ``mbarrier``, ``cluster``: copies and
barriers. ``warp``, ``mma``, ``tcgen05``: lanes and tensor cores.

Where architectures differ, a helper takes the :class:`~cute_nvfp4.target.Architecture` it is traced for and
chooses its instructions; the values it returns are the same on each.
"""
