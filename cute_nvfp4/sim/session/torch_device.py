"""Torch's device "cuda", served from host memory.

A ``TorchFunctionMode`` sees every call of torch's Python API. Calls run on the CPU. ``DeviceMemory`` records by storage
which tensors count as CUDA tensors, so views and in-place results need no care. A result on a new storage goes to the
device that the argument ``device`` names, else to that of the inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _device as default_device

from cute_nvfp4.errors import TargetError
from cute_nvfp4.sim.session.memory import DeviceMemory, storage_key, tensors_in
from cute_nvfp4.sim.session.torch_dispatch import CudaDispatch

_CUDA_DLPACK = 2
_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray)
_FACTORIES = default_device._device_constructors()


def as_device(value: Any) -> torch.device | None:
    """Returns ``value`` as a device if it is one or the name of one, else None."""
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        try:
            return torch.device(value)
        except RuntimeError:
            return None
    return None


class CudaMode(TorchFunctionMode):
    """A mode in which torch has CUDA devices 0 … ``count`` - 1; ``current`` is the ordinal of the current one."""

    def __init__(self, memory: DeviceMemory, dispatch: CudaDispatch, count: int = 1) -> None:
        super().__init__()
        self.memory, self.dispatch, self.count, self.current = memory, dispatch, count, 0
        tensor = torch.Tensor
        self._special: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: self._device,
            tensor.is_cuda.__get__: self._is_cuda,
            tensor.is_cpu.__get__: self._is_cpu,
            tensor.get_device: self._place,
            tensor.cuda: self._cuda,
            tensor.cpu: self._cpu,
            tensor.to: self._to,
            tensor.numpy: self._numpy,
            tensor.__array__: self._array,
            tensor.__dlpack__: self._dlpack,
            tensor.__dlpack_device__: self._dlpack_device,
            tensor.pin_memory: self._pin,
            tensor.is_pinned: lambda t, *a, **k: self.memory.is_pinned(t),
            tensor.__repr__: self._repr,
            tensor.tolist: self._tolist,
        }

    @property
    def on(self) -> bool:
        """Whether the mode sees calls at present; torch disables it in callbacks from its own functions."""
        return any(mode is self for mode in _get_current_function_mode_stack())

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        try:
            special = self._special.get(func)
        except TypeError:
            special = None
        if special is None:
            return self._call(func, args, kwargs)
        with self.dispatch.place(-1, quiet=True):  # they place results and report copies themselves
            return special(*args, **kwargs)

    def _call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        asked = target = self._requested(func, kwargs)
        pinned = bool(kwargs.pop("pin_memory", False)) if target is None or target < 0 else False
        inputs = list(tensors_in((args, kwargs)))
        if target is None:
            target = max((i for t in inputs if (i := self.memory.device_index(t)) is not None), default=-1)
        known = {storage_key(t) for t in inputs}
        if func in _FROM_HOST and target >= 0:  # no operator shows these copies
            self.dispatch.streams.begin(f"torch's {func.__name__}")
        with self.dispatch.place(asked):
            result = func(*args, **kwargs)
        if func in _FROM_HOST and target >= 0:
            self.dispatch.streams.synchronize()
        if target >= 0 or pinned:
            for tensor in tensors_in(result):
                if storage_key(tensor) not in known:
                    self.memory.adopt(tensor, max(target, 0), pinned=pinned)
        return result

    def _requested(self, func: Any, kwargs: dict) -> int | None:
        """Returns the CUDA ordinal that ``device`` names, -1 for the CPU, or None without one. Replaces a device in
        ``kwargs`` by the CPU."""
        device = kwargs.get("device")
        if device is None:
            ambient = default_device.CURRENT_DEVICE if func in _FACTORIES else None
            if ambient is None or ambient.type != "cuda":
                return None
            device = ambient
        elif isinstance(device, int) and not isinstance(device, bool):
            device = torch.device("cuda", device)
        device = as_device(device)
        if device is None or device.type not in ("cuda", "cpu"):
            return None
        kwargs["device"] = torch.device("cpu")
        return -1 if device.type == "cpu" else self.ordinal(device)

    def ordinal(self, device: torch.device | int | str | None) -> int:
        """Returns the ordinal of a CUDA device; raises ``TargetError`` if the session does not have it."""
        if isinstance(device, str):
            device = torch.device(device)
        index = device.index if isinstance(device, torch.device) else device
        index = self.current if index is None else index
        if not 0 <= index < self.count:
            raise TargetError(f"CUDA error: invalid device ordinal {index} (the session has {self.count} device(s))")
        return index

    def _device(self, tensor: torch.Tensor) -> torch.device:
        index = self.memory.device_index(tensor)
        return tensor.device if index is None else torch.device("cuda", index)

    def _place(self, tensor: torch.Tensor) -> int:
        """Returns the ordinal of the tensor's CUDA device, -1 for the CPU."""
        index = self.memory.device_index(tensor)
        return -1 if index is None else index

    def _is_cuda(self, tensor: torch.Tensor) -> bool:
        return self.memory.device_index(tensor) is not None

    def _is_cpu(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu and self.memory.device_index(tensor) is None

    def _move(self, tensor: torch.Tensor, target: int, copied: torch.Tensor, blocking: bool = True) -> torch.Tensor:
        """Puts ``copied``, to which the CPU converted ``tensor``, on CUDA device ``target`` (-1: the CPU) and returns
        it, or a copy of it where a GPU would make one; the host waits for this if it is ``blocking``."""
        place = self._place(tensor)
        if place != target and storage_key(copied) == storage_key(tensor):
            copied = copied.clone(memory_format=torch.preserve_format)
        if storage_key(copied) == storage_key(tensor) or max(place, target) < 0:
            return copied
        if target >= 0 or not blocking:  # torch copies to pinned memory if it does not wait
            self.memory.adopt(copied, max(target, 0), pinned=target < 0)
        self.dispatch.streams.worked("a copy of torch's", [tensor], [copied])
        if blocking and min(place, target) < 0:
            self.dispatch.streams.synchronize()
        return copied

    def _to_host(self, tensor: torch.Tensor) -> None:
        """Reports that the host reads ``tensor``, and waits for it if it is on a device."""
        if self.memory.device_index(tensor) is None:
            self.dispatch.streams.host_worked("torch", [tensor], [])
        else:
            self.dispatch.streams.worked("a copy of torch's", [tensor], [])
            self.dispatch.streams.synchronize()

    def _tolist(self, tensor: torch.Tensor) -> Any:
        self._to_host(tensor)
        return tensor.tolist()

    def _cuda(self, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        return self._move(tensor, self.ordinal(device), tensor.cpu(**kwargs), not non_blocking)

    def _cpu(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._move(tensor, -1, tensor.cpu(*args, **kwargs))

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target: int | None = None
        parts = list(args)
        first = parts[0] if parts else kwargs.get("other")
        if isinstance(first, torch.Tensor):
            index = self.memory.device_index(first)
            target = -1 if index is None and first.device.type == "cpu" else index
        elif isinstance(first, int) and not isinstance(first, bool):
            parts[0], target = torch.device("cpu"), self.ordinal(first)
        elif (device := as_device(first)) is not None and device.type in ("cuda", "cpu"):
            parts[0] = torch.device("cpu")
            target = -1 if device.type == "cpu" else self.ordinal(device)
        asked = self._requested(torch.Tensor.to, kwargs)
        target = asked if asked is not None else target
        result = tensor.to(*parts, **kwargs)
        if result.device.type != "cpu":
            return result
        blocking = not kwargs.get("non_blocking", next((p for p in parts if isinstance(p, bool)), False))
        return self._move(tensor, self._place(tensor) if target is None else target, result, blocking)

    def _numpy(self, tensor: torch.Tensor, *args: Any, force: bool = False) -> Any:
        self._refuse_array(tensor, force)
        self._to_host(tensor)
        return tensor.numpy(*args, force=force)

    def _array(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._refuse_array(tensor, False)
        self._to_host(tensor)
        return tensor.__array__(*args, **kwargs)

    def _refuse_array(self, tensor: torch.Tensor, force: bool) -> None:
        index = self.memory.device_index(tensor)
        if index is not None and not force:
            raise TypeError(
                f"can't convert cuda:{index} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )

    def _dlpack(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        index = self.memory.device_index(tensor)
        if index is None:
            return tensor.__dlpack__(*args, **kwargs)
        kwargs.pop("stream", None)
        capsule = tensor.__dlpack__(*args[1:], **kwargs)
        _set_capsule_device(capsule, _CUDA_DLPACK, index)
        return capsule

    def _dlpack_device(self, tensor: torch.Tensor) -> tuple[int, int]:
        index = self.memory.device_index(tensor)
        return tensor.__dlpack_device__() if index is None else (_CUDA_DLPACK, index)

    def _pin(self, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        copied = tensor.clone()
        self.memory.adopt(copied, pinned=True)
        return copied

    def _repr(self, tensor: torch.Tensor, **kwargs: Any) -> str:
        index = self.memory.device_index(tensor)
        self._to_host(tensor)
        text = torch.Tensor.__repr__(tensor, **kwargs)
        if index is None or not text.endswith(")"):
            return text
        return f"{text[:-1]}, device='cuda:{index}')"


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.py_object]


def _set_capsule_device(capsule: Any, kind: int, index: int) -> None:
    """Writes the device into a DLPack capsule, where ``DLDevice`` follows the data pointer of ``DLTensor``."""
    name = _name(capsule)
    address = _pointer(capsule, name)
    # DLManagedTensorVersioned begins with version (8 bytes), context, deleter and flags
    tensor = address + (32 if name == b"dltensor_versioned" else 0)
    device = (ctypes.c_int32 * 2).from_address(tensor + 8)
    device[0], device[1] = kind, index
