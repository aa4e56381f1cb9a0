"""The checks of ``cute-nvfp4 doctor``, as data."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

from ..dsl_version import ADVICE, PACKAGE, SERIES, wrong_dsl
from ..errors import CuteNvfp4Error

_REQUIRED = (
    PACKAGE, "cuda-python", "numpy", "ml_dtypes", "typer", "rich", "pydantic", "Jinja2",
    "PyYAML", "filelock", "platformdirs", "safetensors",
)  # fmt: skip
_TOOLS = ("nvdisasm", "cuobjdump", "ptxas")
PYTHON = ((3, 10), (3, 14))
"""The oldest and the newest Python that the package is tested with."""
_LIBRARIES = ("nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13")


@dataclass(frozen=True)
class Finding:
    """One check: ``status`` is ok, note (worth knowing), warn (may hurt) or fail (needed and broken)."""

    area: str
    name: str
    status: str
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def diagnose() -> list[Finding]:
    """Runs every check; none of them raises."""
    areas = (_packages, _tools, _compilers, _devices, _simulator, _cache)
    return [finding for area in areas for finding in area()]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CuteNvfp4Error) else f"{type(error).__name__}: {error}"


def _packages() -> Iterator[Finding]:
    yield interpreter(tuple(sys.version_info[:3]))
    yield _torch()
    yield triton(_version("triton"))
    for package in _REQUIRED:
        found = _version(package)
        if found is None:
            yield Finding("packages", package, "fail", "not installed", f"pip install {package}")
        elif package == PACKAGE and wrong_dsl():
            yield Finding("packages", package, "fail", f"{found}, this package needs {SERIES}", ADVICE)
        else:
            yield Finding("packages", package, "ok", found)
    yield libraries({package: _version(package) for package in _LIBRARIES})


def interpreter(version: tuple[int, int, int]) -> Finding:
    """Judges the version of Python: one below the oldest cannot work, one above the newest is untested."""
    text, (oldest, newest) = ".".join(map(str, version)), PYTHON
    if oldest <= version[:2] <= newest:
        return Finding("packages", "python", "ok", text)
    advice = f"tested with Python {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    return Finding("packages", "python", "fail" if version[:2] < oldest else "warn", text, advice)


def _torch() -> Finding:
    """Names the build of torch, or the error with which its import fails."""
    try:
        import torch
    except Exception as error:  # a missing library or package: the user must see which
        advice = "pip install --force-reinstall torch, with the versions of constraints.txt"
        return Finding("packages", "torch", "fail", _describe(error), advice)
    return torch_build(torch.__version__, torch.version.cuda)


def torch_build(version: str, cuda: str | None) -> Finding:
    """Names the build of torch ``version``. cuda: the release of CUDA that it was built for, or None."""
    build = f"build for CUDA {cuda}" if cuda else "CPU build"
    return Finding("packages", "torch", "ok", f"{version}, {build}")


def triton(version: str | None) -> Finding:
    """Says whether Triton is installed; nothing in this package needs it."""
    if version is None:
        advice = "only submissions of Triton and the Triton baseline of benchmarks/gemm.py need it: pip install triton"
        return Finding("packages", "triton", "note", "not installed", advice)
    return Finding("packages", "triton", "ok", version)


def libraries(versions: dict[str, str | None]) -> Finding:
    """Judges which of the DSL's library wheels are installed: it must be one of them, never both."""
    installed = {package: version for package, version in versions.items() if version is not None}
    text = ", ".join(f"{package.rsplit('-', 1)[1]} {version}" for package, version in installed.items())
    name = "DSL libraries"
    if not installed:
        return Finding("packages", name, "fail", "none", "pip install --force-reinstall nvidia-cutlass-dsl")
    if len(installed) > 1:
        advice = (
            "both wheels install the same files and one overwrites the other: uninstall both, then "
            "pip install --force-reinstall the one of your CUDA version (cu13: nvidia-cutlass-dsl[cu13])"
        )
        return Finding("packages", name, "warn", text, advice)
    return Finding("packages", name, "ok", text)


def _tools() -> Iterator[Finding]:
    from ..runtime.inspection import find_tool

    for name in _TOOLS:
        try:
            path = find_tool(name)
            done = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=60, check=True)
            release = next((line for line in done.stdout.splitlines() if "release" in line), "").strip()
            yield Finding("tools", name, "ok", f"{path} ({release})" if release else str(path))
        except (CuteNvfp4Error, OSError, subprocess.SubprocessError) as error:
            if name == "ptxas":
                advice = "only 'sim --time' needs it: pip install 'cute_nvfp4[clock]'"
                yield Finding("tools", name, "note", str(error), advice)
                continue
            advice = f"pip install --force-reinstall nvidia-cuda-{name}; without it 'inspect' does not work"
            yield Finding("tools", name, "fail", str(error), advice)


