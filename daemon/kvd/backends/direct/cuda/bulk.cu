// The kernel of direct reads on devices with bulk copies: what gather in kernel.py does, for pieces of CHUNK bytes at
// most, one in a tile, that are multiples of 16. A thread block has one warp and a ring of STAGES pieces in shared
// memory, which bytes come into and leave without passing through registers.
#ifdef __CUDACC__
#define INLINE __device__ __forceinline__
#else
#define INLINE static inline
#endif

typedef long long int64;

struct Piece {
  char* to;
  const char* from;
  int bytes;
};

// The piece of a tile. at is a segment at or before the tile's own, which is given back; the words of a segment are
// those of SEGMENT_WORDS in tables.py.
INLINE int place(const int64* table, const int* words, int rows, int segments, int tile, int at, Piece* piece) {
  while (at + 1 < segments && words[(at + 1) * SEGMENT] <= tile) ++at;
  const int* segment = words + at * SEGMENT;
  const int number = tile - segment[0], per = segment[2], blocks = segment[3];
  const int cell = number / per, nth = cell / blocks;
  const int* listed = words + segment[6] + (cell - nth * blocks);
  const int64* column = table + segment[4] + (int64)nth * segment[5];
  const int64 begun = (int64)(number - cell * per) * CHUNK;
  const int64 left = column[2 * (int64)rows] - begun;
  piece->to = (char*)(column[0] + listed[0] * column[3 * (int64)rows] + begun);
  piece->from = (const char*)(column[rows] + listed[segment[7]] * column[4 * (int64)rows] + begun);
  piece->bytes = (int)(left < CHUNK ? left : CHUNK);
  return at;
}

#ifdef __CUDACC__
#define WARP 32
#define AHEAD (STAGES - LAG)
static_assert(0 < LAG && LAG < STAGES && AHEAD <= WARP, "a warp finds more pieces at a time than are under way");

INLINE unsigned shared_at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

extern "C" __global__ void __launch_bounds__(WARP)
    bulk(const int64* table, const int* words, int rows, int segments, int tiles) {
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(8) unsigned long long full[STAGES];
  __shared__ Piece pieces[2 * WARP];
  const int lane = threadIdx.x, first = blockIdx.x, stride = gridDim.x;
  if (first >= tiles) return;
  const int count = (tiles - first + stride - 1) / stride;
  if (!lane) {
    for (int s = 0; s < STAGES; ++s)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_at(&full[s])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  int at = 0;
  // Each thread finds one of the next pieces, which one of them then moves.
  auto find = [&](int from) {
    const int i = from + lane;
    if (i < count) at = place(table, words, rows, segments, first + i * stride, at, &pieces[i % (2 * WARP)]);
    __syncwarp();
  };
  auto load = [&](int i) {
    const Piece& piece = pieces[i % (2 * WARP)];
    const unsigned barrier = shared_at(&full[i % STAGES]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(piece.bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_at(ring + i % STAGES * CHUNK)),
                 "l"(piece.from), "r"(piece.bytes), "r"(barrier)
                 : "memory");
  };
  auto store = [&](int i) {
    const Piece& piece = pieces[i % (2 * WARP)];
    unsigned come = 0;
    while (!come)
      asm volatile(
          "{\n .reg .pred done;\n mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
          " selp.u32 %0, 1, 0, done;\n}"
          : "=r"(come)
          : "r"(shared_at(&full[i % STAGES])), "r"((unsigned)(i / STAGES) & 1)
          : "memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(piece.to),
                 "r"(shared_at(ring + i % STAGES * CHUNK)), "r"(piece.bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  };
  find(0);
  if (!lane)
    for (int i = 0; i < AHEAD && i < count; ++i) load(i);
  for (int base = 0; base < count; base += WARP) {
    find(base + WARP);
    if (!lane)
      for (int i = base; i < base + WARP && i < count; ++i) {
        store(i);
        if (i + AHEAD < count) {
          // The place in the ring is free when all but the last LAG pieces have left it.
          asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LAG) : "memory");
          load(i + AHEAD);
        }
      }
    __syncwarp();
  }
  if (!lane) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif
