// Which of two places in memory is nearer to a multiprocessor?
//
// An addition to a number in memory is made in the half of the L2 cache that the number belongs to, whoever asks; the
// answer of the other half takes half as long again. Nothing is added, so what lies there stays.
//
// No header is needed.

typedef unsigned int u32;
typedef long long i64;

// ---- instructions -------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 processor() {
    u32 id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

__device__ __forceinline__ u32 added_nothing(u32* p) {
    u32 found;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 0;" : "=r"(found) : "l"(p) : "memory");
    return found;
}

__device__ __forceinline__ int now() { return static_cast<int>(clock64()); }

// ---- a place ------------------------------------------------------------------------------------------------------

// Cycles of a few additions in a row, the quickest of three times: each is asked for when the one before has answered,
// for its address depends on that. (One answer of four billion leads to the number behind: as far away.)
__device__ __forceinline__ int cycles(u32* p, u32& found) {
    int best = 1 << 30;
    for (int turn = 0; turn < 3; ++turn) {
        const int begun = now();
#pragma unroll 1
        for (int i = 0; i < 8; ++i) found = added_nothing(p + (found == 0xA5A5A5A5u));
        best = min(best, now() - begun);
    }
    return best;
}

// Of each offset: by how many cycles its place is nearer than the one beside it (`APART` bytes on, or back), and to whom
extern "C" __global__ void sides_cuda_kernel(u32* base, const i64* offsets, int many, int* nearer, int* processors) {
    if (threadIdx.x != 0) return;
    u32 found = 0;
    for (int i = blockIdx.x; i < many; i += gridDim.x) {
        u32 *const here = base + offsets[i] / 4, *const there = base + (offsets[i] ^ APART) / 4;
        cycles(here, found);  // whatever lies between must know both
        cycles(there, found);
        const int one = cycles(here, found), two = cycles(there, found);
        nearer[i] = two - one;
        processors[i] = static_cast<int>(processor()) + (found == 0xA5A5A5A5u && two == one);
    }
}
