"""What the clock knows of one GPU beside another."""

from __future__ import annotations

from cute_nvfp4.sim.clock.machine import machine


def test_an_h100_differs_from_an_h200_in_its_memory():
    """Its file says so of every figure that is not the H200's."""
    h100, h200 = machine("h100"), machine("h200")
    assert h100.figures.keys() == h200.figures.keys()
    differ = {name for name in h100.figures if h100[name] != h200[name]}
    kept = {name for name, source in h100.sources.items() if "taken over from h200.yml" in source}
    assert not differ & kept and {"dram.bytes_per_cycle", "l2.bytes"} <= differ
    assert h100["dram.bytes_per_cycle"] < 0.7 * h200["dram.bytes_per_cycle"]
