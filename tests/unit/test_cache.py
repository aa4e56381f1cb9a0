"""Compile once: in the process, on disk, among concurrent, killed and fresh processes, and with a broken folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from support.gemv_problems import Case, make

from cute_nvfp4 import gemv
from cute_nvfp4.runtime import cache
from cute_nvfp4.runtime import compile as compiling
from cute_nvfp4.runtime.cache import CompiledKernel
from cute_nvfp4.runtime.compile import compile_cached
from cute_nvfp4.runtime.kernel import Kernel

KERNEL = CompiledKernel("k", "sm_100a", "entry", ".version 8.8\n" * 500, bytes(range(256)) * 40, "module { ü }")
TESTS = Path(__file__).parents[1]


class Builder:
    """Counts how often it is asked."""

    def __init__(self, kernel: CompiledKernel = KERNEL) -> None:
        self.kernel, self.count = kernel, 0

    def __call__(self) -> CompiledKernel:
        self.count += 1
        time.sleep(0.01)
        return self.kernel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a process that remembers nothing."""
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(cache.CACHE_SWITCH_VARIABLE, raising=False)
    forget(monkeypatch)
    return tmp_path / "cache"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_memory", {})


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kernel"))


def leftovers(folder: Path) -> list[Path]:
    return sorted(folder.glob(".writing-*"))


# --- in one process


def test_the_same_object_in_the_process(folder: Path) -> None:
    builder = Builder()
    first = compile_cached(("a", 1), builder)
    assert compile_cached(("a", 1), builder) is first and builder.count == 1
    compile_cached(("a", 2), builder)
    assert builder.count == 2 and len(entries(folder)) == 2


def test_threads_build_once(folder: Path) -> None:
    builder, found = Builder(), []
    threads = [threading.Thread(target=lambda: found.append(compile_cached(("t",), builder))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builder.count == 1 and len(found) == 8 and all(x is found[0] for x in found)


def test_from_disk_bit_for_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder()
    compile_cached(("a",), builder)
    forget(monkeypatch)
    assert compile_cached(("a",), builder) == KERNEL and builder.count == 1
    assert len(entries(folder)) == 1 and not leftovers(folder)


def test_another_digest_of_the_sources_is_another_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder()
    compile_cached(("a",), builder)
    forget(monkeypatch)
    monkeypatch.setattr(compiling, "source_digest", lambda: "another")
    compile_cached(("a",), builder)
    assert builder.count == 2 and len(entries(folder)) == 2


@pytest.mark.parametrize(
    "name,covered",
    [
        *((name, True) for name in ("kernels/gemv/kernel.py", "kernels/gemm/sm100/mainloop.py", "ptx/half.py")),
        *((name, True) for name in ("scale_layout.py", "formats.py", "target.py", "runtime/signature.py")),
        *((name, True) for name in ("runtime/compile.py", "runtime/cache.py", "runtime/kernel.py")),
        *((name, False) for name in ("reference.py", "planning/gemm.py", "runtime/launch.py", "errors.py")),
        ("ops/gemv.py", False),
    ],
)
def test_the_digest_covers_what_is_traced(
    name: str, covered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else: after a change in an operation's messages no kernel is compiled again."""
    digest = compiling.source_digest.__wrapped__
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "runtime" / "compile.py"))
    before = digest()
    (tmp_path / name).write_text("x = 2\n")
    assert (digest() != before) == covered


def test_the_digest_covers_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = compiling.source_digest.__wrapped__
    before = digest()
    monkeypatch.setattr(compiling.metadata, "version", lambda package: "9.9.9")
    assert digest() != before


def test_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE_SWITCH_VARIABLE, "0")
    builder = Builder()
    first = compile_cached(("a",), builder)
    assert compile_cached(("a",), builder) is first and builder.count == 1
    assert not folder.exists()


