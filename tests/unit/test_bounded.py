"""A dictionary of limited size drops its oldest entry for a new key, and for no other."""

from __future__ import annotations

import pytest

from cute_nvfp4.runtime import bounded


def test_only_a_new_key_drops_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "LIMIT", 2)
    kept = bounded.Bounded()
    kept["first"], kept["second"] = 1, 2
    kept["second"] = 3
    assert kept == {"first": 1, "second": 3}
    kept["third"] = 4
    assert kept == {"second": 3, "third": 4}
