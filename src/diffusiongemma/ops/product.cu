// Dense products for some hundreds of rows: x [rows, K] times w [outputs, K], both fp8 with a scale a row.
//
// A program makes a tile of BM rows and BN outputs. One warp asks the copy engine for tiles of x and w, LINE bytes of
// each row at a time, as many ahead as the ring has STAGES; BM / 64 groups of four warps multiply, 64 rows each. `full`
// of a stage counts the bytes that arrive, `empty` the groups that have read it. The weight is there before the rows are:
// it is asked for while the kernel before still runs.
//
// A sum along K is made in one order, whatever the tile: that of `product_triton`, whose bits these are.
//
// BM, BN, STAGES, PITCH and SUMS (what `multiply` does) come from `ops/product_cuda.py`. No header is needed.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int LINE = 128;                       // bytes of a row in a tile: those of the swizzled layout
constexpr int GROUPS = BM / 64, MINE = BN / 2;  // MINE: sums of a thread, 64 x BN of 128 threads
constexpr u32 X_BYTES = BM * LINE, W_BYTES = BN * LINE, STAGE = X_BYTES + W_BYTES;

struct alignas(64) Map { u8 bytes[128]; };

// ---- instructions -------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_at(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void start_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the last of them
__device__ __forceinline__ void barriers_are_started() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// A tile of a matrix from this place on; what lies outside is zeros.
__device__ __forceinline__ void fetch(const Map& map, u32 into, u32 barrier, int byte, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
            "r"(into), "l"(&map), "r"(barrier), "r"(byte), "r"(row) : "memory");
}

