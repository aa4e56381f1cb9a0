"""The configurations that ModelOpt and compressed-tensors write into a checkpoint's ``config.json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cute_nvfp4.formats import NVFP4, Format

_FORMATS = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}


def modelopt_config(ignore: Sequence[str], quantizes_inputs: bool, *, awq: bool = False) -> dict[str, Any]:
    """The dict that ModelOpt's exporter writes.

    ignore: the names of linear layers that are not quantized. awq: whether layers scale inputs (``pre_quant_scale``).
    """
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4.block}
    group: dict[str, Any] = {"weights": weights, "targets": ["Linear"]}
    if quantizes_inputs:
        group["input_activations"] = dict(weights)
    algorithm = "NVFP4" if quantizes_inputs else "W4A16_NVFP4"
    more: dict[str, Any] = {"has_zero_point": False, "pre_quant_scale": True} if awq else {}
    return more | {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4_AWQ" if awq else algorithm,
        "producer": {"name": "cute_nvfp4"},
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def compressed_tensors_config(ignore: Sequence[str], quantizes_inputs: bool, format: Format = NVFP4) -> dict[str, Any]:
    """The dict that LLM Compressor writes; arguments as in ``modelopt_config``."""
    common = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": format.block}
    if format is not NVFP4:
        common |= {"strategy": "group", "scale_dtype": "torch.uint8"}
    inputs = common | {"dynamic": "local", "observer": "minmax"} if quantizes_inputs else None
    group = {
        "targets": ["Linear"],
        "weights": common | {"dynamic": False, "observer": "minmax"},
        "input_activations": inputs,
        "output_activations": None,
        "format": _FORMATS[format.name],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[format.name],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def is_packed(config: dict[str, Any]) -> bool:
    """Whether a configuration is gpt-oss's, or one of compressed-tensors with a group of layers in NVFP4 or MXFP4."""
    if config.get("quant_method") == "mxfp4":
        return True
    groups = config.get("config_groups") or {}
    formats = [config.get("format"), *(group.get("format") for group in groups.values() if isinstance(group, dict))]
    return any(format in formats for format in _FORMATS.values())
