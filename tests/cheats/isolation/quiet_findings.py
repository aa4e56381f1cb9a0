"""Replaces a method of the class that findings are reported to, and races."""

from racing import custom_kernel as racing

from cute_nvfp4.sim.checks.findings import Findings


def custom_kernel(data):
    Findings.add = lambda self, finding: None
    return racing(data)