def test_a_builder_that_fails_leaves_nothing(folder: Path) -> None:
    def fail() -> CompiledKernel:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        compile_cached(("a",), fail)
    assert not entries(folder) and not leftovers(folder)
    builder = Builder()
    assert compile_cached(("a",), builder) is KERNEL and builder.count == 1


# --- damage


def test_an_entry_does_not_depend_on_when_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache._pack(KERNEL)
    monkeypatch.setattr("time.time", lambda: 1.7e9)
    monkeypatch.setattr("time.localtime", lambda *_: (2001, 2, 3, 4, 5, 6, 0, 0, 0))
    assert cache._pack(KERNEL) == first


def test_damaged_entries_are_mended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut anywhere, any byte changed, emptied, or something else altogether: said, removed, compiled again."""
    compile_cached(("a",), Builder())
    (path,) = entries(folder)
    good = path.read_bytes()
    broken = [good[:n] for n in range(0, len(good), max(1, len(good) // 40))]
    for i in range(0, len(good), max(1, len(good) // 160)):
        broken.append(good[:i] + bytes([good[i] ^ 0xA5]) + good[i + 1 :])
    broken += [good + b"x", b"not an entry", good[32:]]
    for data in broken:
        path.write_bytes(data)
        with pytest.warns(UserWarning, match=rf"a damaged cache entry, .*{path.name}"):
            assert cache.read(path.stem) is None
        assert not path.exists()
    path.write_bytes(broken[7])
    forget(monkeypatch)
    builder = Builder()
    with pytest.warns(UserWarning, match="a damaged cache entry, the kernel is compiled again"):
        assert compile_cached(("a",), builder) is KERNEL
    assert builder.count == 1 and path.read_bytes() == good


def test_a_folder_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where the folder should be: said, and the kernel works in this process."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path / "file" / "cache"))
    forget(monkeypatch)
    builder = Builder()
    message = "cannot write the kernel cache, .*CUTE_NVFP4_CACHE_DIR names another folder"
    with pytest.warns(UserWarning, match=message) as caught:
        first = compile_cached(("a",), builder)
    assert first is KERNEL and len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_cached(("a",), builder) is first and builder.count == 1


@pytest.mark.parametrize("where", ["mkdir", "lock", "mkstemp", "replace"])
def test_a_folder_that_may_not_be_written(where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at each step (root may write anything, so the refusal is made up)."""

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    targets = {"mkdir": (Path, "mkdir"), "lock": (cache.FileLock, "acquire"), "mkstemp": (cache.tempfile, "mkstemp")}
    monkeypatch.setattr(*targets.get(where, (cache.os, "replace")), refuse)
    builder = Builder()
    if where == "lock":  # without a lock the entry is written all the same
        assert compile_cached(("a",), builder) is KERNEL and len(entries(folder)) == 1
        return
    with pytest.warns(UserWarning, match="cannot write the kernel cache"):
        assert compile_cached(("a",), builder) is KERNEL
    assert not entries(folder) and not leftovers(folder)


