"""What matrix instructions cost: issue interval and latency of wgmma by shape and of mma.sync.

A batch is ``fence``, some ``wgmma`` into one accumulator, ``commit_group``, ``wait_group 0``. Cycles of batches of
several lengths give the interval (their slope) and the latency (what a batch of one costs).
"""

from __future__ import annotations

from typing import NamedTuple

BATCHES = (1, 2, 4, 8, 16)
ROUNDS = 16


class Wgmma(NamedTuple):
    """``wgmma`` of m64 by ``n`` by ``k``; ``source`` of A is "ss" (shared memory) or "rs" (registers)."""

    n: int
    k: int
    types: str
    source: str

    @property
    def name(self) -> str:
        return f"wgmma m64n{self.n}k{self.k} {self.types} {self.source}"

    @property
    def symbol(self) -> str:
        return self.name.replace(" ", "_").replace(".", "_")

    def text(self) -> str:
        """One asm statement into accumulators ``d``."""
        count = self.n // 2
        registers = ", ".join(f"%{j}" for j in range(count))
        a = f"%{count}" if self.source == "ss" else "{" + ", ".join(f"%{count + j}" for j in range(4)) + "}"
        b = f"%{count + (1 if self.source == 'ss' else 4)}"
        sixteen_bits = "bf16" in self.types
        flags = "p, 1, 1" + ((", 0, 0" if self.source == "ss" else ", 0") if sixteen_bits else "")
        out = ", ".join(f'"+f"(d[{j}])' for j in range(count))
        into = '"l"(a)' if self.source == "ss" else ", ".join(f'"r"(x[{j}])' for j in range(4))
        head = "{.reg .pred p; setp.ne.b32 p, 1, 0; "
        op = f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}.{self.types}"
        return f'asm volatile("{head}{op} {{{registers}}}, {a}, {b}, {flags};}}" : {out} : {into}, "l"(b));'


SHAPES = (
    *(Wgmma(n, 16, "f32.bf16.bf16", source) for source in ("ss", "rs") for n in (8, 16, 32, 64, 128, 256)),
    *(Wgmma(n, 32, "f32.e4m3.e4m3", "ss") for n in (64, 128, 256)),
)
SYNC = {
    "mma.sync m16n8k16 f32.bf16": ("m16n8k16.row.col.f32.bf16.bf16.f32", 4, 2, "f"),
    "mma.sync m16n8k8 f32.bf16": ("m16n8k8.row.col.f32.bf16.bf16.f32", 2, 1, "f"),
    "mma.sync m16n8k16 f16.f16": ("m16n8k16.row.col.f16.f16.f16.f16", 4, 2, "h"),
    "mma.sync m16n8k32 f32.e4m3": ("m16n8k32.row.col.f32.e4m3.e4m3.f32", 4, 2, "f"),
    "mma.sync m16n8k32 s32.s8": ("m16n8k32.row.col.s32.s8.s8.s32", 4, 2, "r"),
}