def _compilers() -> Iterator[Finding]:
    from ..target import ARCHITECTURES

    advice = "pip install --force-reinstall nvidia-cutlass-dsl; if it persists, report the message above"
    for arch in ARCHITECTURES.values():
        yield _tried("compiles for", f"{arch.name} ({arch.example})", _compile, arch.name, advice)


def _tried(area: str, name: str, check: Callable[[str], tuple[str, str]], arch: str, advice: str) -> Finding:
    """The status and the words that ``check`` returns; if it raises, the error, with ``advice``."""
    try:
        return Finding(area, name, *check(arch))
    except Exception as error:  # whatever is broken, the user must see its message and not a traceback
        # if the release of the DSL is wrong, the error itself says what to install
        return Finding(area, name, "fail", _describe(error), "" if wrong_dsl() else advice)


def _compile(arch: str) -> tuple[str, str]:
    """Compiles the probe for ``arch``."""
    from ..ops.probe import compile_probe

    return "ok", f"a small kernel: {len(compile_probe(arch).cubin)} bytes of cubin"


def driver_version() -> str:
    """The newest CUDA that this machine's driver supports, such as ``13.0``; "" without a driver."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return ""
    return "" if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def driver(version: str, built: str | None) -> Finding:
    """Says whether there is a driver, and what follows for torch. built: the CUDA release of torch's build, or None."""
    if version:
        advice = "" if built else "torch's CPU build does not use it: kernels run there with a build of torch for CUDA"
        return Finding("runs on", "driver", "note" if advice else "ok", f"CUDA {version}", advice)
    advice = "torch's CPU build is enough here and some gigabytes smaller: docs/how-to/installation.md" if built else ""
    return Finding("runs on", "driver", "note", "none (libcuda.so.1): kernels run in the simulator", advice)


def _devices() -> Iterator[Finding]:
    import torch

    from ..target import ARCHITECTURES

    yield driver(driver_version(), torch.version.cuda)
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch {torch.__version__} has CUDA {built} but sees no device" if built else "torch has no CUDA support"
        advice = "" if built is None else "kernels run in the simulator; for a GPU, check the driver with nvidia-smi"
        yield Finding("runs on", "cuda", "note", why, advice)
        return
    known = {arch.capability: arch.name for arch in ARCHITECTURES.values()}
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        text = f"{torch.cuda.get_device_name(index)}, capability {capability[0]}.{capability[1]}"
        if capability in known:
            yield Finding("runs on", f"cuda:{index}", "ok", f"{text}: {known[capability]}")
        else:
            advice = f"kernels exist for {', '.join(known.values())}; use --backend sim on this machine"
            yield Finding("runs on", f"cuda:{index}", "warn", text, advice)


def _simulator() -> Iterator[Finding]:
    from ..target import ARCHITECTURES

    advice = "the simulator needs no GPU: report the message above"
    for arch in ARCHITECTURES.values():
        yield _tried("runs on", f"simulator, {arch.name}", _simulate, arch.name, advice)


def _simulate(arch: str) -> tuple[str, str]:
    """Runs the probe in the simulator and compares its results."""
    import torch

    from ..ops.probe import probe
    from ..runtime.simulating import simulating

    x = torch.arange(300, dtype=torch.float32)
    with simulating(arch):
        wrong = int((probe(x) != probe(x, backend="reference")).sum())
    return ("fail", f"{wrong} wrong results") if wrong else ("ok", "right on a small kernel")


def _cache() -> Iterator[Finding]:
    from ..runtime import cache

    folder = cache.cache_dir()
    if not cache.enabled():
        yield Finding("cache", str(folder), "note", f"turned off by {cache.CACHE_SWITCH_VARIABLE}=0")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        sizes = [path.stat().st_size for path in folder.glob("*.kernel")]
    except OSError as error:
        advice = f"make it writable, or set {cache.CACHE_DIR_VARIABLE} to a folder that is"
        yield Finding("cache", str(folder), "fail", f"not writable: {error}", advice)
        return
    yield Finding("cache", str(folder), "ok", f"{len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB")
