"""Compiles a CuTe DSL host function to a :class:`CompiledKernel`, once, without tensors and without a GPU.

A kernel is compiled from pointers of stated dtype and alignment. Its cache key therefore holds what the code depends on
(architecture, configuration, dtypes, alignments) and nothing else. The kernel is kept in the process and on disk
(:mod:`.cache`); the key on disk also covers the sources of the kernels and the version of the compiler.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ..dsl_version import require_dsl
from ..errors import CompileError
from . import cache
from .cache import CompiledKernel

__all__ = ["CompiledKernel", "build", "compile_cached", "source_digest", "uncached"]

# The files that decide what is traced; after a change in one of them, old cache entries are never found.
_SOURCES = (
    "kernels/**/*.py", "ptx/*.py", "scale_layout.py", "formats.py", "target.py", "runtime/compile.py",
    "runtime/cache.py", "runtime/kernel.py", "runtime/signature.py",
)  # fmt: skip

_lock = threading.RLock()
_memory: dict[tuple, CompiledKernel] = {}


@functools.lru_cache(maxsize=1)
def source_digest() -> str:
    """A digest of the kernels' sources and of the compiler's version."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for pattern in _SOURCES:
        for path in sorted(root.glob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for package in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13"):
        try:
            digest.update(f"{package} {metadata.version(package)}".encode())
        except metadata.PackageNotFoundError:
            digest.update(f"{package} absent".encode())
    return digest.hexdigest()


def build(host: Callable[..., Any], args: Sequence[Any], *, name: str, arch: str, options: str = "") -> CompiledKernel:
    """Compiles the ``@cute.jit`` function ``host`` for ``arch`` from example ``args`` (pointers, scalars, constants).

    Raises:
        CompileError: the DSL or ptxas refused the kernel; the message contains theirs.
        TargetError: another release of the DSL is installed.
    """
    require_dsl()
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory(prefix="cute_nvfp4-") as folder:
        flags = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder} {options}".strip()
        try:
            # no engine for the host function: it is launched from its IR, in the simulator as on a GPU
            compiled = cute.compile(host, *args, options=flags, no_jit_engine=True)
        except Exception as error:  # the DSL raises many kinds; all are re-raised as one, with the cause kept
            raise CompileError(f"kernel {name} does not compile for {arch}: {error}") from error
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
    if not isinstance(ptx, str) or ".version" not in ptx or not isinstance(cubin, bytes):
        raise CompileError(f"kernel {name} for {arch}: the compiler kept no PTX or no cubin")
    return CompiledKernel(name, arch, compiled.function_name, ptx, cubin, str(compiled.ir_module))


def compile_cached(key: tuple, builder: Callable[[], CompiledKernel]) -> CompiledKernel:
    """The kernel of ``key``: from this process, from disk, or built now by ``builder``; a key is built once.

    ``key`` must be hashable, have a ``repr`` that is the same in every process, and hold everything that ``builder``
    depends on, except for the package's sources.
    """
    kernel = _memory.get(key)
    if kernel is not None:
        return kernel
    with _lock:
        kernel = _memory.get(key)
        if kernel is None:
            kernel = _memory[key] = _from_disk_or_build(key, builder)
    return kernel


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """A context in which kernels are compiled anew: PTX from a cache may lack the source lines asked for now."""
    with _lock:
        before = dict(_memory)
        _memory.clear()
    try:
        with cache.switched_off():
            yield
    finally:
        with _lock:
            _memory.clear()
            _memory.update(before)


def _from_disk_or_build(key: tuple, builder: Callable[[], CompiledKernel]) -> CompiledKernel:
    require_dsl()  # before the builder imports a kernel, which another release cannot
    if not cache.enabled():
        return builder()
    digest = hashlib.sha256(f"{source_digest()} {key!r}".encode()).hexdigest()[:40]
    kernel = cache.read(digest)
    if kernel is None:
        with cache.compiling(digest):
            kernel = cache.read(digest)
            if kernel is None:
                kernel = builder()
                cache.write(digest, kernel)
    return kernel
