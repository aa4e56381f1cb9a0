"""The tcgen05 GEMM (sm_100a, sm_103a): ``loader``, ``mainloop`` and ``epilogue`` are the three roles of its warps,
``memory_plan`` says where everything lies in shared and tensor memory, ``kernel`` joins them; ``host`` and ``grouped``
are the host functions.
"""
