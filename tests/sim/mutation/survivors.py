"""Mutants that nothing notices, and why each changes nothing: (kernel, kind, ordinal in the kernel) to the proof."""

from __future__ import annotations

HARMLESS: dict[tuple[str, str, int], str] = {}