def test_an_entry_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_cached(("a",), Builder())
    (path,) = entries(folder)
    path.unlink()
    path.mkdir()
    forget(monkeypatch)
    with pytest.warns(UserWarning, match="cannot (read|write) the kernel cache") as caught:
        assert compile_cached(("a",), Builder()) is KERNEL
    assert [str(w.message).split()[1] for w in caught] == ["read", "read", "write"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_cached(("a",), Builder())
    folder.chmod(0o555)
    try:
        forget(monkeypatch)
        builder = Builder()
        assert compile_cached(("a",), builder) == KERNEL and builder.count == 0
        with pytest.warns(UserWarning, match="cannot write the kernel cache"):
            compile_cached(("b",), builder)
    finally:
        folder.chmod(0o755)


# --- other processes


def script(body: str) -> list[str]:
    head = f"import sys, time; sys.path.insert(0, {str(TESTS / 'unit')!r}); sys.path.insert(0, {str(TESTS)!r})\n"
    return [sys.executable, "-c", head + textwrap.dedent(body)]


def test_concurrent_processes_build_once(folder: Path) -> None:
    """Four processes ask for one kernel at the same moment."""
    body = """
        from cute_nvfp4.runtime.cache import CompiledKernel
        from cute_nvfp4.runtime.compile import compile_cached
        builds = []
        def build():
            builds.append(1)
            time.sleep(0.5)
            return CompiledKernel("k", "sm_100a", "e", "ptx" * 100000, b"cubin" * 100000, "ir")
        print("ready", flush=True)
        sys.stdin.readline()
        kernel = compile_cached(("race",), build)
        print(len(builds), len(kernel.ptx), len(kernel.cubin))
    """
    processes = [
        subprocess.Popen(script(body), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    results = []
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        text, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and not errors, errors
        results.append(text.split())
    assert sorted(r[0] for r in results) == ["0", "0", "0", "1"]
    assert all(r[1:] == ["300000", "500000"] for r in results)
    assert len(entries(folder)) == 1 and not leftovers(folder)


def test_a_process_killed_while_it_compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock falls with it, half an entry is nobody's, and what it left is cleared away when it is old."""
    body = """
        import os
        from cute_nvfp4.runtime import cache
        from cute_nvfp4.runtime.compile import compile_cached
        def stop(*args):
            print("writing", flush=True)
            time.sleep(600)
        os.fsync = stop  # the lock is held, and the temporary file written
        from cute_nvfp4.runtime.cache import CompiledKernel
        compile_cached(("killed",), lambda: CompiledKernel("k", "a", "e", "ptx" * 100000, b"", ""))
    """
    process = subprocess.Popen(script(body), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = leftovers(folder)
    assert left.stat().st_size > 0 and not entries(folder)
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as is said of a lock that is held
        assert compile_cached(("killed",), Builder()) is KERNEL
    assert len(entries(folder)) == 1
    assert leftovers(folder) == [left]  # it might still be someone's
    old = time.time() - 2 * cache.STALE_TEMPORARY_S
    os.utime(left, (old, old))
    compile_cached(("another",), Builder())
    assert not leftovers(folder)


def test_a_lock_that_is_never_released(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(compiling, "source_digest", lambda: "d")
    held = []

    class OtherProcess(threading.Thread):
        def run(self) -> None:
            with cache.compiling("x"):
                held.append(1)
                release.wait()

    release = threading.Event()
    other = OtherProcess()
    other.start()
    while not held:
        time.sleep(0.01)
    with pytest.warns(UserWarning, match=r"another process holds .*x\.lock for over 0 s; compiling anyway"):
        with cache.compiling("x"):
            pass
    release.set()
    other.join()


def test_gemv_in_a_fresh_process(folder: Path) -> None:
    """The real kernel: the second process compiles nothing and gives the same bits."""
    body = """
        from cute_nvfp4.runtime.kernel import Kernel
        from support.gemv_problems import Case, make
        build, count = Kernel.build, []
        Kernel.build = lambda *args: count.append(1) or build(*args)
        c = make(Case(9, 256)).run()
        print(len(count), c.numpy().tobytes().hex())
    """
    outputs = [subprocess.run(script(body), capture_output=True, text=True, timeout=120, check=True) for _ in range(2)]
    (first, bits), (second, again) = (x.stdout.split() for x in outputs)
    assert (first, second) == ("1", "0") and bits == again
    assert len(entries(folder)) == 1


# --- a second call


@pytest.mark.parametrize("given", [False, True])
def test_a_second_call_compiles_nothing(given: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(Case(9, 256, out="contiguous" if given else ""))
    first = problem.run().clone()

    monkeypatch.setattr(Kernel, "build", lambda *_: pytest.fail("compiled again"))
    second = gemv(problem.a, problem.b, out=problem.out, out_dtype=torch.float32, backend="sim")
    assert second.equal(first)
