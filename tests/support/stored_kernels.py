"""Compiled kernels that tests need not compile again: each is used as long as the sources it was compiled from stay.

A digest of what a kernel is compiled from (``kernel_sources``) is stored with it. After a change of that a kernel is
compiled as ever, until it is stored anew:

    python -m tests.support.stored_kernels            how many are up to date
    python -m tests.support.stored_kernels --write    compile the others, and store them

``pytest --note-kernels FOLDER`` notes which kernels a run of tests asks for; ``--write --noted FOLDER`` stores those
and no others, with ``--keep`` those that are stored too.
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
    """A stored kernel. configuration: pickled; sources: the digest of what it was compiled from; kernel: with its host
    function ``without`` the cubin."""

    configuration: bytes
    sources: str
    kernel: CompiledKernel


@functools.cache
def stored(name: str) -> dict[str, Stored]:
    """The stored kernels called ``name``, by the words of their configurations."""
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
    """Stores these kernels called ``name``, and no others. Parts of a kind stand together, as one is like the next."""
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
    # a process that is killed leaves the file of before
    (FOLDER / f"{name}.new").write_bytes(written.getvalue())
    (FOLDER / f"{name}.new").replace(FOLDER / f"{name}.tar.xz")


def without(kernel: CompiledKernel) -> CompiledKernel:
    """The host function without the cubin, which stands beside it."""
    return replace(kernel, host_ir=kernel.host_ir.replace(escaped(kernel.cubin), _CUBIN))


def whole(kernel: CompiledKernel) -> CompiledKernel:
    return replace(kernel, host_ir=kernel.host_ir.replace(_CUBIN, escaped(kernel.cubin)))


def escaped(cubin: bytes) -> str:
    """A cubin as it stands in MLIR."""
    return cubin.decode("latin-1").translate(_ESCAPES)


# ---- use -------------------------------------------------------------------------------------------------------------

NOTE = "NOTE_KERNELS"
"""The environment's variable for the folder of ``note``, for processes that are forked."""
noted: dict[tuple[str, str], bytes] = {}
"""What was asked for: by the kernel's name and the words of a configuration the configuration, pickled."""
_ask = compile._from_disk_or_build


def find(kernel: Kernel, config: Any) -> CompiledKernel | None:
    """The stored kernel, if nothing that it was compiled from has changed since."""
    found = stored(kernel.name).get(repr(config))
    return whole(found.kernel) if found and found.sources == digest(kernel, config) else None


def _ask_stored(key: tuple, builder: Callable[[], CompiledKernel]) -> CompiledKernel:
    """The kernel that this process does not have yet: from disk, stored, or built now."""
    return _ask(key, lambda: _usable(key) or builder())


def _usable(key: tuple) -> CompiledKernel | None:
    """The stored kernel of a name and a configuration that can be; none where caches are off, for there the compiler is
    what a test is about."""
    kernel = kernels().get(key[0]) if cache.enabled() else None
    found = None if kernel is None else find(kernel, key[1])
    return None if found is None or kernel.can_implement(key[1]) else found


def install() -> None:
    """Has this process use stored kernels before it compiles. ``Kernel.build`` asks for none."""
    compile._from_disk_or_build = _ask_stored


def load() -> None:
    """Reads all stored kernels, and of what those of each name are compiled."""
    for name, kernel in kernels().items():
        configs = (restored(x.configuration, words) for words, x in stored(name).items())
        for config in {(type(x), x.arch): x for x in configs if x is not None}.values():
            digest(kernel, config)


def note(folder: Path, process: str) -> None:
    """Has this process, and those that it forks, note which kernels they are asked for, in a file of ``folder`` each,
    whenever there is another one."""
    ask = compile._from_disk_or_build
    folder.mkdir(parents=True, exist_ok=True)

    def ask_noted(key: tuple, builder: Callable[[], CompiledKernel]) -> CompiledKernel:
        kernel = ask(key, builder)
        if key[0] in kernels() and (key[0], repr(key[1])) not in noted:
            noted[key[0], repr(key[1])] = pickle.dumps(key[1])
            # a judge's worker may write nothing
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
    """What is to be stored: what was noted, or else (or to ``keep``) what is stored already; tests' own kernels are
    not, nor is what no longer exists."""
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
    """The configuration as its class is now: fields that the class has got since have their defaults, fields that it
    has lost are left out, and an architecture has the figures of today. None, and a line that says why, where the class
    is gone or a new field has no default."""
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
    # what the class says by default is no attribute of the object itself
    kept = {x.name: _as_it_is_now(vars(value)[x.name]) for x in dataclasses.fields(value) if x.name in vars(value)}
    return type(value)(**kept)


def _renewed(name: str, pickled: bytes) -> Stored | None:
    """A kernel compiled now; None of a configuration that can no longer be."""
    kernel, config = kernels()[name], pickle.loads(pickled)
    try:
        compiled = kernel.compile(config)
        if "\n\t.file\t" in compiled.ptx:
            # it was compiled to tell source lines, and names this machine's folders
            compiled = kernel.build(config)
    except (OperandError, CompileError) as error:
        print(f"dropped: {config} ({error})")
        return None
    return Stored(pickled, digest(kernel, config), without(compiled))


def stale(wanted: dict[tuple[str, str], bytes]) -> list[tuple[str, str]]:
    """Those that are not stored, or were compiled from other sources."""
    return [key for key, pickled in wanted.items() if find(kernels()[key[0]], pickle.loads(pickled)) is None]


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="compile those that are not up to date")
    parser.add_argument("--noted", type=Path, metavar="FOLDER", help="store what was noted there, and nothing else")
    parser.add_argument("--keep", action="store_true", help="with --noted: and what is stored already")
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
