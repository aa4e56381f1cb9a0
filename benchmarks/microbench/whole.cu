// Whole launches that do next to nothing: what the launch itself, the first and the last access and new code cost.
#include "async.cuh"

extern "C" __global__ void nothing(long long* out, int never) { if (never == 77) out[0] = 1; }
extern "C" __global__ void store_one(int* out) { if (threadIdx.x == 0) out[blockIdx.x * 64] = 3; }
extern "C" __global__ void store_all(float4* out, int each) {
  for (int k = 0; k < each; ++k) out[(blockIdx.x * each + k) * blockDim.x + threadIdx.x] = make_float4(1.f, 2.f, 3.f, 4.f);
}
extern "C" __global__ void load_one(int* out, const int* in) { if (in[(blockIdx.x * blockDim.x + threadIdx.x) * 4] == 77) out[0] = 1; }
extern "C" __global__ void load_store(int* out, const int* in) {
  int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  out[i] = in[i] + 1;
}
// `loads` loads, each where the last one says: the data are zeros, `step` bytes apart.
extern "C" __global__ void load_chain(int* out, const char* in, int loads, int step) {
  u64 at = (u64)(in + (blockIdx.x * blockDim.x + threadIdx.x) * 16);
  for (int k = 0; k < loads; ++k) {
    u32 v; asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    at += v + (u64)step;
  }
  if (at == 77) out[0] = 1;
}
extern "C" __global__ void count(long long* out, int cycles) {
  long long c0 = clock64();
  while (clock64() - c0 < cycles) {}
  if (cycles == 77) out[0] = 1;
}
// Each CTA writes `boxes` boxes of 16 KB, one behind the other, and waits until they are written.
extern "C" __global__ void box_store(const __grid_constant__ Map m, int boxes) {
  extern __shared__ __align__(1024) char s[];
  if (threadIdx.x == 0) {
    for (int k = 0; k < boxes; ++k)
      asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&m), "r"(0), "r"((int)(blockIdx.x * boxes + k) * 128), "r"(shared_of(s)) : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
// The chain of load_chain by one thread a warp: cycles of each load, `loads` for each warp of the launch.
extern "C" __global__ void chain_times(int* out, const char* in, int loads, int step) {
  if (threadIdx.x % 32) return;
  int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  u64 at = (u64)(in + (blockIdx.x * blockDim.x + threadIdx.x) * 16);
  for (int k = 0; k < loads; ++k) {
    u32 v;
    long long t0 = clock64();
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    at += v + (u64)step;
    asm volatile("" ::"l"(at) : "memory");
    if (at == 77) out[0] = 1;
    out[warp * loads + k] = (int)(clock64() - t0);
  }
}
// Each CTA brings `each` boxes of 16 KB through a ring of eight; of `boxes` boxes that all share, so many CTAs as come to each ask for it at a time.
extern "C" __global__ void same_boxes(const __grid_constant__ Map m, int boxes, int each) {
  extern __shared__ __align__(1024) char s[];
  __shared__ u64 bar[8];
  u32 b = shared_of(bar), to = shared_of(s);
  if (threadIdx.x) return;
  for (int i = 0; i < 8; ++i) init(b + 8 * i, 1);
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
  int box = blockIdx.x * boxes / gridDim.x;
  for (int i = 0; i < each + 8; ++i) {
    u32 at = b + 8 * (i % 8);
    if (i >= 8) wait(at, (i / 8 - 1) & 1);
    if (i >= each) continue;
    expect(at, 16384);
    tile(to + 16384 * (i % 8), &m, 0, box * 128, at);
    if (++box == boxes) box = 0;
  }
}
