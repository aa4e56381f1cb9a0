"""Runs every Hopper kernel once, at small sizes, for compute-sanitizer:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck racecheck synccheck; do
        check="compute-sanitizer --tool $tool --kernel-name kns=cutlass --report-api-errors no --error-exitcode 1"
        $check python tests/gpu/sanitize.py
        $check python tests/gpu/sanitize.py --broken $tool && echo "$tool notices nothing"
    done

With this variable every tensor is a separate allocation, so that an access beyond it does not stay within torch's pool.
(API errors are not reported: a driver call may end a list with an error, which is no fault.) ``--broken`` runs a kernel
that the tool must notice (``broken.py``; ``ring`` is for racecheck). At the end the script prints how many kernels ran,
and exits with 1 if none did, or if the filter misses one.

Without a GPU the simulator runs the same launches. The tests check results; this script does not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import broken
import torch

from cute_nvfp4 import (
    GroupedRows,
    dequantize,
    gated_gemm,
    gemm,
    gemv,
    grouped_gemm,
    grouped_gemm_contiguous,
    moe,
    prepare_experts,
    prepare_weight,
    quantize,
    rmsnorm_quantize,
    route,
    silu_mul_quantize,
    simulating,
)
from cute_nvfp4.kernels.gemm.packed.grouped_stream_config import GroupedStreamConfig
from cute_nvfp4.kernels.gemm.packed.stream_config import StreamConfig
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig
from cute_nvfp4.kernels.gemm.sm90.schedules import Helped, OverlappedSums, SharedTiles, WholeTiles
from cute_nvfp4.kernels.peers.config import SLOTS
from cute_nvfp4.ops.peer_sum import PeerMemory, empty_memory, peer_sum, state_of
from cute_nvfp4.planning.packed import PackedPlan
from cute_nvfp4.runtime import driver

FILTER = "cutlass"
"""A part of the name of every kernel that the DSL compiles."""
N, K = 320, 1024


def plans() -> dict[str, PackedPlan]:
    """Plans of the WGMMA kernel: every scheduler, clusters along rows and along K, two CTAs on a multiprocessor; and
    one of the streaming kernel. Rings have so few stages that each is filled more than once."""
    static: dict[str, Any] = {"schedule": WholeTiles(), "stages": 2}
    shared = static | {"tile_n": 32, "schedule": SharedTiles(split_k=2)}
    configs: dict[str, tuple[dict[str, Any], int]] = {
        "stream_k": ({"tile_n": 64, "stages": 2}, 7),
        "static": (static | {"tile_n": 128}, 3),
        "two CTAs": ({"tile_n": 32, "ctas_per_sm": 2, "stages": 2}, 9),
        "multicast": (static | {"tile_n": 64, "schedule": WholeTiles(cluster_rows=2)}, 2),
        "turns": (
            shared | {"warpgroups": 4, "schedule": SharedTiles(split_k=2, k_groups=2), "stage_tiles": 1, "stages": 6},
            12,
        ),
        "turns, one CTA": (
            shared | {"warpgroups": 4, "schedule": SharedTiles(k_groups=2), "stage_tiles": 1, "stages": 6},
            12,
        ),
        "half tiles": (static | {"tile_n": 64, "warpgroups": 3}, 3),
        "helped": (shared | {"schedule": Helped(split_k=2)}, 14),
        "split_k": (shared, 12),
        "overlap": (shared | {"tile_n": 64, "stage_tiles": 1, "stages": 3, "schedule": OverlappedSums()}, 6),
    }
    found = {name: PackedPlan(WgmmaConfig(vector=False, **config), n) for name, (config, n) in configs.items()}
    for slabs in (4, 8):
        found[f"stream, {slabs} slabs"] = PackedPlan(StreamConfig(slabs=slabs, stages=4), 3)
    return found


def launches(device: str) -> dict[str, Callable[[], object]]:
    """Calls by name, each of one kernel."""
    torch.manual_seed(0)
    few, many = (torch.randn(m, K, device=device, dtype=torch.bfloat16) for m in (9, 100))
    w = quantize(torch.randn(N, K, device=device), backend="reference")
    weight, half = prepare_weight(w), prepare_weight(w, dtype=torch.float16)
    both = prepare_weight(w, w)
    stack = quantize(torch.randn(3, N, K, device=device), backend="reference")
    experts, pairs = prepare_weight(stack), prepare_weight(stack, stack)
    offsets = torch.tensor([0, 30, 30, 100], dtype=torch.int32, device=device)
    groups = PackedPlan(GroupedWgmmaConfig(tile_n=64, stages=2), 3)
    sixteen = PackedPlan(replace(groups.config, dtype="float16"), groups.workers)
    a, row = (quantize(x, backend="reference") for x in (few, few[:1]))
    e4m3, few8, many8 = torch.float8_e4m3fn, *(quantize(x, "fp8_e4m3") for x in (few, many))
    of_fp8 = [prepare_weight(*some, dtype=e4m3) for some in ((w,), (w, w), (stack,))]
    eight = PackedPlan(replace(groups.config, dtype="float8_e4m3fn"), groups.workers)
    wide = [quantize(torch.randn(m, 384, device=device), backend="reference") for m in (40, 200, 200)]
    batch = [quantize(torch.randn(2, m, 384, device=device), backend="reference") for m in (40, 200)]
    rows = GroupedRows.of(wide[1], [0, 140, 150, 200])
    lying = quantize(torch.randn(3, 40, 384, device=device), backend="reference")
    mx8, mx4 = (quantize(many, format, backend="reference") for format in ("mxfp8", "mxfp4"))
    tiles = {"tile_n": 64, "schedule": WholeTiles(), "stages": 2, "packing": "nvfp4_rows", "dtype": "float16"}
    in_place = PackedPlan(WgmmaConfig(decodes_x=True, **tiles), 3)
    rows_of_fp8: dict[str, Any] = {"global_scale": None, "format": "fp8_e4m3"}
    found: dict[str, Callable[[], object]] = {
        "gemv": lambda: gemv(w, row),
        "prepare_weight": lambda: prepare_weight(w),
        "dequantize": lambda: dequantize(w, torch.bfloat16),
        "gemm, 9 rows": lambda: gemm(few, weight),
        "gemm, 9 rows of NVFP4": lambda: gemm(a, half),
        "gated_gemm, 9 rows": lambda: gated_gemm(few, both),
        "gated_gemm, 100 rows": lambda: gated_gemm(many, both),
        "grouped_gemm, a list": lambda: grouped_gemm([(few, weight), (many, weight)], config=groups),
        "grouped_gemm, a list of NVFP4": lambda: grouped_gemm([(a, half), (row, half)], config=sixteen),
        "grouped_gemm_contiguous": lambda: grouped_gemm_contiguous(many, experts, offsets=offsets, config=groups),
        "grouped_gemm_contiguous, streamed": lambda: grouped_gemm_contiguous(
            many, experts, offsets=offsets, config=PackedPlan(GroupedStreamConfig(stages=4, cut_bytes=0), 7)
        ),
        "grouped_gemm_contiguous, gated": lambda: grouped_gemm_contiguous(
            many, pairs, offsets=offsets, gate="silu", config=groups
        ),
        "W4A8, x in 16 bits": lambda: gemm(many, of_fp8[0]),
        "W4A8, gated": lambda: gated_gemm(many8, of_fp8[1]),
        "W4A8, a list": lambda: grouped_gemm([(few8, of_fp8[0]), (many8, of_fp8[0])], config=eight),
        "W4A8, contiguous": lambda: grouped_gemm_contiguous(many8, of_fp8[2], offsets=offsets, config=eight),
        "W4A8, contiguous, x in 16 bits": lambda: grouped_gemm_contiguous(many, of_fp8[2], offsets=offsets),
        "plain operands, weights in rows": lambda: gemm(wide[0], wide[1]),
        "plain operands, a batch, x decoded": lambda: gemm(batch[0], batch[1], config=in_place),
        "plain operands, gated": lambda: gated_gemm(*wide),
        "plain operands, a stack": lambda: grouped_gemm_contiguous(rows, lying),
        "plain operands, MXFP4": lambda: gemm(mx8, mx4),
        "plain operands, a list": lambda: grouped_gemm([wide[:2], wide[:2]]),
        **layers(device),
        "peer_sum": sums_of_peers(device),
        "route": lambda: route(many[:, :40], 4),
        "route, corrected": lambda: route(many[:, :300], 8, scoring="sigmoid", correction=many[0, :300].float()),
        "rmsnorm_quantize": lambda: rmsnorm_quantize(many, None, global_scale=None),
        "silu_mul_quantize": lambda: silu_mul_quantize(many, many, global_scale=None),
        "rmsnorm_quantize, FP8": lambda: rmsnorm_quantize(many, None, residual=many, **rows_of_fp8),
        "silu_mul_quantize, FP8": lambda: silu_mul_quantize(many, many, **rows_of_fp8),
    }
    for rule in ("max", "four_six_mse", "optimal"):
        found[f"quantize, {rule}"] = lambda rule=rule: quantize(many, rule=rule)
    for name, plan in plans().items():
        x = few if plan.streams else many
        found[f"gemm, {name}"] = lambda plan=plan, x=x: gemm(x, weight, config=plan, out_dtype=torch.float32)
    return found


def layers(device: str) -> dict[str, Callable[[], object]]:
    """Small mixtures of experts, with SwiGLU and with gpt-oss's activation, some ids out of range: with products of
    tiles, of few rows, and of FP8."""
    top, experts, hidden, inner = 3, 5, 160, 96
    pair = [torch.randn(experts, n, k, device=device) for n, k in ((2 * inner, hidden), (hidden, inner))]
    biases = {"gate_up_bias": torch.randn(pair[0].shape[:2]), "down_bias": torch.randn(pair[1].shape[:2])}
    biases = {name: x.to(device) for name, x in biases.items()}
    found: dict[str, Callable[[], object]] = {}
    for format, options in (("nvfp4", {}), ("mxfp4", {"activation": "clamped_swiglu", **biases})):
        quantized = [quantize(w, format, backend="reference") for w in pair]
        for tokens, dtype in (
            (40, torch.bfloat16),
            (20, torch.bfloat16),
            (5, torch.bfloat16),
            (1, torch.bfloat16),
            (20, torch.float8_e4m3fn),
        ):
            prepared = prepare_experts(*quantized, dtype=dtype, **options)
            given = (
                torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16),
                torch.randint(-1, experts + 1, (tokens, top), device=device),
                torch.rand(tokens, top, device=device),
                prepared,
            )
            for deterministic in (True, False):
                words = f"moe, {format}, {tokens} tokens, {dtype}, deterministic={deterministic}"
                found[words] = lambda given=given, kind=deterministic: moe(*given, deterministic=kind)
    return found


def sums_of_peers(device: str) -> Callable[[], object]:
    """Five calls of one of two ranks, which use all slots and start over; the other rank's rows are there in
    advance."""
    elements, ranks = 1000 * 8, 2
    made = [
        empty_memory(elements, ranks, lambda *size: torch.empty(*size, dtype=torch.bfloat16, device=device))
        for _ in range(ranks)
    ]
    memory = PeerMemory(tuple(made), 0, state_of(torch.device(device)))
    y = torch.randn(elements, device=device).bfloat16()

    def run() -> None:
        for call in range(5):
            made[0][call % SLOTS, 1] = y
            assert torch.equal(peer_sum(y, memory), y + y)

    return run


def loaded() -> Counter[str]:
    """Counts the kernels that are loaded from now on, by name."""
    names: Counter[str] = Counter()
    load = driver.load

    def counted(cubin: bytes, wanted: Iterable[str], *rest: Any) -> dict[str, driver.Function]:
        wanted = tuple(wanted)
        names.update(wanted)
        return load(cubin, wanted, *rest)

    driver.load = counted
    return names


def unchecked(names: Iterable[str]) -> str:
    """Why the tool has not checked all of these kernels, which were loaded; empty if it has."""
    if not names:
        return "kernels that were loaded: got none, expected one at least; the tool has checked nothing"
    others = sorted(name for name in names if FILTER not in name)
    return f"not checked, since their names lack {FILTER}: {', '.join(others)}" if others else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--broken", choices=["memcheck", "racecheck", "synccheck", "ring"], help="run a wrong kernel instead"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only launches whose names contain TEXT")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"

    names = loaded()
    with nullcontext() if on_gpu else simulating("sm_90a"):
        if options.broken:
            broken.run(options.broken, device)
        else:
            every = launches(device)
            chosen = {name: launch for name, launch in every.items() if options.only in name}
            if not chosen:
                parser.error(f"--only: got {options.only!r}, expected a part of one of these names: {', '.join(every)}")
            for name, launch in chosen.items():
                begin = time.perf_counter()
                print(name, end="", flush=True)
                launch()
                if on_gpu:
                    torch.cuda.synchronize()
                print(f", {time.perf_counter() - begin:.1f} s", flush=True)
    if on_gpu:
        torch.cuda.synchronize()
        print(f"kernels that were loaded: {len(names)}")
        sys.exit(unchecked(names) or 0)


if __name__ == "__main__":
    main()
