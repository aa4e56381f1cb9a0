"""The tcgen05 GEMM (sm_100a, sm_103a): ``loader``, ``mainloop`` and ``epilogue`` are the three roles of its warps.

``memory_plan`` lays out shared and tensor memory, ``kernel`` joins the roles, ``host`` has the host functions.
"""
