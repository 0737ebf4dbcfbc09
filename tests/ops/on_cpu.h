// A kernel in CUDA C++ on a CPU, for tests: a program's threads are fibres, which change places where lanes or warps
// exchange something. `on_cpu.py` puts this before a kernel's source, in place of its instructions.
//
// A warp runs until all its lanes are at a barrier, then the next warp does: what is read before a barrier that should
// have been waited for is not there yet. Shared memory holds NaN when a program begins. Lanes or warps that do not all
// come to the same place are an error, as they would hang on a card.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shared_memory")))
#define alignas(bytes) __attribute__((aligned(bytes)))  // which may stand behind it

extern unsigned char __start_shared_memory[], __stop_shared_memory[];

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Place { int x; };
static Place threadIdx, blockIdx;

// ---- fibres -------------------------------------------------------------------------------------------------------

enum What { BEGINS, EXCHANGES, WAITS, ENDS };

struct Fibre {
    ucontext_t at;
    What what;
    unsigned given[2];  // to other lanes, by turns: who is ahead does not overwrite what others have yet to read
    int turn;
    std::vector<char> stack;
};

static std::vector<Fibre> fibres;
static ucontext_t host;
static void (*body)();
static void** given;

static void whole() {
    body();
    fibres[threadIdx.x].what = ENDS;
    swapcontext(&fibres[threadIdx.x].at, &host);
}

static void resume(int thread) {
    threadIdx.x = thread;
    swapcontext(&host, &fibres[thread].at);
}

static void stop(What what) {
    Fibre& own = fibres[threadIdx.x];
    own.what = what;
    swapcontext(&own.at, &host);
}

// Until a warp's lanes have come to a barrier or to the end: where, or BEGINS if they have not all come to the same place
static What through(int warp, bool backwards) {
    for (;;) {
        for (int i = 0; i < 32; ++i) resume(32 * warp + (backwards ? 31 - i : i));
        const What what = fibres[32 * warp].what;
        for (int i = 0; i < 32; ++i)
            if (fibres[32 * warp + i].what != what) return BEGINS;
        if (what != EXCHANGES) return what;
    }
}

static bool program(int threads, bool backwards) {
    memset(__start_shared_memory, 0xFF, __stop_shared_memory - __start_shared_memory);
    fibres.resize(threads);
    for (Fibre& f : fibres) {
        f.stack.resize(1 << 14);
        getcontext(&f.at);
        f.at.uc_stack.ss_sp = f.stack.data();
        f.at.uc_stack.ss_size = f.stack.size();
        makecontext(&f.at, whole, 0);
    }
    for (;;) {
        What all = BEGINS;
        for (int i = 0; i < threads / 32; ++i) {
            const What what = through(backwards ? threads / 32 - 1 - i : i, backwards);
            if (what == BEGINS || (i > 0 && what != all)) return false;
            all = what;
        }
        if (all == ENDS) return true;
    }
}

template <class... A, size_t... I>
static void call(void (*kernel)(A...), std::index_sequence<I...>) {
    kernel(*static_cast<A*>(given[I])...);
}

template <class... A>
static void call(void (*kernel)(A...)) {
    call(kernel, std::index_sequence_for<A...>());
}

template <class... A>
constexpr int arguments(void (*)(A...)) {
    return sizeof...(A);
}

// ---- instructions that all kernels have ---------------------------------------------------------------------------

static void __syncthreads() { stop(WAITS); }

static unsigned from_lane(unsigned value, int lane) {
    Fibre& own = fibres[threadIdx.x];
    own.turn ^= 1;
    own.given[own.turn] = value;
    stop(EXCHANGES);
    return fibres[threadIdx.x / 32 * 32 + lane].given[fibres[threadIdx.x].turn];
}

static float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static float __shfl_xor_sync(unsigned, float value, int apart) {
    return __uint_as_float(from_lane(__float_as_uint(value), threadIdx.x % 32 ^ apart));
}

static unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }

static unsigned __reduce_max_sync(unsigned, unsigned value) {
    for (int apart = 1; apart < 32; apart *= 2) value = max(value, from_lane(value, threadIdx.x % 32 ^ apart));
    return value;
}

// ---- number formats -----------------------------------------------------------------------------------------------

static unsigned to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// e4m3, to the nearest, halves to the even one; what is larger than 448 is 448
static unsigned to_fp8(float x) {
    const unsigned sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return 0x7F;
    const double size = std::fmin(std::fabs(static_cast<double>(x)), 448.0);
    const int power = size < 0x1p-6 ? -6 : std::ilogb(size);
    const int steps = static_cast<int>(std::nearbyint(size / std::ldexp(1.0, power - 3)));  // 8 to 16, or fewer
    return sign | static_cast<unsigned>((power + 6) * 8 + steps);
}
