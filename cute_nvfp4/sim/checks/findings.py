"""What the checks find in one launch: the classes of hazards, which of them stop it, and the list of what was found."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from cute_nvfp4.sim.errors import (
    BarrierMisuse,
    BrokenRule,
    CopiesInFlight,
    Hazard,
    LaunchError,
    MbarrierMisuse,
    MissingProxyFence,
    Race,
    UndefinedRegister,
    UninitializedRead,
)
from cute_nvfp4.sim.frontend.model import Instruction

CLASSES: dict[str, type[Hazard]] = {
    "race": Race,
    "race-in-warp": Race,
    "stores-collide": Race,
    "alloc-result": Race,
    "free-in-use": Race,
    "mbarrier-init-order": Race,
    "mbarrier-init-proxy": MissingProxyFence,
    "proxy-fence": MissingProxyFence,
    "tensor-map-fence": MissingProxyFence,
    "uninitialized-read": UninitializedRead,
    "undefined-register": UndefinedRegister,
    "mbarrier-bytes": MbarrierMisuse,
    "mbarrier-inval": MbarrierMisuse,
    "mbarrier-again": MbarrierMisuse,
    "phase-overrun": MbarrierMisuse,
    "barrier-count": BarrierMisuse,
    "barrier-phase": BarrierMisuse,
    "bulk-store-at-exit": CopiesInFlight,
    "tensor-work-at-exit": CopiesInFlight,
    "wgmma-at-exit": CopiesInFlight,
    "arrival-at-exit": CopiesInFlight,
    "access-at-exit": CopiesInFlight,
    "access-before-start": Race,
    "constant-changes": Race,
    "register-in-flight": Race,
    "wgmma-fence": BrokenRule,
    "mbarrier-init-fence": BrokenRule,
    "tensor-memory-freed": BrokenRule,
    "barrier-thread-count": BrokenRule,
    "stream-order": Race,
    "programmatic-order": Race,
}
"""Every class of hazard that a check can go on past, and the error it is otherwise (docs/reference/checks.md)."""

MODES = ("raise", "collect")


@dataclass(frozen=True)
class Finding:
    """A finding of the checks at one instruction.

    ``severity`` is "hazard" or "warning", ``rule`` the class, ``kernel`` the kernel's name; ``instruction``, ``line``
    and ``loc`` say where (text, line of the PTX, place in the source); ``message`` is about the first time, ``count``
    how often it was found there.
    """

    severity: str
    rule: str
    kernel: str
    instruction: str
    line: int
    loc: str
    message: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.severity}: {self.message} [{self.rule}]"

    def error(self) -> Hazard:
        """The error that is raised for the finding."""
        return CLASSES[self.rule](f"{self.message} [{self.rule}]")

    @staticmethod
    def at(instruction: Instruction, severity: str, rule: str, kernel: str, message: str) -> Finding:
        """The finding at ``instruction``."""
        return Finding(severity, rule, kernel, instruction.text, instruction.line, instruction.loc, message)


class Findings:
    """Where the checks of one launch report. Hazards raise, but those of the classes ``allow``, which become warnings;
    with ``on_hazard="collect"`` none does. ``strict``: whether to look for what NVIDIA's kernels leave out too."""

    def __init__(
        self, kernel: str, allow: Collection[str] = (), on_hazard: str = "raise", strict: bool = False
    ) -> None:
        if on_hazard not in MODES:
            raise LaunchError.of("on_hazard", got=repr(on_hazard), expected=f"one of {', '.join(MODES)}")
        self.kernel, self.allow, self.collect = kernel, known(allow), on_hazard == "collect"
        self.strict = strict
        self._found: dict[tuple[str, int, str], Finding] = {}

    def hazard(self, rule: str, message: str, instruction: Instruction) -> None:
        """Raises the error of class ``rule``, or writes it down where the launch goes on past it."""
        self.add(Finding.at(instruction, "hazard", rule, self.kernel, message))

    def warn(self, rule: str, message: str, instruction: Instruction) -> None:
        """Writes down what no rule forbids."""
        self.add(Finding.at(instruction, "warning", rule, self.kernel, message))

    def add(self, finding: Finding) -> None:
        if finding.severity == "hazard" and finding.rule in self.allow:
            finding = replace(finding, severity="warning")
        if finding.severity == "hazard" and not self.collect:
            raise finding.error()
        key = (finding.rule, finding.line, finding.instruction)
        before = self._found.get(key)
        self._found[key] = replace(before, count=before.count + 1) if before else finding

    def all(self) -> tuple[Finding, ...]:
        """Everything found, in order; one entry for a class at an instruction."""
        return tuple(self._found.values())


def known(allow: Collection[str]) -> frozenset[str]:
    """The classes ``allow``. Raises ``LaunchError`` for one that does not exist."""
    for name in allow:
        if name not in CLASSES:
            raise LaunchError.of("class of hazards to allow", got=repr(name), expected=f"one of {', '.join(CLASSES)}")
    return frozenset(allow)


def grouped(findings: Iterable[Finding], severity: str) -> tuple[str, ...]:
    """One text a class: its first finding, and at how many more instructions it was found."""
    by: dict[str, list[Finding]] = {}
    for f in findings:
        if f.severity == severity:
            by.setdefault(f.rule, []).append(f)
    return tuple(
        f"{str(first).removesuffix(f' [{rule}]')}{f', and {len(more)} more' if more else ''} [{rule}]"
        for rule, (first, *more) in by.items()
    )
