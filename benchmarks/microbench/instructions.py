"""What single instructions cost: the latency of a chain that depends on itself, and the issue interval of a pipe.

Each instruction gets two kernels: ``latency`` runs a chain of 128 in one warp; ``rate`` runs 8 independent chains in
every warp of one CTA. Cycles are the SM's own (``clock64``).
"""

from __future__ import annotations

from typing import NamedTuple

CHAIN, CHAINS, ROUNDS = 128, 8, 16


class Op(NamedTuple):
    """One instruction of PTX: ``{d}`` is its destination and chained source, ``{b}`` another register of type ``type``
    (an asm constraint with a C type)."""

    name: str
    text: str
    type: str = "r"


OPS = (
    Op("add.s32+xor", "add.s32 {d}, {d}, {b}; xor.b32 {d}, {d}, {b};"),
    Op("lop3", "lop3.b32 {d}, {d}, {b}, {b}, 0x96;"),
    Op("mad.lo.s32", "mad.lo.s32 {d}, {d}, {b}, {b};"),
    Op("mul.hi.u32", "mul.hi.u32 {d}, {d}, {b};"),
    Op("add.s64+xor", "add.s64 {d}, {d}, {b}; xor.b64 {d}, {d}, {b};", "l"),
    Op("shf", "shf.l.wrap.b32 {d}, {d}, {b}, 5;"),
    Op("prmt", "prmt.b32 {d}, {d}, {b}, 0x6521;"),
    Op("dp4a", "dp4a.s32.s32 {d}, {d}, {b}, {d};"),
    Op("popc", "popc.b32 {d}, {d};"),
    Op("bfind", "bfind.u32 {d}, {d};"),
    Op("add.f32", "add.f32 {d}, {d}, {b};", "f"),
    Op("fma.f32", "fma.rn.f32 {d}, {d}, {b}, {b};", "f"),
    Op("fma.f16x2", "fma.rn.f16x2 {d}, {d}, {b}, {b};"),
    Op("mul.bf16x2", "mul.rn.bf16x2 {d}, {d}, {b};"),
    Op("fma.f64", "fma.rn.f64 {d}, {d}, {b}, {b};", "d"),
    Op("min.s32+xor", "min.s32 {d}, {d}, {b}; xor.b32 {d}, {d}, {b};"),
    Op("add.f16x2", "add.f16x2 {d}, {d}, {b};"),
    Op("mul.f16x2", "mul.f16x2 {d}, {d}, {b};"),
    Op("min.bf16x2", "min.bf16x2 {d}, {d}, {b};"),
    Op("min.f32", "min.f32 {d}, {d}, {b};", "f"),
    Op("setp+xor", "{{.reg .pred p; setp.gt.s32 p, {d}, {b}; @p xor.b32 {d}, {d}, {b};}}"),
    Op("setp.f32+add", "{{.reg .pred p; setp.gt.f32 p, {d}, {b}; @p add.f32 {d}, {d}, {b};}}", "f"),
    Op("mad.wide.u32", "{{.reg .b32 t; cvt.u32.u64 t, {d}; mad.wide.u32 {d}, t, t, {b};}}", "l"),
    Op("ex2.f32", "ex2.approx.ftz.f32 {d}, {d};", "f"),
    Op("cvt.f16x2.f32", "{{.reg .b32 t; cvt.rn.f16x2.f32 t, {d}, {b}; mov.b32 {d}, t;}}", "f"),
    Op("cvt.f32.f16", "{{.reg .b16 h, g; mov.b32 {{h, g}}, {d}; cvt.f32.f16 {d}, h;}}", "f"),
    Op("cvt.f32.s32", "{{.reg .b32 t; mov.b32 t, {d}; cvt.rn.f32.s32 {d}, t;}}", "f"),
    Op("cvt.s32.f32", "{{.reg .b32 t; cvt.rzi.s32.f32 t, {d}; mov.b32 {d}, t;}}", "f"),
    Op("cvt.f16x2.e4m3x2", "{{.reg .b16 h, g; mov.b32 {{h, g}}, {d}; cvt.rn.f16x2.e4m3x2 {d}, h;}}"),
    Op("cvt.e4m3x2.f16x2", "{{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f16x2 h, {d}; mov.b32 {d}, {{h, h}};}}"),
    Op("shfl.bfly", "shfl.sync.bfly.b32 {d}, {d}, 1, 31, 0xffffffff;"),
    Op("redux.add", "redux.sync.add.s32 {d}, {d}, 0xffffffff;"),
    Op("vote.ballot", "{{.reg .pred p; setp.lt.s32 p, {d}, {b}; vote.sync.ballot.b32 {d}, p, 0xffffffff;}}"),
)
_C = {"r": "int", "f": "float", "l": "long long", "d": "double"}


