"""The kernels that ``ptx_fingerprints`` compiles: several of each kind and architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace


def _gemms() -> Iterator[tuple[str, Callable]]:
    from cute_nvfp4.kernels.gemm.config import GemmConfig
    from cute_nvfp4.ops.gated_gemm import compile_gated_gemm
    from cute_nvfp4.ops.gemm import compile_gemm
    from cute_nvfp4.target import ARCHITECTURES

    base = GemmConfig()
    plain = {
        "default": {},
        "sm_103a": {"arch": ARCHITECTURES["sm_103a"]},
        "sm_120a": {"arch": ARCHITECTURES["sm_120a"], "store": "direct"},
        "sm_120a stream_k": {
            "arch": ARCHITECTURES["sm_120a"],
            "store": "direct",
            "scheduler": "stream_k",
            "out": "bfloat16",
        },
        "sm_120a n64 mxfp8": {
            **{"arch": ARCHITECTURES["sm_120a"], "store": "direct", "tile_n": 64, "bias": "n", "raster": "n"},
            **{"a_format": "mxfp8", "b_format": "mxfp8_e5m2", "out": "float32"},
        },
        **{f"n{n}": {"tile_n": n} for n in (64, 192, 256)},
        "pair": {"pair": True, "cluster": (2, 1)},
        "pair n256 f32": {"pair": True, "cluster": (2, 1), "tile_n": 256, "out": "float32"},
        "pair n64": {"pair": True, "cluster": (2, 1), "tile_n": 64},
        "pair cluster 4x2": {"pair": True, "cluster": (4, 2), "raster": "n"},
        "cluster 2x2": {"cluster": (2, 2), "out": "bfloat16"},
        "cluster 1x4": {"cluster": (1, 4), "tile_n": 192},
        "split 2": {"split_k": 2},
        "split 8": {"split_k": 8, "out": "float32"},
        "pair split 4": {"pair": True, "cluster": (2, 1), "split_k": 4},
        "stream_k": {"scheduler": "stream_k"},
        "pair stream_k": {"pair": True, "cluster": (2, 1), "scheduler": "stream_k", "out": "float32"},
        "raster n": {"raster": "n"},
        "stages 3 acc 1": {"stages": 3, "acc_stages": 1},
        "m-major": {"out_major": "m", "store": "direct"},
        "direct unaligned": {"store": "direct", "vector": False},
        "direct": {"store": "direct", "out": "bfloat16"},
        "bias n": {"bias": "n", "bias_dtype": "bfloat16", "factors": 3},
        "bias m": {"bias": "m", "bias_dtype": "float16", "factors": 1, "out_major": "m", "store": "direct"},
        "mxfp4": {"a_format": "mxfp4", "b_format": "mxfp4"},
        "mxfp8": {"a_format": "mxfp8", "b_format": "mxfp8"},
        "mxfp8 mixed pair": {"a_format": "mxfp8", "b_format": "mxfp8_e5m2", "pair": True, "cluster": (2, 1)},
    }
    for name, fields in plain.items():
        yield f"gemm {name}", lambda fields=fields: compile_gemm(replace(base, **fields))
    two = replace(base, products=2, gate="silu", factors=2)
    gated = {
        "silu": {},
        "gelu_tanh pair": {"gate": "gelu_tanh", "pair": True, "cluster": (2, 1)},
        "gelu_erf n64": {"gate": "gelu_erf", "tile_n": 64},
        "relu n192": {"gate": "relu", "tile_n": 192, "acc_stages": 1},
        "identity shared b": {"gate": "identity", "shared": "b", "out_major": "m", "store": "direct"},
        "interleaved": {"interleaved": True, "tile_n": 64},
        "quantized": {"out": "nvfp4", "store": "direct"},
        "split 2": {"split_k": 2},
        "stream_k": {"scheduler": "stream_k"},
    }
    for name, fields in gated.items():
        yield f"gated_gemm {name}", lambda fields=fields: compile_gated_gemm(replace(two, **fields))


def _grouped() -> Iterator[tuple[str, Callable]]:
    from cute_nvfp4.kernels.gemm.grouped_config import GroupedConfig
    from cute_nvfp4.ops.grouped_launch import compile_grouped_gemm

    configs = {
        "parameters": GroupedConfig(slots=4, factors=2),
        "parameters pair": GroupedConfig(slots=8, pair=True, cluster=(2, 1)),
        "parameters split 2": GroupedConfig(slots=2, split_k=2, raster="n"),
        "workspace": GroupedConfig(maps="workspace"),
        "workspace 128": GroupedConfig(maps="workspace", capacity=128, cluster=(1, 2), out="float32"),
        "shared a": GroupedConfig(maps="shared", ragged="a", factors=1),
        "shared b 64": GroupedConfig(maps="shared", ragged="b", capacity=64, out_major="m"),
    }
    for name, config in configs.items():
        yield f"grouped_gemm {name}", lambda config=config: compile_grouped_gemm(config)


def _packed_groups() -> Iterator[tuple[str, Callable]]:
    from cute_nvfp4.formats import NVFP4
    from cute_nvfp4.kernels.dequantize.config import GroupRowsConfig
    from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig
    from cute_nvfp4.ops.prepared_weight.rows import KERNEL
    from cute_nvfp4.target import ARCHITECTURES

    sm90, sm120 = ARCHITECTURES["sm_90a"], ARCHITECTURES["sm_120a"]
    decoded = GroupRowsConfig(NVFP4, "float16", "blocked", False, sm90, "fragments")
    plain = {"packing": "nvfp4_rows", "dtype": "float16", "out": "float16", "batched": True, "first": decoded}
    configs = {
        "plain stack": GroupedWgmmaConfig(tile_n=64, factors=2, **plain),
        "sm_120a rows": GroupedWgmmaConfig(arch=sm120, tile_n=64, factors=2),
        "rows": GroupedWgmmaConfig(tile_n=64, ctas_per_sm=2, factors=2),
        "rows gated": GroupedWgmmaConfig(tile_n=16, gate="silu"),
        "parameters": GroupedWgmmaConfig(maps="parameters", slots=4),
        "workspace": GroupedWgmmaConfig(maps="workspace", capacity=64, tile_n=8, out="float32", vector=False),
        "rows fp8": GroupedWgmmaConfig(dtype="float8_e4m3fn", tile_n=128, factors=1),
        "workspace fp8": GroupedWgmmaConfig(dtype="float8_e4m3fn", maps="workspace", tile_n=64, promoted=True),
    }
    for name, config in configs.items():
        yield f"grouped_wgmma {name}", lambda config=config: KERNEL.compile(config)


def _experts() -> Iterator[tuple[str, Callable]]:
    from cute_nvfp4.kernels.gemm.packed.grouped_stream_config import GroupedStreamConfig
    from cute_nvfp4.kernels.gemm.routed_config import RoutedConfig
    from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig
    from cute_nvfp4.kernels.moe.config import RouteConfig
    from cute_nvfp4.kernels.moe.summed_config import SummedConfig
    from cute_nvfp4.ops.moe import route, summed
    from cute_nvfp4.ops.prepared_weight.rows import ROUTED, STREAM_GROUPS
    from cute_nvfp4.target import ARCHITECTURES

    sm90 = ARCHITECTURES["sm_90a"]
    first, clamped = RoutedConfig(gathered=True), {"activation": "clamped_swiglu", "constants": (1.702, 7.0)}
    second = RoutedConfig(weighted="float32", biased=True)
    tiles = {
        "first": GroupedWgmmaConfig(tile_n=64, gate="silu", routed=first),
        "first fp8": GroupedWgmmaConfig(tile_n=80, gate="silu", dtype="float8_e4m3fn", routed=first),
        "first clamped": GroupedWgmmaConfig(tile_n=40, gate="silu", routed=replace(first, biased=True, **clamped)),
        "second": GroupedWgmmaConfig(tile_n=128, routed=second),
        "second added": GroupedWgmmaConfig(tile_n=32, routed=replace(second, added=True)),
    }
    for name, config in tiles.items():
        yield f"moe_product {name}", lambda config=config: ROUTED.compile(config)
    streams = {
        "rows": GroupedStreamConfig(routed=first, gate="silu", slabs=4, warps_m=2, warps_k=4, stage_tiles=2),
        "ids": GroupedStreamConfig(routed=second, maps="int64", columns=16, stage_tiles=2, programmatic="x"),
    }
    for name, config in streams.items():
        yield f"stream_groups {name}", lambda config=config: STREAM_GROUPS.compile(config)
    one = SummedConfig("bfloat16", "nvfp4", "int64", "float32", 8, True, True, 1, 16, 2, sm90)
    yield "moe_summed", lambda: summed.KERNEL.compile(one)
    choice = RouteConfig("bfloat16", "float32", "int64", 4, "sigmoid", True, True, sm90)
    yield "moe_route", lambda: route.KERNEL.compile(choice)


def _gemvs() -> Iterator[tuple[str, Callable]]:
    import torch

    from cute_nvfp4.ops.gemv import compile_gemv

    for arch in ("sm_90a", "sm_100a"):
        for m, k, batch, more in (
            (7168, 16384, 1, {}),
            (4096, 7168, 8, {"out_dtype": torch.bfloat16}),
            (7168, 2048, 4, {"scales": "rowmajor"}),
            (130, 272, 2, {"out_dtype": torch.float32}),
            (256, 40960, 1, {"scales": "rowmajor"}),
        ):
            words = " ".join(str(x).removeprefix("torch.") for x in (m, k, batch, *more.values()))
            yield (
                f"gemv {arch} {words}",
                lambda args=(arch, m, k, batch), more=more: compile_gemv(
                    args[0], m=args[1], k=args[2], batch=args[3], **more
                )[0],
            )


def _quantizations() -> Iterator[tuple[str, Callable]]:
    import torch

    from cute_nvfp4.ops.quantize_launch import compile_quantize
    from cute_nvfp4.quantization.rules import resolve_format, resolve_rule

    def compiled(arch: str, format: str, rule: str, **more: object) -> Callable:
        fmt = resolve_format(format)
        more = {"rows": 256, "k": 4096, **more}
        return lambda: compile_quantize(arch, fmt, resolve_rule(rule, fmt), **more)[0]

    for arch in ("sm_90a", "sm_100a"):
        for rule in ("max", "four_six_mse", "four_six_abs_max"):
            yield f"quantize {arch} nvfp4 {rule}", compiled(arch, "nvfp4", rule)
        yield f"quantize {arch} nvfp4 optimal", compiled(arch, "nvfp4", "optimal")
        yield f"quantize {arch} mxfp8 rceil", compiled(arch, "mxfp8_e4m3", "rceil", global_scale="none")
        yield f"quantize {arch} nvfp4 four_six_mae tile", compiled(arch, "nvfp4", "four_six_mae", tile=True)
    for arch, format, rule, more in (
        ("sm_100a", "mxfp4", "floor", {"global_scale": "none", "stochastic": True}),
        ("sm_100a", "mxfp8_e5m2", "even", {"global_scale": "none", "transposed": True}),
        ("sm_90a", "nvfp4", "max_normal", {"global_scale": "computed", "cluster": 0, "scale_layout": "rowmajor"}),
        ("sm_90a", "nvfp4", "max", {"global_scale": "computed", "cluster": 8, "rows": 16}),
        ("sm_100a", "nvfp4", "max", {"global_scale": "computed", "cluster": 1, "rotation": 16, "transposed": True}),
        ("sm_100a", "nvfp4", "max", {"dtype": torch.float32, "rows": 130, "k": 272}),
        ("sm_90a", "nvfp4", "static_4", {"stochastic": True, "dtype": torch.float16}),
        ("sm_100a", "nvfp4", "four_six_mse", {"rotation": 16}),
        ("sm_90a", "nvfp4", "max", {"tile": True, "transposed": True}),
        ("sm_90a", "nvfp4", "four_six_mse", {"transposed": True}),
        # large enough for one CTA a multiprocessor, and for the table of errors
        ("sm_90a", "nvfp4", "four_six_mse", {"rows": 8190, "k": 8192}),
        ("sm_90a", "nvfp4", "optimal", {"rows": 8192, "k": 8192}),
    ):
        words = " ".join(f"{k} {v}" for k, v in more.items())
        yield f"quantize {arch} {format} {rule} {words.replace('torch.', '')}", compiled(arch, format, rule, **more)


def _packed() -> Iterator[tuple[str, Callable]]:
    from cute_nvfp4.kernels.gemm.packed.stream_config import StreamConfig
    from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
    from cute_nvfp4.kernels.gemm.sm90.schedules import Helped, OverlappedSums, SharedTiles, WholeTiles
    from cute_nvfp4.ops.prepared_weight.gemm import STREAM, WGMMA
    from cute_nvfp4.target import ARCHITECTURES

    streams = {
        "m1": {"slabs": 4, "warps_m": 1, "warps_k": 8, "stage_tiles": 2, "stages": 16, "factors": 1},
        "m16 nvfp4": {"columns": 16, "dtype": "float16", "out": "float16", "quantized_x": True},
        "gated": {"slabs": 4, "warps_m": 1, "warps_k": 8, "stage_tiles": 2, "stages": 16, "factors": 1, "gate": "silu"},
        "mxfp8": {"slabs": 4, "warps_m": 1, "warps_k": 8, "stage_tiles": 2, "packing": "mxfp8"},
    }
    plain = {"packing": "nvfp4_rows", "dtype": "float16", "out": "float16", "schedule": WholeTiles()}
    wgmmas = {
        "plain": {"batched": True, "bias": "float32", **plain},
        "plain mxfp4": {"batched": True, **plain, "packing": "mxfp4_rows", "dtype": "bfloat16"},
        "plain, x decoded": {"decodes_x": True, **plain, "schedule": SharedTiles(split_k=2)},
        "n32": {"tile_n": 32, "ctas_per_sm": 2, "factors": 1},
        "n128": {"tile_n": 128, "bias": "bfloat16"},
        "n256 cluster": {"tile_n": 256, "schedule": WholeTiles(cluster_rows=2), "dtype": "float16", "out": "float16"},
        "turns": {"tile_n": 64, "warpgroups": 4, "schedule": SharedTiles(split_k=2, k_groups=2)},
        "overlap": {"schedule": OverlappedSums(), "stage_tiles": 1},
        "helped": {"tile_n": 128, "stage_tiles": 1, "schedule": Helped(split_k=2)},
        "gated 192 rows": {"tile_n": 128, "warpgroups": 3, "stage_tiles": 1, "schedule": WholeTiles(), "gate": "silu"},
        "gated n64": {"tile_n": 64, "ctas_per_sm": 2, "factors": 1, "gate": "silu"},
        "n128 mxfp8_e5m2": {"tile_n": 128, "packing": "mxfp8_e5m2"},
        "n64 mxfp8 fp16": {"tile_n": 64, "packing": "mxfp8", "dtype": "float16", "out": "float16"},
        "sm_120a n128": {"tile_n": 128, "stage_tiles": 1, "bias": "bfloat16", "arch": ARCHITECTURES["sm_120a"]},
        "sm_120a gated n64": {"tile_n": 64, "factors": 1, "gate": "silu", "arch": ARCHITECTURES["sm_120a"]},
        "gated n256": {"tile_n": 256, "schedule": WholeTiles(), "gate": "gelu_tanh", "vector": False, "out": "float32"},
    }
    for name, fields in streams.items():
        yield f"stream_gemm {name}", lambda fields=fields: STREAM.compile(StreamConfig(**fields))
    for name, fields in wgmmas.items():
        yield f"wgmma_gemm {name}", lambda fields=fields: WGMMA.compile(WgmmaConfig(**fields))


def _fused() -> Iterator[tuple[str, Callable]]:
    import torch

    from .fused_kernels import compile_rmsnorm_quantize, compile_silu_mul_quantize

    half, wide = torch.float16, torch.float32
    for name, arch, make, format, rule, more in (
        ("rmsnorm_quantize", "sm_90a", compile_rmsnorm_quantize, "nvfp4", "max", {"residual": True}),
        ("rmsnorm_quantize", "sm_100a", compile_rmsnorm_quantize, "nvfp4", "max", {"residual": True}),
        ("rmsnorm_quantize", "sm_90a", compile_rmsnorm_quantize, "nvfp4", "max", {"rows": 4096, "weight": None}),
        ("rmsnorm_quantize", "sm_100a", compile_rmsnorm_quantize, "mxfp8_e4m3", "rceil",
         {"dtype": half, "weight": wide, "values": True, "global_scale": "none", "scale_layout": "rowmajor"}),
        ("silu_mul_quantize", "sm_90a", compile_silu_mul_quantize, "nvfp4", "max", {}),
        ("silu_mul_quantize", "sm_100a", compile_silu_mul_quantize, "nvfp4", "four_six_mse", {"values": True}),
    ):  # fmt: skip
        words = " ".join(f"{k} {v}" for k, v in more.items())
        yield (
            f"{name} {arch} {format} {rule} {words.replace('torch.', '')}".rstrip(),
            lambda make=make, args=(arch, format, rule), more={"rows": 16, "k": 4096, **more}: make(*args, **more)[0],
        )


def _decoding() -> Iterator[tuple[str, Callable]]:
    from cute_nvfp4.formats import MXFP8, NVFP4
    from cute_nvfp4.kernels.dequantize.config import DequantizeConfig, GroupedDequantizeConfig
    from cute_nvfp4.kernels.pack.config import PackConfig
    from cute_nvfp4.ops.dequantize import GROUPED, KERNEL
    from cute_nvfp4.ops.prepare_weight import KERNEL as PACK
    from cute_nvfp4.target import ARCHITECTURES

    for arch, format, *rest in (
        ("sm_90a", NVFP4, "float16", "blocked", False),
        ("sm_90a", NVFP4, "float32", "rowmajor", True),
        ("sm_100a", NVFP4, "bfloat16", "blocked", True),
        ("sm_90a", MXFP8, "bfloat16", "blocked", False),
    ):
        config = DequantizeConfig(format, *rest, ARCHITECTURES[arch])
        words = " ".join(map(str, rest))
        yield f"dequantize {arch} {format.name} {words}", lambda config=config: KERNEL.compile(config)
    config = GroupedDequantizeConfig(NVFP4, "float16", "blocked", False, ARCHITECTURES["sm_90a"], 8)
    yield "grouped_dequantize sm_90a nvfp4 float16 8", lambda config=config: GROUPED.compile(config)
    for dtype, layout in (("bfloat16", "blocked"), ("float16", "rowmajor")):
        config = PackConfig(NVFP4, dtype, layout, ARCHITECTURES["sm_90a"])
        yield f"pack_weight nvfp4 {dtype} {layout}", lambda config=config: PACK.compile(config)


def configurations() -> dict[str, Callable]:
    """Functions that compile the kernels, by name."""
    return dict(
        [
            *_gemms(),
            *_grouped(),
            *_gemvs(),
            *_packed(),
            *_packed_groups(),
            *_experts(),
            *_quantizations(),
            *_fused(),
            *_decoding(),
        ]
    )
