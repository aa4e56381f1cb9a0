"""NVIDIA's CuTe DSL examples as launches of ``timing.py``. They run from a copy of CUTLASS; nothing of it is kept here.

``CUTLASS_EXAMPLES`` is the folder ``examples/python/CuTeDSL`` of a clone of github.com/NVIDIA/cutlass. An example makes
its operands and compiles its kernel as always; what it would pass to ``testing.benchmark`` is the launch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cutlass
import cutlass.cute.testing
import cutlass.testing
import torch

FP16, BF16, FP32, FP8 = cutlass.Float16, cutlass.BFloat16, cutlass.Float32, cutlass.Float8E4M3FN
_MAJORS = {"a_major": "k", "b_major": "k", "c_major": "n"}
_HALF = {"a_dtype": FP16, "b_dtype": FP16, "c_dtype": FP16, "acc_dtype": FP32, **_MAJORS}
_ONCE = {"warmup_iterations": 0, "iterations": 1, "skip_ref_check": True}
_HOPPER, _AMPERE = "cute/hopper/kernel", "cute/ampere/kernel"
_FMHA = {
    **{"in_dtype": FP16, "out_dtype": FP16, "qk_acc_dtype": FP32, "pv_acc_dtype": FP32, "mma_tiler_mn": (64, 128)},
    **{"is_persistent": False, "bottom_right_align": False, "scale_q": 1.0, "scale_k": 1.0, "scale_v": 1.0},
    **{"inv_scale_o": 1.0, "scale_softmax": 0.0, "window_size": (-1, -1), "tolerance": 0.1},
}


def launch_of(example: str, sizes: tuple[int, ...]) -> Callable[[], object]:
    """The launch that an example times, its operands made on "cuda"."""
    path, function, arguments = EXAMPLES[example](*sizes)
    return _launch_of(path, function, {**arguments, **_ONCE})


EXAMPLES: dict[str, Callable[..., tuple[str, str, dict[str, Any]]]] = {
    "add": lambda m, n: (
        f"{_AMPERE}/elementwise/elementwise_add.py", "run_elementwise_add",
        {"M": m, "N": n, "dtype": FP32, "is_a_dynamic_layout": True, "is_b_dynamic_layout": True,
         "is_result_dynamic_layout": True, "benchmark": True},
    ),
    "add_fp16": lambda m, n: (
        f"{_AMPERE}/elementwise/elementwise_add.py", "run_elementwise_add",
        {"M": m, "N": n, "dtype": FP16, "is_a_dynamic_layout": True, "is_b_dynamic_layout": True,
         "is_result_dynamic_layout": True, "benchmark": True},
    ),
    "layer_norm": lambda m, n: (
        f"{_HOPPER}/cta_norm/cta_norm.py", "run_layernorm",
        {"M": m, "N": n, "threads_per_cta": None, "norm_type": "layer", "dtype": FP16, "benchmark": True},
    ),
    "rms_norm": lambda m, n: (
        f"{_HOPPER}/cta_norm/cta_norm.py", "run_layernorm",
        {"M": m, "N": n, "threads_per_cta": None, "norm_type": "rms", "dtype": FP16, "benchmark": True},
    ),
    "sgemm": lambda m, n, k: (
        f"{_AMPERE}/dense_gemm/sgemm.py", "run", {"mnk": (m, n, k), "a_major": "m", "b_major": "n", "c_major": "n"},
    ),
    "tensorop_gemm": lambda m, n, k: (
        f"{_AMPERE}/dense_gemm/tensorop_gemm.py", "run",
        {"mnkl": (m, n, k, 1), "ab_dtype": FP16, "c_dtype": FP16, "acc_dtype": FP32, "a_major": "k", "b_major": "k",
         "c_major": "n", "atom_layout_mnk": (2, 2, 1), "benchmark": "default"},
    ),
    "flash_attention_v2": lambda batch, sequence, heads, dim: (
        f"{_AMPERE}/attention/flash_attention_v2.py", "run",
        {"dtype": BF16, "batch_size": batch, "seqlen_q": sequence, "seqlen_k": sequence, "num_head": heads,
         "head_dim": dim, "softmax_scale": 0.5, "m_block_size": 128, "n_block_size": 64, "num_threads": 128},
    ),
    "wgmma_gemm": lambda m, n, k: (
        f"{_HOPPER}/dense_gemm/dense_gemm.py", "run",
        {"mnkl": (m, n, k, 1), **_HALF, "tile_shape_mn": (128, 128), "cluster_shape_mn": (1, 1), "tolerance": 0.1},
    ),
    "wgmma_gemm_cluster": lambda m, n, k: (
        f"{_HOPPER}/dense_gemm/dense_gemm.py", "run",
        {"mnkl": (m, n, k, 1), **_HALF, "tile_shape_mn": (128, 128), "cluster_shape_mn": (2, 1), "tolerance": 0.1},
    ),
    "wgmma_gemm_persistent": lambda m, n, k: (
        f"{_HOPPER}/dense_gemm/dense_gemm_persistent.py", "run",
        {"mnkl": (m, n, k, 1), **_HALF, "tile_shape_mn": (128, 256), "cluster_shape_mn": (1, 1)},
    ),
    "fp8_gemm_2xacc": lambda m, n, k: (
        f"{_HOPPER}/dense_gemm/dense_gemm_fp8_2xacc.py", "run",
        {"mnkl": (m, n, k, 1), "c_dtype": BF16, "tile_shape_mn": (128, 128), "cluster_shape_mn": (1, 1)},
    ),
    "grouped_gemm": lambda groups, m, n, k: (
        f"{_HOPPER}/grouped_gemm/grouped_gemm.py", "run",
        {"num_groups": groups, "problem_sizes_mnkl": [(m, n, k, 1)] * groups, **_HALF, "tile_shape_mn": (128, 128),
         "cluster_shape_mn": (1, 1)},
    ),
    "fmha": lambda batch, sequence, heads, dim: (
        f"{_HOPPER}/attention/fmha.py", "run",
        {"q_shape": (batch, sequence, heads, dim), "k_shape": (batch, sequence, heads, dim), **_FMHA,
         "is_causal": False},
    ),
    "fmha_causal": lambda batch, sequence, heads, dim: (
        f"{_HOPPER}/attention/fmha.py", "run",
        {"q_shape": (batch, sequence, heads, dim), "k_shape": (batch, sequence, heads, dim), **_FMHA,
         "is_causal": True},
    ),
}  # fmt: skip
"""File, function and arguments of each example, by its sizes."""


def _launch_of(path: str, function: str, arguments: dict[str, Any]) -> Callable[[], object]:
    found: list[Callable[[], object]] = []

    def benchmark(callable_: Callable, *, kernel_arguments: Any = None, workspace_generator: Any = None, **_: Any):
        given = kernel_arguments if workspace_generator is None else workspace_generator()
        found.append(lambda: callable_(*given.args, **given.kwargs))
        return 1.0

    module = _module(path)
    with contextlib.ExitStack() as stack:
        for place in (cutlass.testing, cutlass.cute.testing):
            stack.enter_context(mock.patch.object(place, "benchmark", benchmark))
        # use one stream for everything, so that events around the launch are on the launch's stream
        stream = torch.cuda.default_stream()
        stack.enter_context(mock.patch.object(torch.cuda, "Stream", lambda *a, **k: stream))
        stack.enter_context(quiet())
        getattr(module, function)(**arguments)
    if not found:
        raise RuntimeError(f"{path} timed {len(found)} functions, expected one at least")
    return found[0]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within this block an example prints nothing."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        yield


def _module(path: str) -> Any:
    root = os.environ.get("CUTLASS_EXAMPLES")
    if not root or not (Path(root) / path).is_file():
        raise FileNotFoundError(f"CUTLASS_EXAMPLES: got {root!r}, expected a folder with {path}")
    name = "example_" + Path(path).stem
    if name not in sys.modules:
        sys.path += [root, str((Path(root) / path).parent)]
        spec = importlib.util.spec_from_file_location(name, Path(root) / path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
