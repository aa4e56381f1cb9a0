"""Stores compiled kernels for tests. A stored kernel is used as long as the sources that it was compiled from are
unchanged.

Each kernel is stored with a digest of what it was compiled from (``kernel_sources``). After a change of these sources,
tests compile the kernel, until it is stored again:

    python -m tests.support.stored_kernels            how many are up to date
    python -m tests.support.stored_kernels --write    compile the others, and store them

``pytest --note-kernels FOLDER`` notes which kernels a run of tests requests; ``--write --noted FOLDER`` stores those
and no others; with ``--keep`` also those that are already stored.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import functools
import io
import json
import os
import pickle
import string
import sys
import tarfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cute_nvfp4.errors import CompileError, OperandError
from cute_nvfp4.runtime import cache, compile
from cute_nvfp4.runtime.compile import CompiledKernel
from cute_nvfp4.runtime.kernel import Kernel
from cute_nvfp4.target import Architecture, architecture

from .kernel_sources import digest

FOLDER = Path(__file__).parents[1] / "data" / "kernels"
_CUBIN = "<cubin>"
_PLAIN = {ord(x) for x in string.printable if x.isprintable()} - {ord('"'), ord("\\")}
_ESCAPES = {x: f"\\{x:02X}" for x in range(256) if x not in _PLAIN} | {ord("\\"): "\\\\"}


class Stored(NamedTuple):
    """A stored kernel. configuration: pickled; sources: the digest of what it was compiled from; kernel: its host
    function is stored ``without`` the cubin."""

    configuration: bytes
    sources: str
    kernel: CompiledKernel


@functools.cache
def stored(name: str) -> dict[str, Stored]:
    """The stored kernels called ``name``, by their configurations' text."""
    path = FOLDER / f"{name}.tar.xz"
    if not path.exists():
        return {}
    with tarfile.open(path, "r:xz") as archive:
        parts = {x.name: archive.extractfile(x).read() for x in archive}
    found = {}
    for i, (words, pickled, sources, arch, entry) in enumerate(json.loads(parts.pop("index.json"))):
        ptx, host_ir = (parts.pop(f"{i}.{kind}").decode() for kind in ("ptx", "mlir"))
        kernel = CompiledKernel(name, arch, entry, ptx, parts.pop(f"{i}.cubin"), host_ir)
        found[words] = Stored(base64.b64decode(pickled), sources, kernel)
    return found


def write(name: str, kernels: dict[str, Stored]) -> None:
    """Stores these kernels called ``name``, and no others. Parts of one kind are adjacent, because they compress well
    together."""
    ordered = sorted(kernels.items())
    index = [
        (words, base64.b64encode(x.configuration).decode(), x.sources, x.kernel.arch, x.kernel.entry)
        for words, x in ordered
    ]
    parts = {"index.json": json.dumps(index).encode()}
    for i, (_, x) in enumerate(ordered):
        parts[f"{i}.mlir"] = x.kernel.host_ir.encode()
    parts |= {f"{i}.ptx": x.kernel.ptx.encode() for i, (_, x) in enumerate(ordered)}
    parts |= {f"{i}.cubin": x.kernel.cubin for i, (_, x) in enumerate(ordered)}
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not kernels:
        (FOLDER / f"{name}.tar.xz").unlink(missing_ok=True)
        return
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:xz", preset=9) as archive:
        for part, content in parts.items():
            info = tarfile.TarInfo(part)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    # a killed process leaves the earlier file
    (FOLDER / f"{name}.new").write_bytes(written.getvalue())
    (FOLDER / f"{name}.new").replace(FOLDER / f"{name}.tar.xz")


def without(kernel: CompiledKernel) -> CompiledKernel:
    """The kernel with a host function that lacks the cubin, which is stored beside it."""
    return replace(kernel, host_ir=kernel.host_ir.replace(escaped(kernel.cubin), _CUBIN))


def whole(kernel: CompiledKernel) -> CompiledKernel:
    return replace(kernel, host_ir=kernel.host_ir.replace(_CUBIN, escaped(kernel.cubin)))


def escaped(cubin: bytes) -> str:
    """A cubin in MLIR's notation."""
    return cubin.decode("latin-1").translate(_ESCAPES)


# ---- use -------------------------------------------------------------------------------------------------------------

NOTE = "NOTE_KERNELS"
"""The environment variable with the folder of ``note``, for forked processes."""
noted: dict[tuple[str, str], bytes] = {}
"""The requested kernels: the pickled configuration, by the kernel's name and the configuration's text."""
_ask = compile._from_disk_or_build


def find(kernel: Kernel, config: Any) -> CompiledKernel | None:
    """The stored kernel, if nothing that it was compiled from has changed since."""
    found = stored(kernel.name).get(repr(config))
    return whole(found.kernel) if found and found.sources == digest(kernel, config) else None


def _ask_stored(key: tuple, builder: Callable[[], CompiledKernel]) -> CompiledKernel:
    """The kernel for a key that this process lacks: from disk, from the stored kernels, or built now."""
    return _ask(key, lambda: _usable(key) or builder())


