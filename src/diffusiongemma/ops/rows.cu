// RMS norms with what surrounds them, a row a program: what a layer does behind attention, and behind its experts.
//
// A thread holds the same 8 numbers of every row: one load of 16 bytes each, and all rows are asked for before the first
// is used, so the card's memory is waited for once. Weights are constants: they are asked for while the kernel before
// still runs. Where a row ends within a warp, the threads beyond it do what the last one does and count for nothing.
//
// Sums are made of a thread's 8 numbers, then of the lanes of a warp, then of warps, through shared memory: in one order,
// however many rows there are, and with the same bits in all threads (lanes add in pairs, and a + b is b + a). Each
// exchange between warps has a place of its own there, so nobody overwrites what is still read, and one barrier does.
//
// Legend: D numbers of a row, M rows of a token's experts (0: the kernel behind attention), FP8: results are rounded to
// it, KEEP: what attention left is to stay in the L2 cache, EAGER: what follows is launched before this waits itself.
// All come from `ops/rows_cuda.py`. No header is needed.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int THREADS = (D / 8 + 31) / 32 * 32, WARPS = THREADS / 32;
constexpr int AT_ONCE = THREADS < 704 ? 704 / THREADS : 1;  // programs of a multiprocessor: 88 registers a thread
constexpr int SLOTS = WARPS > 16 ? 32 : 16;                 // of an exchange: one a warp, the others hold zeros
constexpr float FP8_MAX = 448.0f, LEAST = 1.1754944e-38f;   // a smaller scale is none

