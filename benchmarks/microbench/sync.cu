// Barriers: mbarriers between warps and CTAs, named barriers, clusters, distributed shared memory; first pass through code.
#include "async.cuh"

__device__ __forceinline__ void arrive_at(u32 b, u32 rank) {
  asm volatile("{.reg .b32 t; mapa.shared::cluster.u32 t, %0, %1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [t];}" ::"r"(b), "r"(rank) : "memory");
}
#define CLUSTER_SYNC() asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory")

// Two warps answer each other through two mbarriers; out[0] = cycles of one round trip (two arrivals, two waits).
extern "C" __global__ void ping_pong(long long* out, int rounds) {
  __shared__ u64 bar[2];
  u32 a = shared_of(bar), b = a + 8;
  if (threadIdx.x == 0) { init(a, 1); init(b, 1); }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    long long t0 = clock64();
    for (int i = 0; i < rounds; ++i) {
      if (threadIdx.x == 0) { arrive(a); wait(b, i & 1); } else { wait(a, i & 1); arrive(b); }
    }
    if (threadIdx.x == 0) out[0] = (clock64() - t0) / rounds;
  }
}
// The same between two CTAs of a cluster.
extern "C" __global__ void ping_pong_cluster(long long* out, int rounds) {
  __shared__ u64 bar[1];
  u32 a = shared_of(bar), rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) { init(a, 1); asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
  CLUSTER_SYNC();
  if (threadIdx.x == 0) {
    long long t0 = clock64();
    for (int i = 0; i < rounds; ++i) {
      if (rank == 0) { arrive_at(a, 1); wait(a, i & 1); } else { wait(a, i & 1); arrive_at(a, 0); }
    }
    if (blockIdx.x == 0) out[0] = (clock64() - t0) / rounds;
  }
  CLUSTER_SYNC();
}
// A wait that passes at once, an arrival, expect_tx: cycles of each in a row of 64.
extern "C" __global__ void mbarrier_costs(long long* out) {
  __shared__ u64 bar[1];
  u32 a = shared_of(bar);
  if (threadIdx.x == 0) {
    init(a, 1 << 19);
    for (int again = 0; again < 2; ++again) {
      long long t0 = clock64();
#pragma unroll
      for (int i = 0; i < 32; ++i) asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p trap;}" ::"r"(a), "r"(1) : "memory");
      long long t1 = clock64();
#pragma unroll
      for (int i = 0; i < 32; ++i) arrive(a);
      long long t2 = clock64();
#pragma unroll
      for (int i = 0; i < 32; ++i) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      long long t3 = clock64();
#pragma unroll
      for (int i = 0; i < 32; ++i) asm volatile("{.reg .pred p;\nelect.sync _|p, 0xffffffff;\n}" ::: "memory");
      long long t4 = clock64();
      out[0] = (t1 - t0); out[1] = (t2 - t1); out[2] = (t3 - t2); out[3] = t4 - t3;
    }
  }
}
extern "C" __global__ void bar_sync(long long* out) {
  for (int again = 0; again < 2; ++again) {
    long long t0 = clock64();
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("bar.sync 0;" ::: "memory");
    if (threadIdx.x == 0) out[0] = clock64() - t0;
  }
}
extern "C" __global__ void cluster_sync(long long* out) {
  for (int again = 0; again < 2; ++again) {
    long long t0 = clock64();
#pragma unroll
    for (int i = 0; i < 16; ++i) CLUSTER_SYNC();
    if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = clock64() - t0;
  }
}
// Distributed shared memory: a chain through the peer's memory, and its bandwidth.
extern "C" __global__ void remote_chase(long long* out, int steps) {
  __shared__ u32 s[1024];
  u32 rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  u32 own = shared_of(s), far;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(own), "r"(rank ^ 1));
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) s[i] = 0;
  CLUSTER_SYNC();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    u32 v = 0;
    long long t0 = clock64();
    for (int i = 0; i < steps; ++i) asm volatile("{.reg .u32 t; add.u32 t, %0, %1; ld.shared::cluster.u32 %0, [t];}" : "+r"(v) : "r"(far));
    out[0] = (clock64() - t0) / steps;
    if (v == 77) out[1] = v;
  }
  CLUSTER_SYNC();
}
extern "C" __global__ void remote_rate(long long* out, int rounds) {
  extern __shared__ __align__(128) unsigned char s[];
  u32 rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  u32 own = shared_of(s), far, x, y, z, w, sum = 0;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(own), "r"(rank ^ 1));
  for (int i = threadIdx.x * 4; i < 32768; i += blockDim.x * 4) *(u32*)(s + i) = i;
  far += (threadIdx.x * 16) & 32767;
  CLUSTER_SYNC();
  long long t0 = clock64();
  for (int r = 0; r < rounds; ++r) {
#pragma unroll
    for (int u = 0; u < 8; ++u) { asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(far)); sum += x + y + z + w; }
  }
  if (sum == 1) out[2] = sum;
  __syncthreads();
  if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = clock64() - t0;
  CLUSTER_SYNC();
}
// Straight-line code of 16 segments of 256 instructions (4 KB each), walked twice: cycles of each segment.
template <int N> struct Many { static __device__ __forceinline__ void go(float& a, float b) { asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(a) : "f"(b)); Many<N - 1>::go(a, b); } };
template <> struct Many<0> { static __device__ __forceinline__ void go(float& a, float b) {} };
extern "C" __global__ void first_pass(long long* out, float b) {
  float a = b, c = b + 1, d = b + 2, e = b + 3;
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
    long long t[17];
#define SEGMENT(K) { t[K] = clock64(); _Pragma("unroll") for (int i = 0; i < 64; ++i) { Many<1>::go(a, b); Many<1>::go(c, b); Many<1>::go(d, b); Many<1>::go(e, b); } }
    SEGMENT(0) SEGMENT(1) SEGMENT(2) SEGMENT(3) SEGMENT(4) SEGMENT(5) SEGMENT(6) SEGMENT(7)
    SEGMENT(8) SEGMENT(9) SEGMENT(10) SEGMENT(11) SEGMENT(12) SEGMENT(13) SEGMENT(14) SEGMENT(15)
    t[16] = clock64();
    if (threadIdx.x == 0 && blockIdx.x == 0)
      for (int k = 0; k < 16; ++k) out[pass * 16 + k] = t[k + 1] - t[k];
  }
  if (a + c + d + e == 1.234f) out[100] = 1;
}
// Each thread of a CTA sends `each` times 16 bytes to the other CTA of its cluster, whose mbarrier counts them; cycles until all have come.
extern "C" __global__ void exchange(long long* out, int each) {
  extern __shared__ __align__(1024) char room[];
  __shared__ u64 bar;
  u32 b = shared_of(&bar), rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) { init(b, 1); asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
  CLUSTER_SYNC();
  long long t0 = clock64();
  if (threadIdx.x == 0) expect(b, each * blockDim.x * 16);
  u32 there, told;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_of(room)), "r"(rank ^ 1));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(told) : "r"(b), "r"(rank ^ 1));
  for (int k = 0; k < each; ++k)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %1, %1, %1}, [%2];" ::"r"(there + (k * blockDim.x + threadIdx.x) * 16), "r"(k), "r"(told) : "memory");
  wait(b, 0);
  if (threadIdx.x == 0) out[blockIdx.x] = clock64() - t0;
  CLUSTER_SYNC();
}
