"""The kinds of cases, by name."""

from __future__ import annotations

from tests.long import fuzzing
from tests.long.families import block_scaled, mutants, packed, packed_calls, recorded, rows

FAMILIES = {
    family.name: family
    for module in (block_scaled, packed, packed_calls, rows, mutants, recorded, fuzzing)
    for family in module.FAMILIES
}
