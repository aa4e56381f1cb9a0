"""The layers between a submission's process and the judge's (docs/explanation/threat_model.md says what each stops).

The judge shields itself (``shielded``), the worker gives up rights before it loads a submission (``enter``), and the
judge looks for processes that the submission has left behind (``strays``). All of this is specific to Linux; ``enter``
returns the layers that the system has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_SET_DUMPABLE, _GET_DUMPABLE, _SET_SUBREAPER, _NO_NEW_PRIVS = 4, 3, 36, 38
# Landlock's system calls have the same numbers on every architecture
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITES = (1 << 1) | sum(1 << bit for bit in range(4, 13))  # opening a file to write, removing and making files
_BY_VERSION = {2: 1 << 13, 3: 1 << 14}  # moving a file to another folder; truncating it
_CAPABILITIES = 0x20080522  # the version of capset's structures
_TCP = 0b11  # binding and connecting to ports, from version 4 on
_SCOPES = 0b11  # abstract sockets and signals, from version 6 on
_OTHER_USER = 65_000
"""The worker's user where the judge is root and the kernel has no Landlock."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/dri")
_OWN = "/proc/self"
"""The process's own entry. CUDA does not start (error 304) without write access there: it names its threads."""
MARK = "CUTE_NVFP4_RUN"
"""The environment variable that names the run which a process belongs to."""


OUT_OF_REACH = "memory of the judge out of reach"


class SandboxError(OSError):
    """An error of a layer that the system has, but that could not be set up."""


def shield() -> None:
    """Makes this process's memory and descriptors unreadable for its user's other processes, and adopts orphans."""
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Applies ``shield`` for the length of a run, and then restores the process's state."""
    before = _libc.prctl(_GET_DUMPABLE, 0, 0, 0, 0)
    shield()
    try:
        yield
    finally:
        _libc.prctl(_SET_DUMPABLE, before, 0, 0, 0)
        _libc.prctl(_SET_SUBREAPER, 0, 0, 0, 0)


def enter(folder: Path, judge: int) -> list[str]:
    """Gives up rights that a submission does not need, and limits writes to ``folder``. Returns the layers that hold.

    judge: the process that must be out of reach; the function tries to reach it. Raises ``SandboxError``.
    """
    _libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)  # orphans of its children stay below it
    _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    layers = []
    version = landlock_version()
    if version > 0:
        _landlock(folder, version)
        layers.append(f"landlock {version}")
    elif os.geteuid() == 0 and all(map(_readable_for_all, (Path(os.__file__), Path(__file__)))):
        for path in (folder, *folder.rglob("*")):
            os.chown(path, _OTHER_USER, _OTHER_USER)
        os.setgroups([])
        os.setresgid(*[_OTHER_USER] * 3)
        os.setresuid(*[_OTHER_USER] * 3)
        layers.append(f"user {_OTHER_USER}")
    elif os.geteuid() == 0:
        # without CAP_SYS_PTRACE, root cannot read a process that is not dumpable
        _libc.capset(struct.pack("Ii", _CAPABILITIES, 0), bytes(24))
        layers.append("root without capabilities")
    if not _reaches(judge):
        layers.append(OUT_OF_REACH)
    return layers


def landlock_version() -> int:
    """The system's version of Landlock; less than 1 without it."""
    return _libc.syscall(_CREATE_RULESET, None, 0, 1)


def _readable_for_all(path: Path) -> bool:
    """Whether every folder above the file is open to other users, since Python goes on importing as another user."""
    return all(parent.stat().st_mode & 0o005 == 0o005 for parent in path.resolve().parents)


def _landlock(folder: Path, version: int) -> None:
    writes = _WRITES | sum(bit for since, bit in _BY_VERSION.items() if version >= since)
    fields = [writes, _TCP if version >= 4 else 0] + [_SCOPES] * (version >= 6)
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    rules = _libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        raise SandboxError(ctypes.get_errno(), "landlock_create_ruleset")
    try:
        devices = [*map(Path, _DEVICES), *Path("/dev").glob("nvidia*")]
        for path in (folder, Path(_OWN), *(device for device in devices if device.exists())):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            # files, and what lies below the process's own entry, get only the rights of files: writing and truncating
            whole = path.is_dir() and path != Path(_OWN)
            allowed = writes if whole else writes & (1 << 1 | 1 << 14)
            if _libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", allowed, place), 0):
                raise SandboxError(ctypes.get_errno(), f"landlock_add_rule for {path}")
            os.close(place)
        if _libc.syscall(_RESTRICT_SELF, rules, 0):
            raise SandboxError(ctypes.get_errno(), "landlock_restrict_self")
    finally:
        os.close(rules)


def _reaches(judge: int) -> bool:
    """Whether this process can open the judge's memory, for which the kernel applies the rules of tracing."""
    try:
        os.close(os.open(f"/proc/{judge}/mem", os.O_RDONLY))
    except OSError:
        return False
    return True


def strays(worker: int, mark: str) -> list[int]:
    """The processes that come from ``worker``: its descendants, and those with its run's mark."""
    parents, marked = {}, set()
    sign = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", "rb") as file:
                status, parent = file.read().rpartition(b")")[2].split()[:2]
            if status in (b"Z", b"X"):
                continue
            parents[int(name)] = int(parent)
            with open(f"/proc/{name}/environ", "rb") as file:
                if sign in file.read().split(b"\0"):
                    marked.add(int(name))
    found = {worker} | marked
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {worker})


def end(processes: list[int]) -> None:
    """Kills the processes."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
