"""GEMMs of packed weights: the streaming kernel, and what WGMMA (``sm90``) and ``mma.sync`` (``sm120``) share."""