def _asm(op: Op, register: str) -> str:
    text = op.text.format(d="%0", b="%1")
    return f'asm volatile("{text}" : "+{op.type}"({register}) : "{op.type}"(b));'


def _symbol(op: Op) -> str:
    return "".join(c if c.isalnum() else "_" for c in op.name)


def source() -> str:
    """CUDA C++ with the two kernels of every instruction."""
    out = []
    for op in OPS:
        name, kind = _symbol(op), _C[op.type]
        chain = _asm(op, "a")
        out.append(f"""
extern "C" __global__ void latency_{name}(long long* out, int seed) {{
  {kind} a = ({kind})(threadIdx.x + seed), b = ({kind})seed;
  long long best = 1ll << 60;
  for (int r = 0; r < 4; ++r) {{
    long long t0 = clock64();
    #pragma unroll
    for (int i = 0; i < {CHAIN}; ++i) {{ {chain} }}
    long long t1 = clock64();
    best = t1 - t0 < best ? t1 - t0 : best;
  }}
  if (threadIdx.x == 0) out[0] = best;
  if (a == ({kind})12345) out[1] = (long long)a;
}}""")
        registers = ", ".join(f"a{j} = ({kind})(threadIdx.x + seed + {j})" for j in range(CHAINS))
        body = " ".join(_asm(op, f"a{j}") for j in range(CHAINS))
        total = " + ".join(f"a{j}" for j in range(CHAINS))
        out.append(f"""
extern "C" __global__ void rate_{name}(long long* out, int seed, int rounds) {{
  {kind} {registers}, b = ({kind})seed;
  for (int w = 0; w < 2; ++w) {{
    __syncthreads();
    long long t0 = clock64();
    #pragma unroll 1
    for (int r = 0; r < rounds; ++r) {{
      #pragma unroll
      for (int i = 0; i < 8; ++i) {{ {body} }}
    }}
    long long t1 = clock64();
    if (threadIdx.x % 32 == 0) {{ out[threadIdx.x / 16] = t0; out[threadIdx.x / 16 + 1] = t1; }}
  }}
  if ({total} == ({kind})12345) out[100] = 1;
}}""")
    return "\n".join(out)


def measure(module, out) -> dict[str, dict[str, float]]:
    """Cycles by instruction: ``latency`` of one link of the chain, ``interval_1``, ``interval_2`` and ``interval_4``:
    cycles between two issues of one sub-partition with that many warps on it. ``out`` is an int64 tensor on the GPU."""
    results = {}
    for op in OPS:
        name = _symbol(op)
        module.launch(f"latency_{name}", 1, 32, [out, 3])
        entry = {"latency": round(out[0].item() / CHAIN, 2)}
        for warps in (1, 2, 4):
            for _ in range(2):
                module.launch(f"rate_{name}", 1, 128 * warps, [out, 3, ROUNDS])
            times = out[: 8 * warps].view(-1, 2).tolist()
            span = max(t[1] for t in times) - min(t[0] for t in times)
            entry[f"interval_{warps}"] = round(span / (ROUNDS * 8 * CHAINS * warps), 3)
        results[op.name] = entry
    return results
