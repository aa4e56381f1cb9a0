"""Mutants that nothing notices, and why each is harmless: (kernel, kind, instruction) to the proof."""

from __future__ import annotations

HARMLESS: dict[tuple[str, str, str], str] = {}
