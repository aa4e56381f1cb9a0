"""What keeps a submission's process away from the judge's: docs/explanation/threat_model.md says what each layer stops.

The judge shields itself (``shielded``), the worker gives rights up before it loads a submission (``enter``), and the
judge looks for what the submission has left running (``strays``). Everything here is Linux's; ``enter`` says which
layers a system has.
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
# Landlock: the numbers of its system calls are the same on every architecture
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITES = (1 << 1) | sum(1 << bit for bit in range(4, 13))  # files opened to write, removed, made
_BY_VERSION = {2: 1 << 13, 3: 1 << 14}  # moved to another folder; truncated
_CAPABILITIES = 0x20080522  # the version of the structures of capset
_TCP = 0b11  # ports that are listened to and connected to, from version 4 on
_SCOPES = 0b11  # of abstract sockets and of signals, from version 6 on
_OTHER_USER = 65_000
"""Who the worker is where the judge is root and the kernel has no Landlock."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/dri")
_OWN = "/proc/self"
"""CUDA does not start (error 304) in a process that may not write there: it names its threads."""
MARK = "CUTE_NVFP4_RUN"
"""Variable of the environment that names the run which a process belongs to."""


OUT_OF_REACH = "memory of the judge out of reach"


class SandboxError(OSError):
    """A layer that the system has and that could not be put up."""


def shield() -> None:
    """Makes this process's memory and descriptors unreadable for others of its user, and it the parent of orphans."""
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """``shield`` for the length of a run; the process is as before when it ends."""
    before = _libc.prctl(_GET_DUMPABLE, 0, 0, 0, 0)
    shield()
    try:
        yield
    finally:
        _libc.prctl(_SET_DUMPABLE, before, 0, 0, 0)
        _libc.prctl(_SET_SUBREAPER, 0, 0, 0, 0)


def enter(folder: Path, judge: int) -> list[str]:
    """Gives up what a submission does not need; it may write below ``folder`` only. Returns the layers that hold.

    ``judge`` is the process that must be out of reach: that it is, is tried. Raises ``SandboxError``.
    """
    _libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)  # what its children leave behind stays below it
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
        # without CAP_SYS_PTRACE root reads no process that is not dumpable
        _libc.capset(struct.pack("Ii", _CAPABILITIES, 0), bytes(24))
        layers.append("root without capabilities")
    if not _reaches(judge):
        layers.append(OUT_OF_REACH)
    return layers


def landlock_version() -> int:
    """Which version of Landlock the system has; less than 1 for none."""
    return _libc.syscall(_CREATE_RULESET, None, 0, 1)


def _readable_for_all(path: Path) -> bool:
    """Whether another user could read the file: Python goes on importing when the user has changed."""
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
            # of a file, and below the process's own entry, only what files have: opening them to write, and truncating
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
    """Whether this process can open the judge's memory, which asks the system as tracing does."""
    try:
        os.close(os.open(f"/proc/{judge}/mem", os.O_RDONLY))
    except OSError:
        return False
    return True


def strays(worker: int, mark: str) -> list[int]:
    """The processes that come from ``worker``: its descendants, and those that carry its run's mark."""
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
    """Kills them."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
