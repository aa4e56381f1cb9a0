"""CuTe DSL kernels for block-scaled 4-bit floating point, proved without the GPU they target.

The public names are imported on first use, so that ``import cute_nvfp4`` costs milliseconds and
``cute_nvfp4.formats`` needs neither the CuTe DSL nor a GPU.
"""

import sys

if sys.argv[0] == "-m" and sys.path and any(word.partition(".")[0] == "cute_nvfp4" for word in sys.orig_argv):
    # ``python -m cute_nvfp4…`` judges files in the current folder, so it must import nothing from there
    del sys.path[0]

from .lazy import lazy_names

__version__ = "0.1.0"

_PUBLIC = {
    "BlockScaledTensor": "operand",
    "Format": "formats",
    "GroupedRows": "grouped_rows",
    "Hadamard": "quantization.hadamard",
    "MXFP4": "formats",
    "MXFP8": "formats",
    "MXFP8_E5M2": "formats",
    "NVFP4": "formats",
    "PreparedWeight": "prepared_weight",
    "NVFP4Linear": "nn.linear",
    "RowScaledTensor": "row_scaled",
    "dequantize": "ops.dequantize",
    "explain_backend": "ops.quantize",
    "export": "ops.export",
    "from_blocked": "scale_layout",
    "gated_gemm": "ops.gated_gemm",
    "gemm": "ops.gemm",
    "gemv": "ops.gemv",
    "grouped_gemm": "ops.grouped_gemm",
    "grouped_gemm_contiguous": "ops.grouped_gemm_contiguous",
    "interleave": "ops.gated_gemm",
    "load_exported": "runtime.exported",
    "load_ipython_extension": "display.magic",
    "moe": "ops.moe.layer",
    "prepare": "ops.prepare",
    "prepare_experts": "ops.moe.experts",
    "prepare_weight": "ops.prepare_weight",
    "quantize": "ops.quantize",
    "quantize_model": "nn.whole_model",
    "rmsnorm_quantize": "ops.rmsnorm_quantize",
    "route": "ops.moe.route",
    "show": "display.showing",
    "silu_mul_quantize": "ops.silu_mul_quantize",
    "simulating": "runtime.simulating",
    "tensor_amax": "ops.quantize",
    "to_blocked": "scale_layout",
}

__all__ = sorted([*_PUBLIC, "__version__"])
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)

if (_shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()) is not None:
    from .display.registered import register  # notebooks show results, hazards and plans as pictures

    register(_shell)
