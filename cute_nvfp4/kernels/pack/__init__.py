"""The kernel that packs block-scaled weights into the tiles of ``weight_layout``."""
