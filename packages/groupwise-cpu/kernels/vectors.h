// Vectors of floats as GCC and Clang know them on every processor, and the one product that the kernels are made of.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels.h"

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 6, WIDE = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 6, WIDE = 2;
#else
constexpr int LANES = 4, ROWS = 6, WIDE = 4;
#endif
// A tile of ROWS x (WIDE vectors) is summed in registers.

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

#if defined(__AVX__)
#include <immintrin.h>
#endif


static inline long padded(long count) { return (count + LANES - 1) / LANES * LANES; }
static inline Vec all(float x) { return x - (Vec){}; }
static inline Vec bits(uint32_t x) { return (Vec)(x - (Bits){}); }  // in every lane
static inline Vec load(const float *from) { Vec x; std::memcpy(&x, from, sizeof x); return x; }
static inline void store(float *to, Vec x) { std::memcpy(to, &x, sizeof x); }

static inline Vec load(const bfloat16 *from) {
    Halves half;
    std::memcpy(&half, from, sizeof half);
    return (Vec)(__builtin_convertvector(half, Bits) << 16);
}

// Rounded to nearest, ties to even; what is not a number stays so.  AVX-512's own rounding makes zeros of subnormal numbers.
static inline Halves rounded(Vec x) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    Bits bits = (Bits)x, found = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Bits number = (Bits)(x == x);
    return __builtin_convertvector((found & number) | (0x7fc0 & ~number), Halves);
#endif
}

static inline void store(bfloat16 *to, Vec x) {
    Halves half = rounded(x);
    std::memcpy(to, &half, sizeof half);
}

// total + a b, rounded once where the processor can.  Left to the compiler (as it is on others than x86), it would be here and not there,
// and a number's bits would depend on what is computed beside it: on AMD's processors they did.
static inline Vec plus(Vec total, Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)total);
#elif defined(__AVX__) && defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)total);
#else
    return total + a * b;
#endif
}

// The first `count` numbers from there on, zeros behind them.
template <class T>
static inline Vec read(const T *from, long count) {
    if (count >= LANES) return load(from);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    uint32_t places = count > 0 ? (1u << count) - 1 : 0;
    if constexpr (sizeof(T) == 4) return (Vec)_mm512_maskz_loadu_ps(places, from);
    else return (Vec)(__builtin_convertvector((Halves)_mm256_maskz_loadu_epi16(places, from), Bits) << 16);
#endif
    T held[LANES] = {};
    if (count > 0) std::memcpy(held, from, count * sizeof(T));
    return load(held);
}

// The first `count` numbers to there.
template <class T>
static inline void write(T *to, Vec x, long count) {
    if (count >= LANES) return store(to, x);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    uint32_t places = count > 0 ? (1u << count) - 1 : 0;
    if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(to, places, (__m512)x);
    else return _mm256_mask_storeu_epi16(to, places, (__m256i)rounded(x));
#endif
    T held[LANES];
    store(held, x);
    std::memcpy(to, held, count * sizeof(T));
}

static inline Vec select(Ints when, Vec yes, Vec no) { return (Vec)((when & (Ints)yes) | (~when & (Ints)no)); }

static inline Vec largest(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select(a > b, a, b);
#endif
}

// Lane i of step H: of the first vector where i / H is even, of the second where it is odd; `second`: of each pair's other half.
template <int H, bool second>
constexpr int from_pair(int i) { return i / H % 2 ? LANES + i - (second ? 0 : H) : i + (second ? H : 0); }

template <int H, bool second, int... I>
static inline Vec halves(Vec a, Vec b, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, from_pair<H, second>(I)...);
#else
    return __builtin_shuffle(a, b, (Ints){from_pair<H, second>(I)...});
#endif
}

// Lane i of the result is the sum of vector i.
template <int H = 1>
static inline Vec sums(const Vec *vectors) {
    if constexpr (H == LANES) return vectors[0];
    else {
        constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
        Vec pairs[LANES / H / 2];
        for (int i = 0; i < LANES / H / 2; i++) {
            Vec a = vectors[2 * i], b = vectors[2 * i + 1];
            pairs[i] = halves<H, false>(a, b, lanes) + halves<H, true>(a, b, lanes);
        }
        return sums<2 * H>(pairs);
    }
}

