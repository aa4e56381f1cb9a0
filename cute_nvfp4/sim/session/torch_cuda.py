"""``torch.cuda`` in a session: devices, streams, events, graphs, memory and random state; the rest is refused."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from cute_nvfp4.errors import TargetError
from cute_nvfp4.sim.session.patches import Patches
from cute_nvfp4.sim.session.runtime import Runtime
from cute_nvfp4.sim.session.torch_device import CudaMode
from cute_nvfp4.sim.session.torch_types import device_type, generator_type, profile_type, stream_context_type


class TorchCuda:
    """The replacements in the module ``torch.cuda``; ``streams`` is the stack of torch's current streams."""

    def __init__(self, runtime: Runtime, mode: CudaMode) -> None:
        self.runtime, self.mode = runtime, mode
        runtime.streams.stream = lambda: self.streams[-1].cuda_stream
        self.stream_type, self.event_type = _stream_type(runtime, self), _event_type(runtime, self)
        self.default = self.stream_type(handle=0)
        self.streams = [self.default]

    def install(self, patches: Patches) -> None:
        for name, value in (self._devices() | self._streams() | self._memory() | self._random()).items():
            patches.set(torch.cuda, name, value)
        patches.set(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patches.set(torch, "Generator", generator_type())
        patches.set(torch.profiler, "profile", profile_type())
        patches.set(torch, "from_dlpack", self._from_dlpack(torch.from_dlpack))
        patches.set(torch.utils.dlpack, "from_dlpack", self._from_dlpack(torch.utils.dlpack.from_dlpack))

    def _set_device(self, device: Any) -> None:
        if device is not None and not (isinstance(device, int) and device < 0):
            self.mode.current = self.runtime.current = self.mode.ordinal(device)

    def _devices(self) -> dict[str, Any]:
        device, on_device = self.runtime.device, device_type(self.mode, self._set_device)
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "_lazy_init": _refuse_unknown,
            "device_count": lambda: self.mode.count,
            "current_device": lambda: self.mode.current,
            "set_device": self._set_device,
            "device": on_device,
            "device_of": lambda tensor: on_device(tensor.get_device() if tensor.is_cuda else None),
            "get_device_name": lambda d=None: device.name,
            "get_device_capability": lambda d=None: device.capability,
            "get_device_properties": lambda d=None: self._properties(),
            "get_arch_list": lambda: [device.arch],
            "is_bf16_supported": lambda *a, **k: True,
            "can_device_access_peer": lambda a, b: a != b,
            "cudart": lambda: SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
            "nvtx": SimpleNamespace(
                range_push=lambda text: 0, range_pop=lambda: 0, mark=lambda text: None, range=_no_context
            ),
            "CUDAGraph": _graph_type(self.runtime, self),
            "graph": self._capture,
            "make_graphed_callables": _refusal("torch.cuda.make_graphed_callables"),
        }

    @contextlib.contextmanager
    def _capture(self, graph: Any, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
        """Replaces ``torch.cuda.graph``: records launches on the stream."""
        stream = stream or self.stream_type()
        self.runtime.order.synchronize()  # as torch does
        self.runtime.begin_capture(stream.cuda_stream)
        try:
            with stream:
                yield
        finally:
            graph.handle = self.runtime.end_capture(stream.cuda_stream)

    def _properties(self) -> SimpleNamespace:
        device = self.runtime.device
        return SimpleNamespace(
            name=device.name,
            major=device.capability[0],
            minor=device.capability[1],
            total_memory=device.memory_bytes,
            multi_processor_count=device.sm_count,
            L2_cache_size=device.l2_bytes,
            warp_size=32,
            max_threads_per_block=1024,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=48 * 1024,
            shared_memory_per_block_optin=device.shared_bytes,
            shared_memory_per_multiprocessor=device.shared_bytes + 1024,
            is_integrated=0,
            is_multi_gpu_board=0,
        )

    def _streams(self) -> dict[str, Any]:
        on_stream = stream_context_type(self.streams)
        return {
            "Stream": self.stream_type,
            "ExternalStream": lambda pointer, device=None: self.stream_type(handle=int(pointer)),
            "Event": self.event_type,
            "synchronize": lambda device=None: self.runtime.order.synchronize(),
            "_sleep": lambda cycles: None,
            "current_stream": lambda device=None: self.streams[-1],
            "default_stream": lambda device=None: self.default,
            "stream": on_stream,
            "set_stream": self._set_stream,
            "StreamContext": on_stream,
            "is_current_stream_capturing": lambda: self.streams[-1].cuda_stream in self.runtime.captures,
        }

    def _set_stream(self, stream: Any) -> None:
        if stream is not None:
            self.streams[-1] = stream

    def _memory(self) -> dict[str, Any]:
        used, total = self.runtime.memory.used, self.runtime.device.memory_bytes
        return {
            "empty_cache": lambda: self.runtime.memory.forget_dead(),
            "ipc_collect": lambda: None,
            "mem_get_info": lambda device=None: (total - used(), total),
            **{
                f"{most}memory_{how}": lambda device=None: used()
                for most in ("", "max_")
                for how in ("allocated", "reserved")
            },
            **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), lambda device=None: None),
            "memory_stats": lambda device=None: {},
        }

    def _random(self) -> dict[str, Any]:
        """Returns the functions of random state. CUDA shares the CPU's generator, so values differ from a GPU's."""
        generator = torch.default_generator
        return {
            **dict.fromkeys(("manual_seed", "manual_seed_all"), lambda seed: generator.manual_seed(int(seed))),
            **dict.fromkeys(("seed", "seed_all"), generator.seed),
            "initial_seed": generator.initial_seed,
            "get_rng_state": lambda device="cuda": generator.get_state(),
            "get_rng_state_all": lambda: [generator.get_state()],
            "set_rng_state": lambda state, device="cuda": generator.set_state(state),
            "set_rng_state_all": lambda states: generator.set_state(states[0]),
        }

    def _from_dlpack(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``original`` extended to CUDA tensors of the session, whose memory the result shares."""

        def from_dlpack(source: Any, *args: Any, **kwargs: Any) -> Any:
            where = source.__dlpack_device__() if hasattr(source, "__dlpack_device__") else (1, 0)
            if int(where[0]) != 2:
                return original(source, *args, **kwargs)
            if isinstance(source, torch.Tensor):
                return source.detach()
            raise TargetError("from_dlpack of CUDA memory that is not a torch tensor is not modelled in a session")

        return from_dlpack


def _stream_type(runtime: Runtime, owner: TorchCuda) -> type:
    class Stream:
        """A stream, non-blocking if it is new. Its work is done at once; ``Order`` tracks its order with others."""

        def __init__(self, device: Any = None, priority: int = 0, *, handle: int | None = None, **_: Any) -> None:
            self.cuda_stream = runtime.handle() if handle is None else handle
            self.priority = priority
            self.device = torch.device("cuda", owner.mode.ordinal(device))

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.cuda_stream

        def synchronize(self) -> None:
            runtime.order.synchronize(self.cuda_stream)

        def wait_stream(self, stream: Any) -> None:
            runtime.wait_stream(self.cuda_stream, stream.cuda_stream)

        def wait_event(self, event: Any) -> None:
            runtime.wait(self.cuda_stream, event.cuda_event)

        def query(self) -> bool:
            self.synchronize()  # True tells the host that all work is done
            return True

        def record_event(self, event: Any = None) -> Any:
            event = event or owner.event_type()
            event.record(self)
            return event

        def __enter__(self) -> Any:
            owner.streams.append(self)
            return self

        def __exit__(self, *_: Any) -> None:
            owner.streams.pop()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

        def __hash__(self) -> int:
            return hash(self.cuda_stream)

    return Stream


def _event_type(runtime: Runtime, owner: TorchCuda) -> type:
    class Event:
        """An event. The time between two events is counted work."""

        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            self.cuda_event, self._timed, self._recorded = runtime.handle(), enable_timing, False

        def record(self, stream: Any = None) -> None:
            self._recorded = True
            runtime.record(self.cuda_event, (stream or owner.streams[-1]).cuda_stream)

        def elapsed_time(self, end: Any) -> float:
            if not (self._timed and end._timed):
                raise ValueError("both events must be made with enable_timing=True")
            if not (self._recorded and end._recorded):
                raise ValueError("both events must be recorded before the time between them is asked for")
            return runtime.elapsed(self.cuda_event, end.cuda_event)

        def synchronize(self) -> None:
            runtime.order.synchronize_event(self.cuda_event)

        def wait(self, stream: Any = None) -> None:
            runtime.wait((stream or owner.streams[-1]).cuda_stream, self.cuda_event)

        def query(self) -> bool:
            self.synchronize()  # True tells the host that all work is done
            return True

    return Event


def _graph_type(runtime: Runtime, owner: TorchCuda) -> type:
    class CUDAGraph:
        """The launches that ``torch.cuda.graph`` recorded."""

        def __init__(self, keep_graph: bool = False) -> None:
            self.handle: int | None = None

        def replay(self) -> None:
            if self.handle is None:
                raise RuntimeError("the graph has not been captured")
            graph = self.handle
            runtime.submit(owner.streams[-1].cuda_stream, lambda at: runtime.replay(graph, at))

        def reset(self) -> None:
            self.handle = None

        def pool(self) -> tuple[int, int]:
            return 0, 0

    return CUDAGraph


@contextlib.contextmanager
def _no_context(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise TargetError(f"{name} is not modelled in a simulated session: torch's own work cannot be captured there")

    return refuse


def _refuse_unknown() -> None:
    name = sys._getframe(1).f_code.co_name
    raise TargetError(f"torch.cuda.{name} is not modelled in a simulated session")
