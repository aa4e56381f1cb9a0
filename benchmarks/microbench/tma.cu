// Bulk copies and TMA: latency by box, bandwidth by bytes in flight, multicast, stores.
#include "async.cuh"

__device__ __forceinline__ void tile_cast(u32 to, const Map* m, int x, int y, u32 b, unsigned short mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(m), "r"(x), "r"(y), "r"(b), "h"(mask) : "memory");
}

// One box at a time: cycles from the issue until the wait has passed. boxes[i] = issue-to-data, issue[i] = cycles of the issue itself.
extern "C" __global__ void bulk_latency(long long* out, const char* from, int bytes, int steps, int stride) {
  extern __shared__ __align__(1024) char s[];
  __shared__ u64 bar;
  u32 b = shared_of(&bar), to = shared_of(s);
  if (threadIdx.x == 0) {
    init(b, 1); asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
    for (int i = 0; i < steps; ++i) {
      expect(b, bytes);
      long long t0 = clock64();
      bulk(to, from + (u64)i * stride, bytes, b);
      long long t1 = clock64();
      wait(b, i & 1);
      long long t2 = clock64();
      out[2 * i] = t2 - t0; out[2 * i + 1] = t1 - t0;
    }
  }
}
extern "C" __global__ void tile_latency(long long* out, const __grid_constant__ Map m, int rows, int steps) {
  extern __shared__ __align__(1024) char s[];
  __shared__ u64 bar;
  u32 b = shared_of(&bar), to = shared_of(s);
  if (threadIdx.x == 0) {
    init(b, 1); asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
    for (int i = 0; i < steps; ++i) {
      expect(b, rows * 128);
      long long t0 = clock64();
      tile(to, &m, 0, (blockIdx.x * steps + i) * rows, b);
      long long t1 = clock64();
      wait(b, i & 1);
      long long t2 = clock64();
      if (blockIdx.x == 0) { out[2 * i] = t2 - t0; out[2 * i + 1] = t1 - t0; }
    }
  }
}
// A ring of `stages` boxes a CTA; the CTAs share `boxes` boxes. Kind 0: bulk copies; 1: tiles of 64 columns; 2: multicast to a cluster of 2, each CTA half of a box.
template <int KIND>
__device__ __forceinline__ void stream(const char* from, const Map* m, int rows, int boxes, int stages, int wrap) {
  extern __shared__ __align__(1024) char s[];
  __shared__ u64 bar[32];
  u32 b = shared_of(bar), to = shared_of(s), bytes = rows * 128;
  to = (to + 1023) & ~1023u;
  u32 rank = 0; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) init(b + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
  }
  if (KIND == 2) asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  int me = KIND == 2 ? blockIdx.x / 2 : blockIdx.x, all = KIND == 2 ? gridDim.x / 2 : gridDim.x;
  int mine = (boxes - me + all - 1) / all;
  // A multicast may run ahead of the peer's wait: its bytes then count for a phase too early. All are counted in the end.
  if (threadIdx.x == 0) {
    int st = 0, phase = 1, box = me % wrap;
    for (int i = 0; i < mine; ++i) {
      u32 bar_at = b + 8 * st, dst = to + st * bytes;
      wait(bar_at, phase);
      expect(bar_at, bytes);
      if (KIND == 0) bulk(dst, from + (u64)box * bytes, bytes, bar_at);
      if (KIND == 1) tile(dst, m, 0, box * rows, bar_at);
      if (KIND == 2) tile_cast(dst + rank * (bytes / 2), m, 0, box * rows + rank * (rows / 2), bar_at, 3);
      box += all; if (box >= wrap) box -= wrap;
      if (++st == stages) { st = 0; phase ^= 1; }
    }
    for (int i = 0; i < stages; ++i) {
      wait(b + 8 * st, phase);
      if (++st == stages) { st = 0; phase ^= 1; }
    }
  }
  if (KIND == 2) asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}
extern "C" __global__ void bulk_stream(const char* from, int rows, int boxes, int stages, int wrap) { stream<0>(from, nullptr, rows, boxes, stages, wrap); }
extern "C" __global__ void tile_stream(const __grid_constant__ Map m, int rows, int boxes, int stages, int wrap) { stream<1>(nullptr, &m, rows, boxes, stages, wrap); }
extern "C" __global__ void cast_stream(const __grid_constant__ Map m, int rows, int boxes, int stages, int wrap) { stream<2>(nullptr, &m, rows, boxes, stages, wrap); }

// A bulk store: cycles until its source may be reused, and until it is over.
extern "C" __global__ void store_latency(long long* out, char* to, int bytes, int steps) {
  extern __shared__ __align__(1024) char s[];
  if (threadIdx.x == 0)
    for (int i = 0; i < steps; ++i) {
      long long t0 = clock64();
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + (u64)i * bytes), "r"(shared_of(s)), "r"(bytes) : "memory");
      asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
      long long t1 = clock64();
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      long long t2 = clock64();
      out[2 * i] = t1 - t0; out[2 * i + 1] = t2 - t0;
    }
}

// Copies in a row by one thread: out[0] = cycles until it goes on behind the last, out[1] = until all are there.
template <int N>
__device__ __forceinline__ void in_a_row(long long* out, const char* from, const Map* m, int bytes, int tiles) {
  extern __shared__ __align__(1024) char s[];
  __shared__ u64 bar;
  u32 b = shared_of(&bar), to = shared_of(s);
  if (threadIdx.x) return;
  init(b, 1); asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
  for (int round = 0; round < 4; ++round) {
    expect(b, N * bytes);
    long long t0 = clock64();
    #pragma unroll
    for (int i = 0; i < N; ++i) {
      if (tiles) tile(to + i * bytes, m, 0, i * (bytes / 128), b); else bulk(to + i * bytes, from + i * bytes, bytes, b);
    }
    long long t1 = clock64();
    wait(b, round & 1);
    out[0] = t1 - t0; out[1] = clock64() - t0;
  }
}
#define IN_A_ROW(N) \
  extern "C" __global__ void bulk_row_##N(long long* out, const char* from, int bytes) { in_a_row<N>(out, from, nullptr, bytes, 0); } \
  extern "C" __global__ void tile_row_##N(long long* out, const __grid_constant__ Map m, int bytes) { in_a_row<N>(out, nullptr, &m, bytes, 1); }
IN_A_ROW(1) IN_A_ROW(2) IN_A_ROW(4) IN_A_ROW(8) IN_A_ROW(16)
