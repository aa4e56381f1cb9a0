"""The findings of the checks in one launch: classes of hazards, which of them stop it, and the list of findings."""

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
"""Every class of hazard that a launch can go on past, and the error it raises otherwise (docs/reference/checks.md)."""

MODES = ("raise", "collect")
"""The values of ``on_hazard``."""


@dataclass(frozen=True)
class Finding:
    """A finding of the checks at one instruction.

    ``severity`` is "hazard" or "warning". ``rule`` is the class of the finding. ``kernel`` is the name of the kernel.
    ``instruction`` is the text of the instruction, ``line`` its line in the PTX, ``loc`` its place in the source.
    ``message`` describes the first occurrence. ``count`` is the number of occurrences at the instruction.
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
        """Returns the error to raise for the finding."""
        return CLASSES[self.rule](f"{self.message} [{self.rule}]")

    @staticmethod
    def at(instruction: Instruction, severity: str, rule: str, kernel: str, message: str) -> Finding:
        """Returns a finding at ``instruction``."""
        return Finding(severity, rule, kernel, instruction.text, instruction.line, instruction.loc, message)


class Findings:
    """The collector of one launch's findings.

    A hazard raises its error. Hazards of the classes ``allow`` become warnings, and with ``on_hazard="collect"`` none
    raises. ``strict`` says whether to check also for what NVIDIA's kernels leave out. Raises ``LaunchError`` for an
    unknown class or mode.
    """

    def __init__(
        self, kernel: str, allow: Collection[str] = (), on_hazard: str = "raise", strict: bool = False
    ) -> None:
        if on_hazard not in MODES:
            raise LaunchError.of("on_hazard", got=repr(on_hazard), expected=f"one of {', '.join(MODES)}")
        self.kernel, self.allow, self.collect = kernel, known(allow), on_hazard == "collect"
        self.strict = strict
        self._found: dict[tuple[str, int, str], Finding] = {}

    def hazard(self, rule: str, message: str, instruction: Instruction) -> None:
        """Raises the error of class ``rule``, or records the hazard where the launch goes on past it."""
        self.add(Finding.at(instruction, "hazard", rule, self.kernel, message))

    def warn(self, rule: str, message: str, instruction: Instruction) -> None:
        """Records a warning, which never raises."""
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
        """Returns everything found, in order, with one entry for each class at an instruction."""
        return tuple(self._found.values())


def known(allow: Collection[str]) -> frozenset[str]:
    """Returns the classes ``allow`` as a set. Raises ``LaunchError`` for one that does not exist."""
    for name in allow:
        if name not in CLASSES:
            raise LaunchError.of("class of hazards to allow", got=repr(name), expected=f"one of {', '.join(CLASSES)}")
    return frozenset(allow)


def grouped(findings: Iterable[Finding], severity: str) -> tuple[str, ...]:
    """Returns one text for each class: its first finding of this severity, and the number of further findings."""
    by: dict[str, list[Finding]] = {}
    for f in findings:
        if f.severity == severity:
            by.setdefault(f.rule, []).append(f)
    return tuple(
        f"{str(first).removesuffix(f' [{rule}]')}{f', and {len(more)} more' if more else ''} [{rule}]"
        for rule, (first, *more) in by.items()
    )
