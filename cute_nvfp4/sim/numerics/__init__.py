"""Exact arithmetic as pure functions on numpy arrays; nothing here knows about instructions or warps."""
