"""Which instructions share a pipe: cycles of two of them issued in turns, beside those of each alone.

Every warp runs 4 independent chains of each of the two; two warps are on each scheduler. Two that share a pipe take the
sum of their intervals, two that do not the larger one (or 2 issue slots, whichever is more).
"""

from __future__ import annotations

from itertools import combinations

from instructions import _C, OPS, _asm, _symbol

NAMES = (
    *("lop3", "mad.lo.s32", "fma.f32", "fma.f16x2", "cvt.f16x2.f32", "cvt.f32.s32", "cvt.f32.f16", "ex2.f32"),
    *("cvt.f16x2.e4m3x2", "cvt.e4m3x2.f16x2", "shfl.bfly", "min.f32", "add.f16x2", "mul.f16x2", "min.bf16x2"),
)
_BY_NAME = {op.name: op for op in OPS}
PAIRS = (*((a, a) for a in NAMES), *combinations(NAMES, 2))
CHAINS, ROUNDS, UNROLL, WARPS = 4, 16, 8, 2


def source() -> str:
    """CUDA C++ with a kernel for each pair."""
    out = []
    for first, second in PAIRS:
        a, b = _BY_NAME[first], _BY_NAME[second]
        body = ""
        for j in range(CHAINS):
            body += _asm(a, f"a{j}") + " " + _asm(b, f"c{j}").replace("(b)", "(e)") + " "
        sums = "".join(
            f" if (a{j} == ({_C[a.type]})12345 || c{j} == ({_C[b.type]})12345) out[100] = 1;" for j in range(CHAINS)
        )
        names = ", ".join(f"a{j} = ({_C[a.type]})(threadIdx.x + seed + {j})" for j in range(CHAINS))
        others = ", ".join(f"c{j} = ({_C[b.type]})(threadIdx.x + seed + {j + 9})" for j in range(CHAINS))
        out.append(f"""
extern "C" __global__ void pair_{_symbol(a)}__{_symbol(b)}(long long* out, int seed, int rounds) {{
  {_C[a.type]} {names}, b = ({_C[a.type]})seed;
  {_C[b.type]} {others}, e = ({_C[b.type]})seed;
  for (int w = 0; w < 2; ++w) {{
    __syncthreads();
    long long t0 = clock64();
    #pragma unroll 1
    for (int r = 0; r < rounds; ++r) {{
      #pragma unroll
      for (int i = 0; i < {UNROLL}; ++i) {{ {body} }}
    }}
    long long t1 = clock64();
    if (threadIdx.x % 32 == 0) {{ out[threadIdx.x / 16] = t0; out[threadIdx.x / 16 + 1] = t1; }}
  }}
  {sums}
}}""")
    return "\n".join(out)


def measure(module, out) -> dict[str, dict[str, float]]:
    """Cycles of one scheduler for one of each, by pair; ``out`` is an int64 tensor on the GPU."""
    results: dict[str, dict[str, float]] = {}
    for first, second in PAIRS:
        name = f"pair_{_symbol(_BY_NAME[first])}__{_symbol(_BY_NAME[second])}"
        for _ in range(2):
            module.launch(name, 1, 128 * WARPS, [out, 3, ROUNDS])
        times = out[: 8 * WARPS].view(-1, 2).tolist()
        span = max(t[1] for t in times) - min(t[0] for t in times)
        results[f"{first} and {second}"] = {"cycles": round(span / (ROUNDS * UNROLL * CHAINS * WARPS), 3)}
    return results
