"""The hooks in nvidia-cutlass-dsl: compiled functions keep their PTX, and a call of one runs in the simulator.

The main hooks are ``CompileOptions.apply_envar_settings``, which every compilation calls, and the constructor,
``__call__`` and ``to`` of ``CudaDialectJitCompiledFunction``, of which every execution calls ``to``. Other hooks
replace the benchmark helpers, refuse the export of object files, and keep tensors from using TVM-FFI.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from cute_nvfp4.dsl_version import require_dsl
from cute_nvfp4.errors import TargetError
from cute_nvfp4.sim.host.module import HostModule
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.program import Program
from cute_nvfp4.sim.session import ffi
from cute_nvfp4.sim.session.patches import Patches
from cute_nvfp4.sim.session.protocol import Session
from cute_nvfp4.sim.session.runtime import NO_TIME

_ENDED = "this function was compiled in a simulated session that has ended; compile it again"


class SimExecutor:
    """Runs a compiled function: executes its host code, and submits the launches to the session.

    Raises ``TargetError`` for a function without PTX, and for a call after the session has ended.
    """

    def __init__(self, session: Session, compiled: Any) -> None:
        self._session, self._arguments = session, compiled.execution_args
        ptx = compiled.__ptx__
        if compiled.ir_module is None:
            raise TargetError("a function loaded from an object file cannot be simulated: it carries no PTX")
        if compiled.has_gpu_module and (not isinstance(ptx, str) or ".version" not in ptx):
            raise TargetError(f"{compiled.function_name} has no PTX; compile it inside the simulated session")
        self._program = Program.parse(ptx) if compiled.has_gpu_module else None
        code = str(compiled.ir_module)
        self._host = HostModule(code, compiled.function_name, session.device)
        self._prints = "@printf(" in code

    def run_compiled_program(self, addresses: list[Any]) -> int:
        if not self._session.active:
            raise TargetError(_ENDED)
        self._flush()
        self._host.call_at([a.value if isinstance(a, ctypes.c_void_p) else int(a) for a in addresses], self._launch)
        self._flush()
        return 0

    def _launch(self, launch: Launch) -> None:
        self._flush()
        self._session.submit(self._program, launch)

    def _flush(self) -> None:
        """Flushes both output buffers, so that text printed by C and by Python stays in order."""
        if self._prints:
            sys.stdout.flush()
            ctypes.pythonapi.fflush(None)

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        # the second result keeps adapted arguments alive during the call
        addresses, kept = self._arguments.generate_execution_args(args, kwargs)
        result = self.run_compiled_program(addresses)
        del kept
        return result


def _without_tvm_ffi(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(tensor: Any, *args: Any, enable_tvm_ffi: bool = False, **kwargs: Any) -> None:
        original(tensor, *args, **kwargs)

    return __init__


def _no_export(compiled: Any, *_: Any, **__: Any) -> None:
    raise TargetError(f"{compiled.function_name} was compiled in a simulated session: an object file would hold no PTX")


class DslHooks:
    """The hooks of one session; ``lineinfo`` makes compilations put source lines into the PTX."""

    def __init__(self, session: Session, lineinfo: bool) -> None:
        self.session, self.lineinfo = session, lineinfo
        self._folder = tempfile.TemporaryDirectory(prefix="cute_nvfp4-sim-")
        self._compiled = 0
        self._ffi_asked = False
        self._ffi_always = False

    def install(self, patches: Patches) -> None:
        """Installs the hooks. Raises ``TargetError`` for another release of the DSL, whose internals may differ."""
        require_dsl()
        import cutlass  # noqa: F401  (makes the DSL's singletons)
        from cutlass.base_dsl.compiler import CompileOptions
        from cutlass.cute.runtime import _Tensor
        from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction as Compiled

        self._set_environment(patches)
        patches.set(CompileOptions, "apply_envar_settings", self._compiling(CompileOptions.apply_envar_settings))
        patches.set(Compiled, "__init__", self._constructing(Compiled.__init__))
        patches.set(Compiled, "__call__", self._calling(Compiled.__call__))
        patches.set(_Tensor, "__init__", _without_tvm_ffi(_Tensor.__init__))
        patches.set(Compiled, "export_to_c", _no_export)
        patches.set(Compiled, "to", lambda compiled, device=None: SimExecutor(self.session, compiled))
        self._set_testing(patches)

    def close(self) -> None:
        self._folder.cleanup()

    def _set_environment(self, patches: Patches) -> None:
        from cutlass.base_dsl.cache_helpers import JitCacheDict
        from cutlass.base_dsl.dsl import DSLSingletonMeta

        arch = self.session.device.arch
        patches.item(os.environ, "CUTE_DSL_ARCH", arch)
        patches.item(os.environ, "CUTE_DSL_DISABLE_FILE_CACHING", "1")
        for dsl in list(DSLSingletonMeta._instances.values()):
            patches.set(dsl, "jit_cache", JitCacheDict(max_elems=dsl.envar.jit_cache_max_elems))
            patches.set(dsl.envar, "_arch", arch)
            patches.set(dsl.envar, "disable_file_caching", True)
            self._ffi_always |= bool(patches.set(dsl.envar, "enable_tvm_ffi", False))
            if self.lineinfo:
                patches.set(dsl.envar, "lineinfo", True)

    def _compiling(self, original: Callable[..., None]) -> Callable[..., None]:
        def apply_envar_settings(options: Any, envar: Any, function_name: str) -> None:
            from cutlass.base_dsl.compiler import EnableTVMFFI, KeepPTX

            original(options, envar, function_name)
            ffi_option, keep = options.options[EnableTVMFFI], options.options[KeepPTX]
            self._ffi_asked = bool(ffi_option.value) or self._ffi_always
            ffi_option.value = False
            # the options may come from an earlier compilation, which set them here
            if not keep.value or getattr(keep, "sim_set", False):
                self._compiled += 1
                keep.value = keep.sim_set = True
                arch = options.gpu_arch or envar.arch
                keep.dump_path = os.path.join(self._folder.name, f"f{self._compiled}")
                keep.full_ptx_path = f"{keep.dump_path}.{arch}.ptx"

        return apply_envar_settings

    def _constructing(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(compiled: Any, *args: Any, **kwargs: Any) -> None:
            original(compiled, *args, **kwargs)
            asked, self._ffi_asked = self._ffi_asked, False
            compiled.sim_convention = None
            if asked and compiled.ir_module is not None:
                examples = kwargs.get("dynamic_args") or (), kwargs.get("dynamic_kwargs") or {}
                compiled.sim_convention = ffi.Convention(compiled.execution_args.signature, *examples, self.session)

        return __init__

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(compiled: Any, *args: Any, **kwargs: Any) -> Any:
            convention = getattr(compiled, "sim_convention", None)
            if convention is None:
                return original(compiled, *args, **kwargs)
            original(compiled, *convention.convert(args, kwargs))
            return None

        return __call__

    def _set_testing(self, patches: Patches) -> None:
        import cutlass.cute.testing
        import cutlass.testing

        if self.session.benchmarks != "once":
            return
        for module in (cutlass.testing, cutlass.cute.testing):
            if hasattr(module, "benchmark"):
                patches.set(module, "benchmark", self._benchmark)
        patches.set(cutlass.testing, "_benchmark_for_autotune", self._rank)

    def _benchmark(
        self, callable: Any, *, kernel_arguments: Any = None, workspace_generator: Any = None, **_: Any
    ) -> float:
        """Replaces the DSL's ``benchmark``: calls the function once, and returns counted work instead of a time."""
        if (kernel_arguments is None) == (workspace_generator is None):
            raise ValueError("give kernel_arguments or workspace_generator")
        work = kernel_arguments if workspace_generator is None else workspace_generator()
        return self.work(callable, *work.args, **work.kwargs)

    def _rank(self, callable: Any, *args: Any, **kwargs: Any) -> float:
        for name in ("warmup_iterations", "iterations", "use_cold_l2", "print_verbose", "current_stream"):
            kwargs.pop(name, None)
        return self.work(callable, *args, **kwargs)

    def work(self, callable: Any, *args: Any, **kwargs: Any) -> float:
        """Calls ``callable`` once, and returns the work that ``Runtime.counted`` gained."""
        runtime = self.session.runtime
        before = runtime.counted
        callable(*args, **kwargs)
        runtime.say(f"benchmarks run once; {NO_TIME}")
        return runtime.counted - before