// ---- instructions -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void wait_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Constants: asked for where this stands, and no compiler may put it off until after a wait.
__device__ __forceinline__ uint4 constants(const u16* p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ u16 constant(const u16* p) {
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}

// Of a row. The kernel before has just written it: no compiler may read it sooner, nor as if it were a constant. What
// other multiprocessors wrote (`relaxed.gpu`) is asked for where this stands; a plain load would be put off until there
// are registers to spare.
__device__ __forceinline__ uint4 written(const u16* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// It is read after much else went through the L2 cache, and is to stay there until then.
__device__ __forceinline__ void keep(u16* p, uint4 v) {
    asm volatile(
        "{\n .reg .b64 stay;\n"
        "createpolicy.fractional.L2::evict_last.b64 stay, 1.0;\n"
        "st.global.L1::evict_last.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, stay;\n}" ::
            "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ float reciprocal_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rounded as a division, for x from 2^-126 to 2^126: what `__frcp_rn` does there, without a way for all others
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return fmaf(y, -fmaf(x, y, -1.0f), y);
}

__device__ __forceinline__ u32 two_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ u32 four_fp8(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | static_cast<u32>(high) << 16;
}

// ---- eight numbers ------------------------------------------------------------------------------------------------

struct Eight { float n[8]; };

__device__ __forceinline__ float wide(u16 bf16) { return __uint_as_float(static_cast<u32>(bf16) << 16); }

__device__ __forceinline__ Eight wide(uint4 v) {
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
    Eight y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        y.n[2 * i] = __uint_as_float(pairs[i] << 16);
        y.n[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000u);
    }
    return y;
}

__device__ __forceinline__ uint4 narrow(const Eight& y) {
    return {two_bf16(y.n[0], y.n[1]), two_bf16(y.n[2], y.n[3]), two_bf16(y.n[4], y.n[5]), two_bf16(y.n[6], y.n[7])};
}

__device__ __forceinline__ Eight added(Eight y, const Eight& z) {
#pragma unroll
    for (int i = 0; i < 8; ++i) y.n[i] += z.n[i];
    return y;
}

__device__ __forceinline__ Eight times(Eight y, float factor) {
#pragma unroll
    for (int i = 0; i < 8; ++i) y.n[i] *= factor;
    return y;
}

__device__ __forceinline__ Eight weighed(Eight y, uint4 weight) {
    const Eight w = wide(weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) y.n[i] *= w.n[i];
    return y;
}

__device__ __forceinline__ float squares(const Eight& y) {
    float even = y.n[0] * y.n[0], odd = y.n[1] * y.n[1];
#pragma unroll
    for (int i = 2; i < 8; i += 2) {
        even += y.n[i] * y.n[i];
        odd += y.n[i + 1] * y.n[i + 1];
    }
    return even + odd;
}

// As whole numbers: so compare the bits of what is not negative, and NaN is the largest.
__device__ __forceinline__ u32 largest(const Eight& y) {
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) top = max(top, __float_as_uint(y.n[i]) & 0x7FFFFFFFu);
    return top;
}

// ---- a row --------------------------------------------------------------------------------------------------------

// What warps leave for each other. First come a barrier, then the answers.
__shared__ alignas(16) u32 sums[3][2][SLOTS];
__shared__ u32 tops[2][SLOTS];

__device__ __forceinline__ bool in_row() { return 8 * THREADS == D || 8 * threadIdx.x < D; }
__device__ __forceinline__ int mine() { return in_row() ? 8 * threadIdx.x : D - 8; }

// The slots that no warp has, before the first barrier
__device__ __forceinline__ void clear_slots() {
    if (threadIdx.x < 32 && threadIdx.x % SLOTS >= WARPS) {
#pragma unroll
        for (int i = 0; i < 6; ++i) sums[i / 2][i % 2][threadIdx.x % SLOTS] = 0;
        tops[0][threadIdx.x % SLOTS] = tops[1][threadIdx.x % SLOTS] = 0;
    }
}

template <int APART>
__device__ __forceinline__ float over_lanes(float sum) {
#pragma unroll
    for (int apart = APART; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

__device__ __forceinline__ void leave_sum(u32* slots, float sum) {
    sum = over_lanes<16>(in_row() ? sum : 0.0f);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = __float_as_uint(sum);
}

// Two at the price of one: half of the lanes go on with each.
__device__ __forceinline__ void leave_sums(u32 (*slots)[SLOTS], float one, float two) {
    const bool upper = threadIdx.x & 16;
    if (!in_row()) one = two = 0.0f;
    const float sum = over_lanes<8>((upper ? two : one) + __shfl_xor_sync(~0u, upper ? one : two, 16));
    if (threadIdx.x % 16 == 0) slots[upper][threadIdx.x / 32] = __float_as_uint(sum);
}

__device__ __forceinline__ float sum_of(const u32* slots) {
    const uint4 four = reinterpret_cast<const uint4*>(slots)[threadIdx.x % (SLOTS / 4)];
    const float low = __uint_as_float(four.x) + __uint_as_float(four.y);
    return over_lanes<SLOTS / 8>(low + (__uint_as_float(four.z) + __uint_as_float(four.w)));
}

__device__ __forceinline__ void leave_top(u32* slots, u32 top) {
    top = __reduce_max_sync(~0u, top);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = top;
}

__device__ __forceinline__ float top_of(const u32* slots) {
    return __uint_as_float(__reduce_max_sync(~0u, slots[threadIdx.x % SLOTS]));
}

// What a row is multiplied with to be normed
__device__ __forceinline__ float norm_of(float squares, float eps) { return reciprocal_root(squares * (1.0f / D) + eps); }

// wide / s, rounded as a division: `back`, which is 1 / s, and one correction (Markstein)
__device__ __forceinline__ float divided(float wide, float s, float back) {
    const float near = wide * back;
    return fmaf(fmaf(-near, s, wide), back, near);
}

__device__ __forceinline__ float fp8_scale(float top) {
    const float s = divided(top, FP8_MAX, 1.0f / FP8_MAX);
    return s < LEAST ? 1.0f : s;
}

__device__ __forceinline__ void put_fp8(u8* row, float* scale, const Eight& y, float top) {
    const float s = fp8_scale(top), back = reciprocal(s);
    float q[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = divided(y.n[i], s, back);
    if (threadIdx.x == 0) *scale = s;
    if (in_row())
        *reinterpret_cast<uint2*>(row + mine()) = {four_fp8(q[0], q[1], q[2], q[3]), four_fp8(q[4], q[5], q[6], q[7])};
}

__device__ __forceinline__ void put_bf16(u16* row, const Eight& y) {
    if (in_row()) *reinterpret_cast<uint4*>(row + mine()) = narrow(y);
}

#if M == 0

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
after_attention_cuda_kernel(const u16* x, const u16* branch, const u16* post, const u16* dense, const u16* sparse,
                            u16* x_out, void* dense_out, float* dense_scale, void* sparse_out, float* sparse_scale,
                            float eps) {
    const i64 row = blockIdx.x * static_cast<i64>(D);
    const uint4 w_post = constants(post + mine());
    const uint4 w_dense = constants(dense + mine()), w_sparse = constants(sparse + mine());
    clear_slots();
    if (EAGER) let_next();
    wait_before();
    if (!EAGER) let_next();
    const uint4 given = written(branch + row + mine()), before = written(x + row + mine());

    const Eight z = wide(given);
    leave_sum(sums[0][0], squares(z));
    __syncthreads();
    const uint4 out = narrow(added(wide(before), weighed(times(z, norm_of(sum_of(sums[0][0]), eps)), w_post)));
    if (in_row()) {
        if (KEEP) keep(x_out + row + mine(), out);
        else *reinterpret_cast<uint4*>(x_out + row + mine()) = out;
    }
    Eight y = wide(out);  // as who reads it from there finds it
    leave_sum(sums[1][0], squares(y));
    __syncthreads();
    y = times(y, norm_of(sum_of(sums[1][0]), eps));
    const Eight to_dense = weighed(y, w_dense), to_sparse = weighed(y, w_sparse);
    if (FP8) {
        leave_top(tops[0], largest(to_dense));
        leave_top(tops[1], largest(to_sparse));
        __syncthreads();
        put_fp8(static_cast<u8*>(dense_out) + row, dense_scale + blockIdx.x, to_dense, top_of(tops[0]));
        put_fp8(static_cast<u8*>(sparse_out) + row, sparse_scale + blockIdx.x, to_sparse, top_of(tops[1]));
    } else {
        put_bf16(static_cast<u16*>(dense_out) + row, to_dense);
        put_bf16(static_cast<u16*>(sparse_out) + row, to_sparse);
    }
}

#else

// From row `first` on the scalar is `other`, where there is one.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
after_feed_forward_cuda_kernel(const u16* x, const u16* dense, const u16* sparse, const u16* after_dense,
                               const u16* after_sparse, const u16* after_sum, const u16* scalar, int first,
                               const u16* other, const u16* following, u16* x_out, void* out, float* scale, float eps) {
    const int at = blockIdx.x;
    const i64 row = at * static_cast<i64>(D);
    const uint4 w_dense = constants(after_dense + mine()), w_sparse = constants(after_sparse + mine());
    const uint4 w_sum = constants(after_sum + mine()), w_next = constants(following + mine());
    const float factor = wide(constant(other != nullptr && at >= first ? other : scalar));
    clear_slots();
    wait_before();
    let_next();
    uint4 pairs[M];
#pragma unroll
    for (int slot = 0; slot < M; ++slot) pairs[slot] = written(sparse + row * M + slot * D + mine());
    const uint4 before = written(x + row + mine()), given = written(dense + row + mine());

    Eight s = wide(pairs[0]);  // the token's experts, in order; their sum is rounded as if it had been stored
#pragma unroll
    for (int slot = 1; slot < M; ++slot) s = added(s, wide(pairs[slot]));
    s = wide(narrow(s));
    const Eight d = wide(given);
    leave_sums(sums[0], squares(d), squares(s));
    __syncthreads();
    const float d_norm = norm_of(sum_of(sums[0][0]), eps), s_norm = norm_of(sum_of(sums[0][1]), eps);
    Eight both = added(weighed(times(d, d_norm), w_dense), weighed(times(s, s_norm), w_sparse));
    leave_sum(sums[1][0], squares(both));
    __syncthreads();
    both = times(both, norm_of(sum_of(sums[1][0]), eps));
    const uint4 result = narrow(times(added(wide(before), weighed(both, w_sum)), factor));
    if (in_row()) *reinterpret_cast<uint4*>(x_out + row + mine()) = result;
    Eight y = wide(result);  // as who reads it from there finds it
    leave_sum(sums[2][0], squares(y));
    __syncthreads();
    y = weighed(times(y, norm_of(sum_of(sums[2][0]), eps)), w_next);
    if (FP8) {
        leave_top(tops[0], largest(y));
        __syncthreads();
        put_fp8(static_cast<u8*>(out) + row, scale + at, y, top_of(tops[0]));
    } else {
        put_bf16(static_cast<u16*>(out) + row, y);
    }
}

#endif
