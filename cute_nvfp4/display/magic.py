"""The cell magic ``%%cute``: runs a cell in the simulated GPU, and checks, counts and times its launches.

    %load_ext cute_nvfp4

    %%cute sums
    ... a program: imports, kernels, tensors on "cuda", calls ...

The cell is written to a file, because the DSL compiles only what is in files, and runs with the notebook's variables.
Then its launches are shown, with hazards and the lines that they name. The variable ``sums`` gets the ``CellRun``.
"""

from __future__ import annotations

import argparse
import atexit
import linecache
import re
import shlex
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CuteNvfp4Error, OperandError, SimError
from ..target import ARCHITECTURES, DEFAULT_ARCH
from . import hazards
from .names import short
from .svg import Page, stacked, table

if TYPE_CHECKING:
    from ..sim.checks.findings import Finding
    from ..sim.observe.barriers import Barriers
    from ..sim.observe.result import Result
    from ..sim.observe.timing import Timing
    from ..sim.observe.trace import Trace
    from ..sim.profile import Profile
    from ..sim.session import LaunchRecord
    from ..sim.session.memory import DeviceMemory

NAME = "_cute"
"""The variable that gets the run of a cell without a name."""
_CLASS = re.compile(r"\[([a-z-]+)\]")
_folders: list[Path] = []


@dataclass
class CellRun:
    """What a cell did in the simulated GPU."""

    launches: list[LaunchRecord]
    findings: list[Finding]
    error: SimError | None  #: the error that stopped the cell
    barriers: Barriers  #: the mbarriers of the last launch
    trace: Trace | None = None  #: None without ``--trace``
    note: str = ""  #: why there is no modelled time

    @property
    def hazards(self) -> list[str]:
        """The classes of the hazard that stopped the cell and of those that it went on past, as ``--allow`` of
        ``cute-nvfp4 sim`` names them. An error without a class, such as ``Deadlock``, has its own name."""
        stopped = [] if self.error is None else [_class_of(self.error)]
        return stopped + [f.rule for f in self.findings if f.severity == "hazard"]

    @property
    def result(self) -> Result:
        """The counters of the last launch that ended.

        Raises:
            OperandError: no launch ended.
        """
        return self._ended()[1]

    def profile(self) -> Profile:
        """Returns the last launch that ended as a details page of Nsight Compute: ``print(first.profile().text())``.

        Without a clock, or with ``--no-time``, modelled figures are missing (docs/how-to/profiling.md).

        Raises:
            OperandError: no launch ended.
        """
        from ..sim.profile import profile

        record, result = self._ended()
        return profile(record.program, record.launch, result)

    def _ended(self) -> tuple[LaunchRecord, Result]:
        ended = [(r, r.result) for r in self.launches if r.result is not None]
        if not ended:
            got = f"{len(self.launches)} launches, of which none ended"
            raise OperandError.of("result of the cell", got=got, expected="a launch that ended")
        return ended[-1]

    @property
    def timing(self) -> Timing | None:
        """The modelled time of the last launch that ended, None if no clock ran."""
        return self.result.timing

    @property
    def page(self) -> Page:
        """The page of a line for each launch, the hazards and warnings, and the note."""
        shown = [launches(self.launches)]
        told = "" if self.error is None else str(self.error)
        shown += [] if self.error is None else [hazards.told("hazard", type(self.error).__name__, told)]
        shown += [hazards.finding(f) for f in self.findings if f.severity == "hazard" and f.message not in told]
        warnings: dict[str, list[Finding]] = {}
        for f in self.findings:
            if f.severity != "hazard":
                warnings.setdefault(f.rule, []).append(f)
        for first, *more in warnings.values():
            shown += [hazards.finding(first)] + [_more(first, len(more))] * bool(more)
        shown += [Page(f"<p>{self.note}</p>", self.note)] if self.note else []
        return stacked(*shown)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self.page._repr_mimebundle_()


def cell(run: CellRun) -> Page:
    """Returns the page that is shown under a cell."""
    return run.page


def launches(records: list[LaunchRecord]) -> Page:
    """Returns a table with the counters and the modelled time of each launch.

    "useful" is the share of the bytes in all touched sectors of global memory that lanes asked for.
    """
    rows = []
    for record in records:
        launch, r = record.launch, record.result
        row: list[object] = [short(launch.kernel), _dims(launch.grid), _dims(launch.block)]
        if r is None:
            rows.append([*row, "stopped", "", "", ""])
            continue
        plain = [m for m in r.memory if m.space == "global" and m.sectors]
        sectors, asked = sum(m.sectors for m in plain), sum(m.bytes for m in plain)
        useful = f"{sectors} ({asked / (32 * sectors):.0%} useful)" if sectors else "-"
        t = r.timing
        time = "-" if t is None else f"{t.microseconds - t.launch_us:.2f} + launch {t.launch_us:.2f}"
        rows.append([*row, str(r.instructions), useful, str(r.bank_conflicts), time])
    header = ["launch", "grid", "block", "warp instructions", "sectors", "bank conflicts", "modelled µs"]
    return table(header, rows)


def _class_of(error: SimError) -> str:
    """Returns the class in brackets that ends the message of a hazard, or the name of another error."""
    from ..sim.checks.findings import CLASSES

    named = [rule for rule in _CLASS.findall(str(error)) if CLASSES.get(rule) is type(error)]
    return named[-1] if named else type(error).__name__


