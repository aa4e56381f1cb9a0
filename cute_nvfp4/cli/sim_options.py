"""The options of ``cute-nvfp4 sim``, and the command that repeats a run."""

from __future__ import annotations

import dataclasses
import sys


@dataclasses.dataclass
class Options:
    """The program to run, and the options of ``sim`` by their names."""

    script: str
    arguments: list[str]
    arch: str
    schedule: str = ""
    checks: bool = True
    counters: bool = False
    clock: str = ""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    trace: str = ""
    json: str = ""
    quiet: bool = False
    traceback: bool = False
    benchmarks: str = "once"
    step_limit: int = 0
    execute: bool = True
    allow: tuple[str, ...] = ()
    collect: bool = False
    strict: bool = False
    dsl_compat: bool = False

    def command(self, schedule: str, extra: list[str] | None = None) -> list[str]:
        """The command that repeats this run under ``schedule``. extra: more options."""
        words = [sys.executable, "-m", "cute_nvfp4", "sim", "--arch", self.arch, "--schedule", schedule]
        words += [] if self.checks else ["--no-checks"]
        words += [] if self.benchmarks == "once" else ["--benchmarks", self.benchmarks]
        words += ["--step-limit", str(self.step_limit)] if self.step_limit else []
        words += ["--time", "--clock", self.clock] if self.clock else []
        words += [word for name, value in self.figures.items() for word in ("--figure", f"{name}={value}")]
        words += [] if self.execute else ["--no-execute"]
        words += [word for name in self.allow for word in ("--allow", name)]
        words += ["--continue"] if self.collect else []
        words += ["--strict"] if self.strict else []
        words += ["--dsl-compat"] if self.dsl_compat else []
        return [*words, *(extra or []), self.script, *self.arguments]