def _usable(key: tuple) -> CompiledKernel | None:
    """The stored kernel of a name and a configuration. None if caches are off, where a test is about the compiler."""
    kernel = kernels().get(key[0]) if cache.enabled() else None
    found = None if kernel is None else find(kernel, key[1])
    return None if found is None or kernel.can_implement(key[1]) else found


def install() -> None:
    """Makes this process use stored kernels before it compiles. ``Kernel.build`` uses none."""
    compile._from_disk_or_build = _ask_stored


def load() -> None:
    """Reads all stored kernels, and parses the sources that they were compiled from."""
    for name, kernel in kernels().items():
        configs = (restored(x.configuration, words) for words, x in stored(name).items())
        for config in {(type(x), x.arch): x for x in configs if x is not None}.values():
            digest(kernel, config)


def note(folder: Path, process: str) -> None:
    """Makes this process and its forks note the kernels that they request. Each process rewrites its file of ``folder``
    for each new kernel."""
    ask = compile._from_disk_or_build
    folder.mkdir(parents=True, exist_ok=True)

    def ask_noted(key: tuple, builder: Callable[[], CompiledKernel]) -> CompiledKernel:
        kernel = ask(key, builder)
        if key[0] in kernels() and (key[0], repr(key[1])) not in noted:
            noted[key[0], repr(key[1])] = pickle.dumps(key[1])
            # a judge's worker may not be allowed to write
            with contextlib.suppress(PermissionError):
                (folder / f"{process}-{os.getpid()}").write_bytes(pickle.dumps(noted))
        return kernel

    compile._from_disk_or_build = ask_noted


@functools.cache
def kernels() -> dict[str, Kernel]:
    """The kernels of the operations, by name."""
    from cute_nvfp4.ops import library  # noqa: F401 (loads all operations)

    modules = [module for name, module in sys.modules.items() if name.startswith("cute_nvfp4.ops.")]
    return {x.name: x for module in modules for x in vars(module).values() if isinstance(x, Kernel)}


def _wanted(folder: Path | None, keep: bool) -> dict[tuple[str, str], bytes]:
    """The kernels to store: the noted ones, or else (or with ``keep`` also) those that are already stored. Tests' own
    kernels and kernels that no longer exist are left out."""
    found = {}
    if folder is None or keep:
        found = {(name, words): x.configuration for name in kernels() for words, x in stored(name).items()}
    for path in folder.iterdir() if folder is not None else ():
        found |= pickle.loads(path.read_bytes())
    wanted = {}
    for (name, words), pickled in found.items():
        if name in kernels() and (config := restored(pickled, words)) is not None:
            wanted[name, repr(config)] = pickle.dumps(config)
    return wanted


def restored(configuration: bytes, words: str) -> Any:
    """The configuration with the present fields of its class: new fields get their defaults, removed fields are left
    out, and an architecture has its present figures. None, with a printed reason, if the class is gone or a new field
    has no default."""
    try:
        return _as_it_is_now(pickle.loads(configuration))
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        print(f"dropped: {words} ({error})")
        return None


def _as_it_is_now(value: Any) -> Any:
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map(_as_it_is_now, value))
    if isinstance(value, Architecture):
        return architecture(value.name)
    if not dataclasses.is_dataclass(value):
        return value
    # a default of the class is no attribute of the object itself
    kept = {x.name: _as_it_is_now(vars(value)[x.name]) for x in dataclasses.fields(value) if x.name in vars(value)}
    return type(value)(**kept)


def _renewed(name: str, pickled: bytes) -> Stored | None:
    """A kernel compiled now; None if its configuration can no longer exist."""
    kernel, config = kernels()[name], pickle.loads(pickled)
    try:
        compiled = kernel.compile(config)
        if "\n\t.file\t" in compiled.ptx:
            # a kernel with source lines names this machine's folders
            compiled = kernel.build(config)
    except (OperandError, CompileError) as error:
        print(f"dropped: {config} ({error})")
        return None
    return Stored(pickled, digest(kernel, config), without(compiled))


def stale(wanted: dict[tuple[str, str], bytes]) -> list[tuple[str, str]]:
    """The kernels that are not stored, or were compiled from other sources."""
    return [key for key, pickled in wanted.items() if find(kernels()[key[0]], pickle.loads(pickled)) is None]


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="compile and store kernels that are not up to date")
    parser.add_argument("--noted", type=Path, metavar="FOLDER", help="store the kernels noted there, and no others")
    parser.add_argument("--keep", action="store_true", help="with --noted: keep those that are already stored")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(arguments)
    wanted = _wanted(args.noted, args.keep)
    old = stale(wanted)
    print(f"{len(wanted)} kernels, {len(old)} of other sources or not stored")
    if not args.write:
        return 0
    with ProcessPoolExecutor(args.jobs) as pool:
        # a name at a time: what is done stays, if the rest is not waited for
        for name in sorted(kernels()):
            mine = [key for key in old if key[0] == name]
            renewed = dict(zip(mine, pool.map(_renewed, [name] * len(mine), [wanted[x] for x in mine])))
            before = stored(name)
            now = {words: renewed.get((n, words), before.get(words)) for n, words in wanted if n == name}
            if now != before:
                write(name, {words: x for words, x in now.items() if x is not None})
                print(f"{name}: {len(renewed)} compiled", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