def source() -> str:
    """CUDA C++ with a kernel a shape and length of batch."""
    out = ["typedef unsigned long long u64; typedef unsigned int u32;"]
    for shape in SHAPES:
        for batch in BATCHES:
            bound = f"__launch_bounds__({512 if shape.n <= 128 else 256})"
            out.append(f"""
extern "C" __global__ void {bound} {shape.symbol}_{batch}(long long* out, int rounds) {{
  extern __shared__ __align__(1024) char s[];
  u32 at; asm("{{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}}" : "=r"(at) : "l"(s));
  for (int i = threadIdx.x * 4; i < 65536; i += blockDim.x * 4) *(u32*)(s + i) = 0;
  u64 a = (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62, b = a + (32768 >> 4);
  u32 x[4] = {{0, 0, 0, 0}}; (void)x;
  float d[{shape.n // 2}];
  for (int j = 0; j < {shape.n // 2}; ++j) d[j] = 0.f;
  asm volatile("fence.proxy.async;" ::: "memory");
  for (int w = 0; w < 2; ++w) {{
    __syncthreads();
    long long t0 = clock64();
    #pragma unroll 1
    for (int r = 0; r < rounds; ++r) {{
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      {shape.text() * batch}
      asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }}
    long long t1 = clock64();
    if (threadIdx.x % 128 == 0) {{ out[threadIdx.x / 64] = t0; out[threadIdx.x / 64 + 1] = t1; }}
  }}
  float sum = 0.f;
  for (int j = 0; j < {shape.n // 2}; ++j) sum += d[j];
  if (sum == 1.5f) out[20] = 1;
}}""")
    for number, (form, a, b, kind) in enumerate(SYNC.values()):
        registers, constraint = (2, "+r") if kind == "h" else (4, "+f" if kind == "f" else "+r")
        c = "float" if kind == "f" else "u32"
        lists, first = [], 0
        for many in (registers, a, b):
            lists.append("{" + ", ".join(f"%{first + j}" for j in range(many)) + "}")
            first += many
        text = f"mma.sync.aligned.{form} {lists[0]}, {lists[1]}, {lists[2]}, {lists[0]};"

        def statement(d: str, text=text, registers=registers, constraint=constraint, a=a, b=b) -> str:
            outs = ", ".join(f'"{constraint}"({d}[{j}])' for j in range(registers))
            ins = ", ".join([*(f'"r"(x[{j}])' for j in range(a)), *(f'"r"(y[{j}])' for j in range(b))])
            return f'asm volatile("{text}" : {outs} : {ins});'

        for chains in (1, 4):
            body = " ".join(statement(f"d[{j}]") for j in range(chains))
            out.append(f"""
extern "C" __global__ void mma_sync_{number}_{chains}(long long* out, int rounds) {{
  {c} d[{chains}][{registers}]; u32 x[4], y[2];
  for (int j = 0; j < 4; ++j) x[j] = threadIdx.x >> 20;
  for (int j = 0; j < 2; ++j) y[j] = threadIdx.x >> 20;
  for (int i = 0; i < {chains}; ++i) for (int j = 0; j < {registers}; ++j) d[i][j] = 0;
  for (int w = 0; w < 2; ++w) {{
    __syncthreads();
    long long t0 = clock64();
    #pragma unroll 1
    for (int r = 0; r < rounds; ++r) {{
      #pragma unroll
      for (int i = 0; i < 16; ++i) {{ {body} }}
    }}
    long long t1 = clock64();
    if (threadIdx.x % 32 == 0) {{ out[threadIdx.x / 16] = t0; out[threadIdx.x / 16 + 1] = t1; }}
  }}
  {c} sum = 0;
  for (int i = 0; i < {chains}; ++i) for (int j = 0; j < {registers}; ++j) sum += d[i][j];
  if (sum == ({c})77) out[100] = 1;
}}""")
    return "\n".join(out)


def span(out, entries: int) -> int:
    times = out[: 2 * entries].view(-1, 2).tolist()
    return max(t[1] for t in times) - min(t[0] for t in times)


def measure(module, out) -> dict[str, dict[str, float]]:
    """Cycles by shape. wgmma: ``batch_B_wgW``, of one batch of B by each of W warpgroups. mma.sync: ``latency`` and
    ``interval_W``, between two issues of one sub-partition with W warps on it."""
    results: dict[str, dict[str, float]] = {}
    for shape in SHAPES:
        entry = results[shape.name] = {}
        for groups in (1, 2, 4) if shape.n <= 128 else (1, 2):
            for batch in BATCHES:
                module.launch(f"{shape.symbol}_{batch}", 1, 128 * groups, [out, ROUNDS], shared=65536 + 1024)
                entry[f"batch_{batch}_wg{groups}"] = round(span(out, groups) / ROUNDS, 1)
    for number, name in enumerate(SYNC):
        module.launch(f"mma_sync_{number}_1", 1, 32, [out, ROUNDS])
        entry = results[name] = {"latency": round(span(out, 1) / (16 * ROUNDS), 2)}
        for warps in (1, 2, 4):
            module.launch(f"mma_sync_{number}_4", 1, 128 * warps, [out, ROUNDS])
            entry[f"interval_{warps}"] = round(span(out, 4 * warps) / (64 * ROUNDS * warps), 3)
    return results
