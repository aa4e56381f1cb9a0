"""Stored kernels are what the compiler makes of the present sources; one that was made of others is not used."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import import_graph, kernel_sources, stored_kernels
from support.ptx_fingerprints import difference, fingerprint, normalised

from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.kernels.gemv.config import GemvConfig
from cute_nvfp4.runtime import cache, compile
from cute_nvfp4.runtime.compile import CompiledKernel
from cute_nvfp4.target import architecture

NAMES = sorted(path.name.removesuffix(".tar.xz") for path in stored_kernels.FOLDER.glob("*.tar.xz"))
GEMV = stored_kernels.kernels()["gemv"]


def up_to_date(name: str) -> dict[str, tuple[Any, CompiledKernel]]:
    kernel = stored_kernels.kernels()[name]
    every = (stored_kernels.restored(x.configuration, words) for words, x in stored_kernels.stored(name).items())
    found = {repr(x): (x, stored_kernels.find(kernel, x)) for x in every if x is not None}
    return {words: x for words, x in found.items() if x[1] is not None}


@contextmanager
def functions_run() -> Iterator[set[tuple[str, int]]]:
    """The functions of the package that run, by module and line."""
    found: set[tuple[str, int]] = set()
    paths = {str(path): module for module, path in import_graph.package().items()}

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        # bodies of modules and classes run where they are imported
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and (module := paths.get(code.co_filename)):
            found.add((module, code.co_firstlineno))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NAMES)
def test_one_of_each_name_is_what_the_compiler_makes(name: str) -> None:
    """And what runs while it is traced is among the sources that the digest is made of."""
    found = up_to_date(name)
    if not found:
        pytest.skip(
            f"stored kernels called {name} are of other sources: python -m tests.support.stored_kernels --write"
        )
    # the shortest: all are compared with -m slow
    config, stored = min(found.values(), key=lambda x: len(x[1].ptx))
    # what refuses configurations does not decide what is traced; modules are imported before
    kernel = replace(stored_kernels.kernels()[name], can_implement=lambda config: "")
    kernel.host(config)
    with functions_run() as run:
        compiled = kernel.build(config)
    assert difference_of(stored, compiled) == ""
    traced = {(module, kernel_sources.module_of(module, kernel_sources.text_of).at(line)) for module, line in run}
    decide = {x for x in traced if x[0].split(".")[1] in kernel_sources.DECIDES}
    sources = kernel_sources.sources(kernel_sources.host_of(kernel, config), kernel.arguments, type(config))
    assert len(decide) > 1 and {x for x in decide - sources if (x[0], "*") not in sources} == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_are_what_the_compiler_makes(name: str) -> None:
    for config, kernel in up_to_date(name).values():
        assert difference_of(kernel, stored_kernels.kernels()[name].build(config)) == ""


def difference_of(kernel: CompiledKernel, other: CompiledKernel) -> str:
    return difference(fingerprint(normalised(kernel.ptx)), fingerprint(normalised(other.ptx)))


def test_another_instruction_is_noticed() -> None:
    kernel = next(iter(stored_kernels.stored("gemv").values())).kernel
    assert difference_of(kernel, replace(kernel, ptx=kernel.ptx.replace("add.s32", "sub.s32", 1))) != ""


CONFIG = GemvConfig(architecture("sm_100a"))
COMPILED = CompiledKernel("gemv", "sm_100a", "host", "compiled", b"cubin", "ir")


@pytest.mark.parametrize(
    "module,old,new,counts",
    [
        ("kernels.gemv.kernel", "class Gemv:", "class Gemv:\n    changed = 1", True),
        ("kernels.gemv.kernel", "class Gemv:", "# a comment\nclass Gemv:", False),
        ("kernels.arith", "def ceil_div(", "changed = 1\n\n\ndef ceil_div(", True),
        ("kernels.arith", "def ceil_div(", "def nobody_names_it(): ...\n\n\ndef ceil_div(", False),
        ("ptx.memory", "def load_global(", "@changed\ndef load_global(", True),
        ("scale_layout", "ATOM_SHAPE = ", "ATOM_SHAPE = changed = ", True),
        ("runtime.compile", "--keep-ptx", "--keep-ptx --changed", True),
        ("kernels.quantize.row", "class QuantizeRow", "class Changed: ...\n\n\nclass QuantizeRow", False),
        ("planning.gemv", "def ", "def changed(): ...\n\n\ndef ", False),
    ],
)
def test_a_change_of_a_source_is_noticed(module: str, old: str, new: str, counts: bool) -> None:
    """But for one in what no part of the kernel names, and in what is said of it."""
    changed_module = f"{import_graph.NAME}.{module}"
    assert old in kernel_sources.text_of(changed_module)

    def changed(name: str) -> str:
        text = kernel_sources.text_of(name)
        return text.replace(old, new, 1) if name == changed_module else text

    assert (kernel_sources.digest(GEMV, CONFIG, changed) != kernel_sources.digest(GEMV, CONFIG)) == counts


@pytest.mark.parametrize("module,counts", [("kernels.gemm.sm100.host", True), ("kernels.gemm.sm120.host", False)])
def test_sources_are_those_of_the_generation(module: str, counts: bool) -> None:
    kernel, config = stored_kernels.kernels()["gemm"], GemmConfig(arch=architecture("sm_100a"))
    changed_module = f"{import_graph.NAME}.{module}"

    def changed(name: str) -> str:
        text = kernel_sources.text_of(name)
        return (
            re.sub(r"^class (\w+)(.*):$", r"class \1\2:\n    changed = 1", text, flags=re.M)
            if name == changed_module
            else text
        )

    assert (kernel_sources.digest(kernel, config, changed) != kernel_sources.digest(kernel, config)) == counts


@pytest.mark.parametrize("how", ["as stored", "of other sources", "caches off", "cannot be"])
def test_when_a_stored_kernel_is_used(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = CompiledKernel("gemv", "sm_100a", "host", "ptx", b"cubin", "ir")
    sources = "others" if how == "of other sources" else kernel_sources.digest(GEMV, CONFIG)
    found = {repr(CONFIG): stored_kernels.Stored(b"", sources, stored)}
    monkeypatch.setattr(stored_kernels, "stored", lambda name: found)
    kernel = replace(GEMV, can_implement=lambda config: "refused" * (how == "cannot be"))
    monkeypatch.setattr(stored_kernels, "kernels", lambda: {"gemv": kernel})
    monkeypatch.setattr(compile, "_memory", {})
    stored_kernels.install()
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path))
    with cache.switched_off() if how == "caches off" else nullcontext():
        found = compile.compile_cached(("gemv", CONFIG), lambda: COMPILED)
    assert found == (stored if how == "as stored" else COMPILED)


def test_a_configuration_of_before_has_the_fields_of_now() -> None:
    """New fields have their defaults, also of records within it, and lost ones are left out."""
    before = GemvConfig(replace(architecture("sm_100a")))
    del vars(before)["dot"], vars(before.arch)["has_fp4_convert"]
    vars(before)["lost"] = vars(before.arch)["lost"] = 1
    assert stored_kernels.restored(pickle.dumps(before), "words") == CONFIG
    assert stored_kernels.restored(pickle.dumps(CONFIG), repr(CONFIG)) == CONFIG


def test_a_configuration_that_cannot_be_any_more_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    before = replace(CONFIG)
    del vars(before)["arch"]
    assert stored_kernels.restored(pickle.dumps(before), "these words") is None
    assert stored_kernels.restored(b"ccute_nvfp4.target\nNoSuchClass\n.", "of a lost class") is None
    said = capsys.readouterr().out
    assert "dropped: these words" in said and "'arch'" in said and "NoSuchClass" in said


def test_a_file_gives_back_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cubins stand in the host function, too, where they are not stored again."""
    cubin = bytes(range(256))
    ir = f'a = "{stored_kernels.escaped(cubin)}"'
    kernel = stored_kernels.without(CompiledKernel("k", "sm_90a", "host", "ptx", cubin, ir))
    assert kernel.host_ir == 'a = "<cubin>"'
    kernels = {words: stored_kernels.Stored(words.encode(), "digest", kernel) for words in ("one", "another")}
    monkeypatch.setattr(stored_kernels, "FOLDER", tmp_path)
    stored_kernels.write("k", kernels)
    found = stored_kernels.stored.__wrapped__("k")
    assert found == kernels and not stored_kernels.stored.__wrapped__("other")
    assert {stored_kernels.whole(x.kernel).host_ir for x in found.values()} == {ir}
    assert ir.isprintable() and ir.count("\\") == 256 - 95 + 2 + 1
