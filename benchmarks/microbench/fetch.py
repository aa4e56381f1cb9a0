"""What instruction fetch costs: straight code of many sizes, walked several times, by several warps at once or one
after the other, with the code in no cache at first.

A pass is ``size`` instructions (16 bytes each) that could issue one a cycle. ``apart`` warps of one scheduler start one
after the other, so that they are at different places of the code; the others start together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SIZES = (64, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)
PASSES, LINK = 4, 32
JUMPS = (1024, 4096)
_FMA = "".join(f"fma.rn.f32 %{j}, %{j}, %4, %4;" for j in range(4))


def _block(count: int) -> str:
    """``count`` instructions in chains of four."""
    outs = ", ".join(f'"+f"({name})' for name in "acde")
    return f'asm volatile("{_FMA * (count // 4)}" : {outs} : "f"(b));\n'


def _jump(count: int) -> str:
    """Half of the code is jumped over, ``LINK`` instructions at a time, by a branch that no compiler can foresee."""
    taken = f"if (never == {{}}) {{{{ {_block(LINK)} }}}}\n"
    return "".join(_block(LINK) + taken.format(7 + j) for j in range(count // (2 * LINK)))


def source() -> str:
    """CUDA C++ with a kernel for each size."""
    out = []
    kinds = [(f"fetch_{n}", _block(64) * (n // 64)) for n in SIZES] + [(f"jump_{n}", _jump(n)) for n in JUMPS]
    for name, body in kinds:
        out.append(f"""
extern "C" __global__ void __launch_bounds__(512) {name}(long long* out, float b, int apart, int never, int kept) {{
  float a = b, c = b + 1, d = b + 2, e = b + 3;
  long long start = clock64(), until = start + (long long)apart * (threadIdx.x / 32);
  while (clock64() < until) {{}}
  #pragma unroll 1
  for (int pass = 0; pass < {PASSES}; ++pass) {{
    long long t0 = clock64();
    {body}
    long long t1 = clock64();
    if (threadIdx.x % 32 == 0 && blockIdx.x == kept) {{
      long long* o = out + (threadIdx.x / 32 * {PASSES} + pass) * 2;
      o[0] = t0 - start; o[1] = t1 - start;
    }}
  }}
  if (a + c + d + e == 1.234f) out[1000] = 1;
}}""")
    return "\n".join(out)


def measure(module: Any, out: Any, sms: int, cold: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """Cycles of the SM for one instruction, by pass: from the first warp's start to the last one's end, over the
    instructions that a scheduler issues."""
    results: dict[str, dict[str, Any]] = {}
    names = [f"fetch_{n}" for n in SIZES] + [f"jump_{n}" for n in JUMPS]
    for name in names:
        kind, size = name.split("_")
        count = int(size) // (1 if kind == "fetch" else 2)  # of those that are issued
        for warps in (1, 4, 8, 16):
            for grid in (1, sms):
                for apart in (0, 400) if warps > 4 else (0,):
                    cold()
                    if (
                        name != f"fetch_{SIZES[-1]}"
                    ):  # its code takes the place of this one in the caches of instructions
                        module.launch(f"fetch_{SIZES[-1]}", sms, 512, [out, 1, 0, 0, 0])
                    cold()
                    module.launch(name, grid, 32 * warps, [out, 1, apart, 0, 0])
                    rows = out[: 2 * PASSES * warps].view(warps, PASSES, 2).tolist()
                    entry = results.setdefault(f"{name}, {warps} warps, grid {grid}, apart {apart}", {})
                    for p in range(PASSES):
                        mean = sum(r[p][1] - r[p][0] for r in rows) / warps
                        entry[f"pass {p}"] = round(mean / count, 2)
                    first, last = min(r[0][0] for r in rows), max(r[-1][1] for r in rows)
                    entry["all"] = round((last - first) / (count * PASSES * max(1, warps // 4)), 2)
    return results
