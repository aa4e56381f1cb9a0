"""The disk cache of compiled kernels: one self-checking file an entry, safe against concurrent writers and killed
processes.

An entry is a zip archive and its digest, written under a temporary name and moved into place, so a reader sees a whole
entry or none. A damaged entry causes a warning, is removed, and its kernel is compiled again. If the folder cannot be
read or written, a warning says so, and kernels are kept in this process only. The folder is the user's cache folder, or
``CUTE_NVFP4_CACHE_DIR``; ``CUTE_NVFP4_CACHE=0`` turns the disk cache off.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

if TYPE_CHECKING:
    from ..sim import HostModule, Program
    from .driver import Function

CACHE_DIR_VARIABLE = "CUTE_NVFP4_CACHE_DIR"
CACHE_SWITCH_VARIABLE = "CUTE_NVFP4_CACHE"

# Another process that compiles the same kernel needs a second or two. After this time we compile it ourselves: that may
# be wasted work, but never gives a wrong result.
LOCK_TIMEOUT_S = 60.0
STALE_TEMPORARY_S = 3600.0
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel, compiled for one architecture: everything needed to inspect, simulate or launch it.

    ``ptx`` and ``cubin`` are the device code. ``host_ir`` is the compiled host function (MLIR, LLVM dialect: it
    builds descriptors, computes the grid and launches); ``entry`` is the host function's symbol in it.
    """

    name: str
    arch: str
    entry: str
    ptx: str
    cubin: bytes
    host_ir: str

    @functools.cached_property
    def loaded(self) -> dict[int, dict[str, Function]]:
        """The driver's handles of the kernels, by device and name; launchers fill it."""
        return {}

    @property
    def host(self) -> HostModule:
        """The host function, compiled again so that its launches can be captured. Those used last are kept."""
        return _host(self.host_ir, self.entry, self.arch)

    @property
    def program(self) -> Program:
        """The PTX, parsed for the simulator. Those used last are kept."""
        from ..sim import Program

        return Program.parse(self.ptx)


@functools.lru_cache(maxsize=64)
def _host(host_ir: str, entry: str, arch: str) -> HostModule:
    from ..sim import HostModule
    from ..sim.host.device import Device

    return HostModule(host_ir, entry, Device.of(arch))


def cache_dir() -> Path:
    """The folder of the disk cache, which may not exist yet."""
    override = os.environ.get(CACHE_DIR_VARIABLE)
    return Path(override) if override else user_cache_path("cute_nvfp4", appauthor=False)


def enabled() -> bool:
    """Whether the disk cache is in use."""
    return os.environ.get(CACHE_SWITCH_VARIABLE, "1") != "0"


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """A context in which the disk cache is not in use."""
    before = os.environ.get(CACHE_SWITCH_VARIABLE)
    os.environ[CACHE_SWITCH_VARIABLE] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHE_SWITCH_VARIABLE]
        else:
            os.environ[CACHE_SWITCH_VARIABLE] = before


def _pack(kernel: CompiledKernel) -> bytes:
    buffer = io.BytesIO()
    meta = json.dumps({"name": kernel.name, "arch": kernel.arch, "entry": kernel.entry})
    files = {"meta.json": meta, "kernel.ptx": kernel.ptx, "kernel.cubin": kernel.cubin, "host.mlir": kernel.host_ir}
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            # a ZipInfo has no timestamp: a kernel has the same entry whenever it is written
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, compresslevel=1)
    archive_bytes = buffer.getvalue()
    return hashlib.sha256(archive_bytes).digest() + archive_bytes


def _unpack(data: bytes) -> CompiledKernel:
    """The kernel that :func:`_pack` packed; raises ValueError for other data.

    The digest is checked first because ``zipfile`` raises many kinds of errors, and its CRCs do not cover headers.
    """
    digest, archive_bytes = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(archive_bytes).digest() != digest:
        raise ValueError("its digest is wrong")
    with zipfile.ZipFile(io.BytesIO(archive_bytes)) as archive:
        meta = json.loads(archive.read("meta.json"))
        return CompiledKernel(
            **meta,
            ptx=archive.read("kernel.ptx").decode(),
            cubin=archive.read("kernel.cubin"),
            host_ir=archive.read("host.mlir").decode(),
        )


def entry_path(digest: str) -> Path:
    """The file of the entry ``digest``."""
    return cache_dir() / f"{digest}.kernel"


def read(digest: str) -> CompiledKernel | None:
    """The kernel of the entry ``digest``, or None. A damaged entry causes a warning and is removed."""
    path = entry_path(digest)
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None  # writing reports a folder that cannot exist
    except OSError as error:
        _warn_unusable("read", path, error)
        return None
    try:
        return _unpack(data)
    except ValueError as error:
        warnings.warn(f"a damaged cache entry, the kernel is compiled again: {path} ({error})", stacklevel=2)
        # if it cannot be removed, writing the new entry reports that
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _warn_unusable(what: str, path: Path, error: OSError) -> None:
    warnings.warn(
        f"cannot {what} the kernel cache, the kernel is kept in this process only: {path} ({error}). "
        f"{CACHE_DIR_VARIABLE} names another folder, {CACHE_SWITCH_VARIABLE}=0 turns the cache off.",
        stacklevel=3,
    )


def write(digest: str, kernel: CompiledKernel) -> None:
    """Stores ``kernel``, or warns that it cannot. The last writer wins; all write the same content."""
    try:
        write_whole(entry_path(digest), _pack(kernel))
    except OSError as error:
        _warn_unusable("write", entry_path(digest), error)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that readers see whole or not at all; creates its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path.parent)
    handle, temporary = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _remove_stale(folder: Path) -> None:
    """Removes temporary files of writers that were killed."""
    horizon = time.time() - STALE_TEMPORARY_S
    for path in folder.glob(".writing-*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < horizon:
                path.unlink()


@contextlib.contextmanager
def compiling(digest: str) -> Iterator[None]:
    """Lets one process at a time compile ``digest``; the lock ends with its process."""
    folder = cache_dir()
    lock = FileLock(folder / f"{digest}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout:
        warnings.warn(
            f"another process holds {lock.lock_file} for over {LOCK_TIMEOUT_S:.0f} s; compiling anyway", stacklevel=2
        )
    except (OSError, NotImplementedError):
        # the folder cannot be written, or the file system has no locks: compile; writing reports what is wrong
        pass
    try:
        yield
    finally:
        lock.release()
