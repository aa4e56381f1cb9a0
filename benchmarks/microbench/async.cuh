// mbarriers, bulk copies and TMA, by their PTX.
#pragma once
typedef unsigned long long u64;
typedef unsigned int u32;
struct alignas(64) Map { char bytes[128]; };

__device__ __forceinline__ u32 shared_of(const void* p) { u32 a; asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(a) : "l"(p)); return a; }
__device__ __forceinline__ void init(u32 b, u32 n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b), "r"(n)); }
__device__ __forceinline__ void expect(u32 b, u32 n) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void arrive(u32 b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ void wait(u32 b, u32 parity) {
  asm volatile("{.reg .pred p;\nW: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra W;}" ::"r"(b), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk(u32 to, const void* from, u32 n, u32 b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(n), "r"(b) : "memory");
}
__device__ __forceinline__ void tile(u32 to, const Map* m, int x, int y, u32 b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(m), "r"(x), "r"(y), "r"(b) : "memory");
}
