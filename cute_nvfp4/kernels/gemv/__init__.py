"""The GEMV: ``kernel``, its loaders of A, and a dot product for each architecture."""
