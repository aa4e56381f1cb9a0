"""Calls of every public function with what an adversary would give: a right result, or one of our errors.

``python -m tests.fuzz.extreme --calls 20000 --seed 1 --jobs 2`` runs random calls; ``--call TEXT`` runs the one that a
failure printed. alphas and global scales are of all of float32, tensors lie anywhere and are of every kind that torch
has, and results are compared with exact sums that are scaled at the end (``support/exact_sums.py``).
``tests/fuzz/test_extreme.py`` runs a sample with every value of every axis.
"""
