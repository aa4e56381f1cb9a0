"""The GEMV: ``kernel``, its loaders of A, and a dot-product engine for each architecture."""
