"""Kernels and host functions for the tests of simulated sessions."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute


@cute.kernel
def double(a: cute.Tensor, b: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    b[thread] = a[thread] + a[thread]


@cute.kernel
def increment(a: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    a[thread] = a[thread] + 1.0


@cute.jit
def launch_double(a: cute.Tensor, b: cute.Tensor, stream: cuda.CUstream):
    double(a, b).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.jit
def launch_both(a: cute.Tensor, b: cute.Tensor):
    double(a, b).launch(grid=(1, 1, 1), block=(32, 1, 1))
    increment(b).launch(grid=(1, 1, 1), block=(32, 1, 1))
    double(b, a).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.jit
def host_only(n: cutlass.Int32):
    cute.printf("n is %d", n)


@cute.kernel
def speak(a: cute.Tensor, n: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    if thread == 3 or thread == 5:
        cute.printf("t%d %5.2f|%-4d|%x|%%|%lld|%c\n", thread, a[thread], n, 255, cutlass.Int64(-1) << 40, 65)


@cute.jit
def launch_speak(a: cute.Tensor, n: cutlass.Int32):
    speak(a, n).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.kernel
def scale_pointer(p: cute.Pointer, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    a = cute.make_tensor(p, cute.make_layout(32))
    a[thread] = a[thread] * factor


@cute.jit
def launch_scale_pointer(p: cute.Pointer, factor: cutlass.Float32):
    scale_pointer(p, factor).launch(grid=(1, 1, 1), block=(32, 1, 1))
