#define INLINE __device__ __forceinline__
INLINE unsigned shared_at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

extern "C" __global__ void regs(char* dst, const char* src, const int* mine, const int* theirs,
                                int blocks, int piece) {
  const int per = piece / (THREADS * DEEP * 16);
  const int total = blocks * per;
  for (int c = blockIdx.x; c < total; c += gridDim.x) {
    const int b = c / per;
    const long long o = (long long)(c - b * per) * (THREADS * DEEP * 16) + threadIdx.x * 16;
    const char* from = src + (long long)theirs[b] * piece + o;
    char* to = dst + (long long)mine[b] * piece + o;
    int4 got[DEEP];
#pragma unroll
    for (int i = 0; i < DEEP; ++i)
      asm volatile("ld.global.L1::no_allocate.v4.s32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(got[i].x), "=r"(got[i].y), "=r"(got[i].z), "=r"(got[i].w)
                   : "l"(from + i * THREADS * 16));
#pragma unroll
    for (int i = 0; i < DEEP; ++i)
      asm volatile("st.global.L1::no_allocate.v4.s32 [%0], {%1,%2,%3,%4};" ::"l"(to + i * THREADS * 16),
                   "r"(got[i].x), "r"(got[i].y), "r"(got[i].z), "r"(got[i].w) : "memory");
  }
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void bulk(char* dst, const char* src, const int* mine, const int* theirs,
                                int blocks, int piece) {
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(8) unsigned long long full[STAGES];
  if (threadIdx.x) return;
  const int per = piece / CHUNK;
  const int total = blocks * per;
  if ((int)blockIdx.x >= total) return;
  const int n = (total - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
  for (int s = 0; s < STAGES; ++s)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_at(&full[s])) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  auto load = [&](int i) {
    const int c = blockIdx.x + i * gridDim.x, b = c / per, s = i % STAGES;
    const char* from = src + (long long)theirs[b] * piece + (long long)(c - b * per) * CHUNK;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(&full[s])),
                 "r"(CHUNK) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_at(ring + s * CHUNK)), "l"(from), "r"(CHUNK), "r"(shared_at(&full[s])) : "memory");
  };
  for (int i = 0; i < STAGES - LAG && i < n; ++i) load(i);
  for (int i = 0; i < n; ++i) {
    const int c = blockIdx.x + i * gridDim.x, b = c / per, s = i % STAGES;
    const unsigned parity = (i / STAGES) & 1;
    char* to = dst + (long long)mine[b] * piece + (long long)(c - b * per) * CHUNK;
    unsigned come = 0;
    while (!come)
      asm volatile(
          "{\n .reg .pred done;\n mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
          " selp.u32 %0, 1, 0, done;\n}" : "=r"(come) : "r"(shared_at(&full[s])), "r"(parity) : "memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_at(ring + s * CHUNK)), "r"(CHUNK) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (i + STAGES - LAG < n) {
      asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LAG) : "memory");
      load(i + STAGES - LAG);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif
