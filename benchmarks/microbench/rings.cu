// The copies of a GEMM without its products: a ring of `stages` in each CTA; tile t of CTA c is rows 128 (c + t * CTAs) of B.
#include "async.cuh"

__device__ __forceinline__ long long now() { long long t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }

// Each step of K brings a box of B (128 rows of 128 bytes, next to each other where `packed`), of A (`rows_of_a` from row
// `row_of_a` on, the same for all CTAs unless `own`; `parts` & 1), and 2 KB of scale factors of A (& 2) and of B (& 4); a stage is free `hold` cycles after it is full.
extern "C" __global__ void ring(long long* out, const __grid_constant__ Map a, const __grid_constant__ Map b, const char* scales,
                                int steps, int tiles, int stages, int hold, int parts, int packed, int own, int row_of_a, int rows_of_a) {
  extern __shared__ __align__(1024) char s[];
  __shared__ u64 bars[32];
  const int BOX = 16384, SF = 2048, STAGE = 2 * BOX + 2 * SF;
  u32 smid; asm volatile("mov.u32 %0, %%smid;" : "=r"(smid));
  u32 full = shared_of(bars), empty = full + 128, to = (shared_of(s) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    out[3 * blockIdx.x] = now(); out[3 * blockIdx.x + 2] = smid;
    for (int i = 0; i < stages; ++i) init(full + 8 * i, 1), init(empty + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  u32 bytes = BOX + 128 * rows_of_a * (parts & 1) + SF * ((parts >> 1 & 1) + (parts >> 2 & 1));
  if (threadIdx.x == 0) {
    int st = 0, phase = 1;
    for (int t = 0; t < tiles; ++t) {
      int row = (blockIdx.x + t * gridDim.x) * 128;
      for (int k = 0; k < steps; ++k) {
        u32 bar = full + 8 * st, at = to + st * STAGE;
        wait(empty + 8 * st, phase);
        expect(bar, bytes);
        if (parts & 1) tile(at, &a, 64 * (k + own * blockIdx.x * steps), row_of_a, bar);
        if (packed) tile(at + BOX, &b, 0, row * steps + 128 * k, bar); else tile(at + BOX, &b, 64 * k, row, bar);
        if (parts & 2) bulk(at + 2 * BOX, scales + (u64)k * SF, SF, bar);
        if (parts & 4) bulk(at + 2 * BOX + SF, scales + ((u64)(row / 128 + 1) * steps + k) * SF, SF, bar);
        if (++st == stages) { st = 0; phase ^= 1; }
      }
    }
  }
  if (threadIdx.x == 32) {
    int st = 0, phase = 0;
    for (int i = 0; i < tiles * steps; ++i) {
      wait(full + 8 * st, phase);
      long long t0 = clock64();
      while (clock64() - t0 < hold) {}
      arrive(empty + 8 * st);
      if (++st == stages) { st = 0; phase ^= 1; }
    }
    out[3 * blockIdx.x + 1] = now();
  }
}
