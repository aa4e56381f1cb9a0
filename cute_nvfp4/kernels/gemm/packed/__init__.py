"""GEMMs of packed weights: the streaming kernel, and what the kernels for sm_90, sm_100 and sm_120 share."""
