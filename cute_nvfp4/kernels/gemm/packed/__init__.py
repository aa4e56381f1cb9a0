"""GEMMs of packed weights: what the kernels on WGMMA (``sm90``) and on ``mma.sync`` (``sm120``) share."""