def _more(first: Finding, count: int) -> Page:
    words = f"  and {first.rule} at {count} more instructions"
    return Page(f"<p>{words}</p>", words)


def _dims(dims: tuple[int, int, int]) -> str:
    """Returns the dimensions without ones at the end."""
    used = max((j for j in range(3) if dims[j] != 1), default=0)
    return " x ".join(map(str, dims[: used + 1]))


@dataclass
class Cells:
    """Runs cells in the namespace of a shell. Tensors on "cuda" stay there for later cells; between cells the host sees
    them as host tensors."""

    shell: Any
    _before: DeviceMemory | None = None
    _parser: argparse.ArgumentParser = field(default_factory=lambda: _options())

    def run(self, line: str, cell: str) -> None:
        """Runs and shows a cell; ``line`` has the options of the magic."""
        try:
            given = self._parser.parse_args(shlex.split(line))
        except argparse.ArgumentError as error:
            raise OperandError(f"%%cute: {error}\n{self._parser.format_usage()}") from None
        if not given.name.isidentifier():
            raise OperandError.of("%%cute", got=repr(given.name), expected="a name for the run")
        text = f"# %%cute {line}\n{cell}"  # the lines of the file are those of the cell
        done = self.execute(given, text, write(given.name, text))
        self.shell.user_ns[given.name] = done
        from IPython.display import display

        display(done)

    def execute(self, given: argparse.Namespace, text: str, path: Path) -> CellRun:
        """Runs a cell's text and returns the run; errors other than ``SimError`` propagate."""
        from ..runtime.session import simulated_gpu
        from ..sim.machine.schedule import Schedule
        from ..sim.observe.barriers import Barriers
        from ..sim.observe.trace import Trace

        clock, note = _clock(given.arch) if given.time else (None, "")
        barriers, trace, stopped = Barriers(), Trace() if given.trace else None, None
        options: dict[str, Any] = {"schedule": Schedule.parse(given.schedule), "checks": given.checks}
        options |= {"on_hazard": "collect" if given.go_on else "raise", "others": (barriers,), "trace": trace}
        options["strict"] = given.strict
        code = compile(text, str(path), "exec", dont_inherit=True)
        with simulated_gpu(given.arch, counters=True, clock=clock, **options) as session:
            self._keep(session.memory)
            try:
                exec(code, self.shell.user_ns)
            except SimError as error:
                stopped = error
            except Exception:
                # the DSL replaces some errors of a launch by errors of its own
                if session.failure is None or not isinstance(session.failure[1], SimError):
                    raise
                stopped = session.failure[1]
        found = session.findings()
        return CellRun(session.launches, found, stopped, barriers, trace, note)

    def _keep(self, memory: DeviceMemory) -> None:
        """Makes the device tensors of the previous cell device tensors of ``memory``."""
        from ..sim.session.memory import tensors_in

        for tensor in tensors_in(dict(self.shell.user_ns)):
            index = None if self._before is None else self._before.device_index(tensor)
            if index is not None:
                memory.adopt(tensor, index)
        self._before = memory


class _Parser(argparse.ArgumentParser):
    """A parser that raises its errors, where that of a command would end the process."""

    def error(self, message: str) -> None:
        raise argparse.ArgumentError(None, message)


def _options() -> argparse.ArgumentParser:
    parser = _Parser(prog="%%cute", add_help=False, allow_abbrev=False)
    parser.add_argument("name", nargs="?", default=NAME, help="the variable that gets the run")
    parser.add_argument("--arch", default=DEFAULT_ARCH, choices=list(ARCHITECTURES))
    parser.add_argument("--schedule", default="", help="how warps and engines interleave: seed=3,tma=lazy")
    parser.add_argument("--no-checks", dest="checks", action="store_false", help="look for no hazards")
    parser.add_argument("--strict", action="store_true", help="warn of fences that NVIDIA's kernels leave out, too")
    parser.add_argument("--no-time", dest="time", action="store_false", help="no modelled time")
    parser.add_argument("--trace", action="store_true", help="record who does what")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="go on past hazards")
    return parser


def _clock(arch: str) -> tuple[str | None, str]:
    """Returns (the machine that times kernels for ``arch``, "") or (None, why there is none)."""
    from ..sim.clock.machine import clock_of
    from ..sim.clock.tools import tool

    try:
        machine = clock_of(arch)
        for name in ("ptxas", "nvdisasm"):
            tool(name)
    except CuteNvfp4Error as error:
        return None, f"no modelled time: {error}"
    return machine, ""


def write(name: str, text: str) -> Path:
    """Writes a cell's text to a new file, NAME.py, NAME_2.py and so on, so that earlier kernels keep their source."""
    if not _folders:
        _folders.append(Path(tempfile.mkdtemp(prefix="cute-cells-")))
        atexit.register(shutil.rmtree, _folders[0], ignore_errors=True)
    number, stem = 1, name.strip("_") or "cell"
    path = _folders[0] / f"{stem}.py"
    while path.exists():
        number += 1
        path = _folders[0] / f"{stem}_{number}.py"
    path.write_text(text, encoding="utf-8")
    linecache.checkcache(str(path))
    return path


def load_ipython_extension(shell: Any) -> None:
    """Registers the displays of the package's classes and ``%%cute``; ``%load_ext cute_nvfp4`` calls it."""
    from .registered import register

    register(shell)
    shell.register_magic_function(Cells(shell).run, "cell", "cute")