// What the tensor cores read: rows of LINE bytes, eight of them swizzled together, as the copy engine leaves them.
__device__ __forceinline__ u64 described(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// Between those who write registers or shared memory and the products that read them
__device__ __forceinline__ void before_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until no more than so many groups of products are under way
template <int LEFT>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The products that make these sums have ended: nobody reads them sooner.
template <int MANY>
__device__ __forceinline__ void made(float (&sums)[MANY]) {
#pragma unroll
    for (int i = 0; i < MANY; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

__device__ __forceinline__ u32 two_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ void wait_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// 64 rows, BN outputs, 32 numbers along K
__device__ __forceinline__ void multiply(float (&d)[MINE], u64 a, u64 b) { SUMS }

// ---- a tile -------------------------------------------------------------------------------------------------------

struct Ring {
    u32 at, full, empty;  // addresses in shared memory
};

__device__ __forceinline__ Ring ring_in(u8* memory, u64* full, u64* empty) {
    const Ring ring = {(shared_at(memory) + 1023) & ~1023u, shared_at(full), shared_at(empty)};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            start_barrier(ring.full + 8 * s, 1);
            start_barrier(ring.empty + 8 * s, GROUPS);
        }
        barriers_are_started();
    }
    __syncthreads();
    return ring;
}

// What one thread does: all tiles of x from `row` on, and of w from `output` on.
__device__ __forceinline__ void bring(const Ring ring, const Map& x, const Map& w, int row, int output, int steps) {
    const int ahead = steps < STAGES ? steps : STAGES;
    for (int s = 0; s < ahead; ++s) {
        expect(ring.full + 8 * s, STAGE);
        fetch(w, ring.at + s * STAGE + X_BYTES, ring.full + 8 * s, s * LINE, output);
    }
    wait_before();
    for (int s = 0; s < ahead; ++s) fetch(x, ring.at + s * STAGE, ring.full + 8 * s, s * LINE, row);
    for (int s = ahead; s < steps; ++s) {
        const int at = s % STAGES;
        wait(ring.empty + 8 * at, (s / STAGES + 1) & 1);
        expect(ring.full + 8 * at, STAGE);
        fetch(w, ring.at + at * STAGE + X_BYTES, ring.full + 8 * at, s * LINE, output);
        fetch(x, ring.at + at * STAGE, ring.full + 8 * at, s * LINE, row);
    }
}

// What a group does: the sums of its 64 rows.
__device__ __forceinline__ void sum_up(float (&sum)[MINE], const Ring ring, int group, int steps) {
    for (int i = 0; i < MINE; ++i) sum[i] = 0.0f;
    int at = 0, turn = 0;
    for (int s = 0; s < steps; ++s) {
        wait(ring.full + 8 * at, turn);
        const u32 stage = ring.at + at * STAGE;
        const u64 a = described(stage + group * 64 * LINE), b = described(stage + X_BYTES);
        before_products();
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply(sum, a + 2 * k, b + 2 * k);  // 32 bytes are 2 x 16
        products_begin();
        wait_products<1>();
        if (s > 0 && threadIdx.x % 128 == 0) arrive(ring.empty + 8 * (at > 0 ? at - 1 : STAGES - 1));
        if (++at == STAGES) at = 0, turn ^= 1;
    }
    wait_products<0>();
    made(sum);
}

// The scales of a tile's outputs, where all sums find them; they are constants, so nobody waits for them.
__device__ __forceinline__ void bring_scales(float* scales, const float* w_scale, int first_output, int outputs) {
    for (int i = threadIdx.x; i < BN; i += GROUPS * 128)
        scales[i] = first_output + i < outputs ? w_scale[first_output + i] : 0.0f;
}

// Of a row. The kernel before has just written it: no compiler may read it sooner, nor as if it were a constant.
__device__ __forceinline__ float scale_of(const float* x_scale, int row, int rows) {
    float scale = 0.0f;
    if (row < rows) asm volatile("ld.global.f32 %0, [%1];" : "=f"(scale) : "l"(x_scale + row) : "memory");
    return scale;
}

// The sums, times their scales, as bfloat16 in shared memory: a warp's sixteen rows, PITCH bytes each. The ring is free
// for that when all groups are through, for all that was asked for has arrived.
__device__ __forceinline__ void put_down(const float (&sum)[MINE], u32 ring, const float* scales, float2 of_rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
    const u32 mine = ring + (warp * 16 + lane % 16) * PITCH;
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * j + lane % 4 * 2);
        const u32 low = two_bf16(sum[4 * j] * scale.x * of_rows.x, sum[4 * j + 1] * scale.y * of_rows.x);
        const u32 high = two_bf16(sum[4 * j + 2] * scale.x * of_rows.y, sum[4 * j + 3] * scale.y * of_rows.y);
        asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(mine + 16 * j), "r"(low), "r"(high)
                     : "memory");
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32, 1)
product_cuda_kernel(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map,
                    const float* x_scale, const float* __restrict__ w_scale, u16* out, int rows, int outputs,
                    int steps) {
    extern __shared__ u8 memory[];
    __shared__ alignas(8) u64 full[STAGES], empty[STAGES];
    __shared__ alignas(8) float scales[BN];
    const int blocks = (rows + BM - 1) / BM, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row = blockIdx.x % blocks * BM, first_output = blockIdx.x / blocks * BN;  // neighbours share w's tile
    const Ring ring = ring_in(memory, full, empty);
    if (warp == GROUPS * 4) {
        if (lane == 0) bring(ring, x_map, w_map, first_row, first_output, steps);
        return;
    }
    bring_scales(scales, w_scale, first_output, outputs);
    wait_before();
    let_next();
    const int low = first_row + warp * 16 + lane / 4;  // a thread has sums of this row, and of the one eight below
    const float2 of_rows = {scale_of(x_scale, low, rows), scale_of(x_scale, low + 8, rows)};
    float sum[MINE];
    sum_up(sum, ring, warp / 4, steps);
    put_down(sum, ring.at, scales, of_rows);
    const u8* const own = memory + (ring.at - shared_at(memory)) + warp * 16 * PITCH;
    const int top = first_row + warp * 16;
#pragma unroll 4
    for (int i = lane; i < 16 * (BN / 8); i += 32) {
        const int row = i / (BN / 8), part = i % (BN / 8);
        if (top + row < rows && first_output + 8 * part < outputs)
            *reinterpret_cast<uint4*>(out + static_cast<long long>(top + row) * outputs + first_output + 8 * part) =
                *reinterpret_cast<const uint4*>(own + row * PITCH + 16 * part);
    }
}