// Lane i is what lane i + H was.
template <int H, int... I>
static inline Vec behind(Vec x, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(x, x, ((I + H) % LANES)...);
#else
    return __builtin_shuffle(x, (Ints){(I + H) % LANES...});
#endif
}

template <int H = LANES / 2>
static inline float sum(Vec x) {
    x += behind<H>(x, std::make_integer_sequence<int, LANES>{});
    if constexpr (H > 1) return sum<H / 2>(x);
    return x[0];
}

template <int H = LANES / 2>
static inline float peak(Vec x) {
    x = largest(x, behind<H>(x, std::make_integer_sequence<int, LANES>{}));
    if constexpr (H > 1) return peak<H / 2>(x);
    return x[0];
}

// e^x within two units in the last place (Cephes' polynomial); 0 below -87, infinity above 88.
static inline Vec exponential(Vec x) {
#if defined(__AVX512F__)
    Vec held = (Vec)_mm512_max_ps(_mm512_set1_ps(-87.3f), _mm512_min_ps(_mm512_set1_ps(89.0f), (__m512)x));
    Vec twos = (Vec)_mm512_roundscale_ps((__m512)(held * 1.44269504088896341f), 0);
#else
    const float rounder = 12582912.0f;  // 1.5 x 2^23: adding it leaves no digits behind the point
    Vec held = select(x > 89.0f, all(89.0f), x);
    held = select(held < -87.3f, all(-87.3f), held);
    Vec twos = (held * 1.44269504088896341f + rounder) - rounder;
#endif
    Vec r = (held - twos * 0.693359375f) + twos * 2.12194440e-4f;
    Vec y = all(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
    y = (Vec)_mm512_scalef_ps((__m512)y, (__m512)twos);
#else
    // 2^128 is no float: two factors reach it.
    Ints whole = __builtin_convertvector(twos, Ints), half = whole >> 1;
    y = y * (Vec)((half + 127) << 23) * (Vec)((whole - half + 127) << 23);
#endif
    return select(x < -87.3f, all(0.0f), y);
}

// Scores (a whole number of vectors) -> e^(score - logsumexp); returns the logsumexp.
static inline float softmax(float *scores, long count) {
    Vec top = load(scores), total = all(0.0f);
    for (long t = LANES; t < count; t += LANES) top = largest(top, load(scores + t));
    float highest = peak(top);
    for (long t = 0; t < count; t += LANES) {
        Vec weight = exponential(load(scores + t) - highest);
        store(scores + t, weight);
        total += weight;
    }
    float whole = sum(total), share = 1.0f / whole;
    for (long t = 0; t < count; t += LANES) store(scores + t, load(scores + t) * share);
    return highest + std::log(whole);
}

// A product's second matrix as it lies in memory, rows of vectors side by side, and how its vectors are multiplied by numbers of the first.
struct Plain {
    static constexpr int DEEP = 1, PARTS = 1;  // of what is summed over, how much a vector holds, and in how many parts it is read
    const float *from;
    long row;

    Plain behind(long columns) const { return {from + columns, row}; }
    Vec at(long k, int, int n) const { return load(from + k * row + n * LANES); }
    static Vec broadcast(const float *number) { return all(*number); }
    static Vec add(Vec total, Vec number, Vec row) { return plus(total, number, row); }
};

// Every number is summed in the same order, whatever is computed beside it: a row's bits do not depend on its neighbours.
//
// C (M x N vectors) = or += A (M x depth) B (depth x N vectors), DEEP numbers of the depth at a time; steps: how far apart neighbours
// lie in memory.
template <int M, int N, typename A, typename B>
static inline void tile(const A *a, long a_row, long a_column, B b, float *c, long c_row, long depth, bool add) {
    Vec total[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) total[m][n] = add ? load(c + m * c_row + n * LANES) : all(0.0f);
    for (long k = 0; k < depth; k += B::DEEP)
        for (int part = 0; part < B::PARTS; part++) {
            Vec row[N];
            for (int n = 0; n < N; n++) row[n] = b.at(k, part, n);
            for (int m = 0; m < M; m++) {
                Vec number = B::broadcast(a + m * a_row + (k + part) * a_column);
                for (int n = 0; n < N; n++) total[m][n] = B::add(total[m][n], number, row[n]);
            }
        }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(c + m * c_row + n * LANES, total[m][n]);
}

template <int N, typename A, typename B>
static inline void tiles(long rows, const A *a, long a_row, long a_column, B b, float *c, long c_row, long depth, bool add) {
    long m = 0;
    for (; m + ROWS <= rows; m += ROWS) tile<ROWS, N>(a + m * a_row, a_row, a_column, b, c + m * c_row, c_row, depth, add);
    a += m * a_row, c += m * c_row;
    switch (rows - m) {
        case 1: return tile<1, N>(a, a_row, a_column, b, c, c_row, depth, add);
        case 2: return tile<2, N>(a, a_row, a_column, b, c, c_row, depth, add);
        case 3: return tile<3, N>(a, a_row, a_column, b, c, c_row, depth, add);
        case 4: return tile<4, N>(a, a_row, a_column, b, c, c_row, depth, add);
        case 5: return tile<5, N>(a, a_row, a_column, b, c, c_row, depth, add);
    }
}

// The same for any number of rows and a whole number of vectors in a row of C.
template <typename A, typename B>
static inline void product(long rows, long columns, long depth, const A *a, long a_row, long a_column, B b, float *c, long c_row,
                           bool add) {
    long n = 0;
    for (; n + WIDE * LANES <= columns; n += WIDE * LANES)
        tiles<WIDE>(rows, a, a_row, a_column, b.behind(n), c + n, c_row, depth, add);
    b = b.behind(n), c += n;
    switch ((columns - n) / LANES) {
        case 1: return tiles<1>(rows, a, a_row, a_column, b, c, c_row, depth, add);
        case 2: return tiles<2>(rows, a, a_row, a_column, b, c, c_row, depth, add);
        case 3: return tiles<3>(rows, a, a_row, a_column, b, c, c_row, depth, add);
    }
}

static inline void product(long rows, long columns, long depth, const float *a, long a_row, long a_column, const float *b, long b_row,
                           float *c, long c_row, bool add) {
    product(rows, columns, depth, a, a_row, a_column, Plain{b, b_row}, c, c_row, add);
}

static inline void prefetch(const void *from, long bytes) {
    for (long line = 0; line < bytes; line += 64) __builtin_prefetch((const char *)from + line);
}

// Workspace for a thread's intermediate results, from the beginning of a cache line on; it stays with the thread.
template <int which = 0>
static inline float *workspace(long numbers) {
    static thread_local std::vector<float> kept;
    if ((long)kept.size() < numbers + 16) kept.resize(numbers + 16);
    return (float *)(((uintptr_t)kept.data() + 63) / 64 * 64);
}

// LANES rows of LANES numbers, exchanged.
template <int H = LANES / 2>
static inline void exchange(Vec *block) {
    constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
    for (int i = 0; i < LANES; i++)
        if (i / H % 2 == 0) {
            Vec a = block[i], b = block[i + H];
            block[i] = halves<H, false>(a, b, lanes), block[i + H] = halves<H, true>(a, b, lanes);
        }
    if constexpr (H > 1) exchange<H / 2>(block);
}

static inline void turn_block(const float *rows, long width, float *columns, long across) {
    Vec block[LANES];
    for (int i = 0; i < LANES; i++) block[i] = load(rows + i * width);
    exchange(block);
    for (int i = 0; i < LANES; i++) store(columns + i * across, block[i]);
}

// Rows (count, width) -> columns of (width, across) from `place` on.
static inline void transpose(const float *rows, long count, long width, float *columns, long across, long place) {
    for (long t = 0; t < count; t += LANES)
        for (long d = 0; d < width; d += LANES) {
            if (t + LANES <= count) turn_block(rows + t * width + d, width, columns + d * across + place + t, across);
            else
                for (long i = 0; i < LANES; i++)
                    for (long j = t; j < count; j++) columns[(d + i) * across + place + j] = rows[j * width + d + i];
        }
}
