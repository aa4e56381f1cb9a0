"""Times ``dequantize`` and the packing of weights on this machine's GPU: ``python benchmarks/decode.py``.

It times every format at 8192 × 8192, and NVFP4 with fewer rows too, after a check of every bit against torch's
definition. The floor is the time of a device copy of the bytes that the call reads and writes, plus an empty launch;
the same run measures both. Calls are CUDA graphs that take turns, L2 cold and clean; times include the launch and are
medians with quartiles.

Exit codes: 0 done, 1 a result is wrong, 2 no CUDA device, or one that no kernel is written for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import Captured, capture, gpu_target, machine, results_path, take_turns, write

from cute_nvfp4 import BlockScaledTensor, dequantize, prepare_weight, quantize
from cute_nvfp4.harness.timing import ColdL2, copy_bandwidth

SIZE = 8192
CASES = [("nvfp4", m, dtype) for m in (32, 128, 512, SIZE) for dtype in (torch.float16,)]
CASES += [("nvfp4", SIZE, torch.bfloat16), ("nvfp4", SIZE, torch.float32)]
CASES += [(name, SIZE, torch.bfloat16) for name in ("mxfp4", "mxfp8", "mxfp8_e5m2")]
PACKED = (("nvfp4", torch.bfloat16), ("nvfp4", torch.float16))


class Contestant(NamedTuple):
    """A call, the result that it must give bit for bit, and the bytes that it reads and writes, each counted once."""

    name: str
    call: Captured
    expected: torch.Tensor
    bytes: int


def contestants() -> Iterator[Contestant]:
    for format, m, dtype in CASES:
        x = operand(format, m)
        moved = stored_bytes(x) + m * SIZE * dtype.itemsize
        call = capture(lambda x=x, dtype=dtype: dequantize(x, dtype))
        yield Contestant(f"dequantize {format} {m} {str(dtype)[6:]}", call, x.dequantize(dtype), moved)
    for format, dtype in PACKED:
        x = operand(format, SIZE)
        call = capture(lambda x=x, dtype=dtype: prepare_weight(x, dtype=dtype).packed)
        expected = prepare_weight(x, dtype=dtype, backend="reference").packed
        yield Contestant(
            f"prepare_weight {format} {str(dtype)[6:]}", call, expected, stored_bytes(x) + expected.numel()
        )


def stored_bytes(x: BlockScaledTensor) -> int:
    """Bytes of the codes and the scales."""
    return x.data.numel() + x.rows * x.format.scale_columns(x.k)


def operand(format: str, rows: int) -> BlockScaledTensor:
    x = torch.randn(rows, SIZE, device="cuda", generator=torch.Generator("cuda").manual_seed(rows))
    return quantize(x, format, global_scale=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/decode_<gpu>.json)")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    gpu_target()
    copy = copy_bandwidth()
    nothing = torch.zeros(1, device="cuda")
    calls, rows = {"launch": capture(lambda: nothing.zero_())}, []
    for name, call, expected, moved in contestants():
        call.graph.replay()
        if not torch.equal(call.result, expected):
            print(f"{name}: the bits differ from torch's", file=sys.stderr)
            return 1
        calls[name] = call
        rows.append({"name": name, "k": SIZE, "bytes": moved})
    times = take_turns(calls, options.rounds, ColdL2())
    launch = statistics.median(times.pop("launch"))
    record = machine() | {"copy_bytes_s": copy, "launch_us": launch, "rows": rows}
    print(f"{record['gpu']}, {record['date']}: copy {copy / 1e12:.2f} TB/s, smallest kernel {launch:.1f} us")
    for row, (name, found) in zip(rows, times.items()):
        low, middle, high = statistics.quantiles(found, n=4)
        row |= {"us": middle, "quartiles": [low, high], "floor_us": row["bytes"] / copy * 1e6 + launch}
        print(f"{name:>34} {middle:7.1f} us ({low:.1f} to {high:.1f}), floor {row['floor_us']:6.1f}", flush=True)
    write(record, options.output or results_path("decode"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
