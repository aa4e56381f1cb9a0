"""Weights to the tiles of ``weight_layout``."""
