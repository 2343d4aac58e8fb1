// Panels: LANES rows of a matrix side by side, so that a vector holds one number of each; in bfloat16 a pair of neighbouring ones.

#pragma once

#include "vectors.h"

constexpr int FEW = LANES == 16 ? 7 : LANES == 8 ? 3 : 2, MOST = 2 * FEW;  // rows whose sums with four panels, with two fill the registers
constexpr long VECTORS_AHEAD = 64;  // between the numbers in use and those that are asked for

// The micro-kernel's multiply-add of one number, or pair, and a vector of them; DEEP: how many of what is summed over.
template <typename T>
struct MicroKernel;

template <>
struct MicroKernel<float> {
    static constexpr long DEEP = 1;
    typedef Vec Panel;

    static Panel panel(Vec packed) { return packed; }
    static Vec add(Vec total, const float *number, Panel panel) { return plus(total, all(*number), panel); }
};

// In pairs, as AVX-512 multiplies them (subnormal ones as zeros), or one after the other.
template <>
struct MicroKernel<bfloat16> {
    static constexpr long DEEP = 2;

    static uint32_t word(const float *pair) {
        uint32_t found;
        std::memcpy(&found, pair, sizeof found);
        return found;
    }
#if defined(__AVX512BF16__)
    typedef Vec Panel;

    static Panel panel(Vec packed) { return packed; }
    static Vec add(Vec total, const float *pair, Panel panel) {
        return (Vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)bits(word(pair)), (__m512bh)panel);
    }
#else
    struct Panel { Vec even, odd; };

    static Vec high(Bits bits) { return (Vec)(bits & 0xffff0000); }
    static Panel panel(Vec packed) { return {(Vec)((Bits)packed << 16), high((Bits)packed)}; }
    static Vec add(Vec total, const float *pair, Panel panel) {
        Bits both = (Bits)bits(word(pair));
        return plus(plus(total, (Vec)(both << 16), panel.even), high(both), panel.odd);
    }
#endif
};

template <typename T>
static inline long steps_of(long inners) { return (inners + MicroKernel<T>::DEEP - 1) / MicroKernel<T>::DEEP; }

// The numbers (outer, inner) at from + outer * outer_step + inner * inner_step, one of which is 1, of no more than LANES outers: for every
// step inside `row` of them (LANES at most) side by side, zeros where there is no outer.
template <typename T, typename Source>
static inline void fill_panel(const Source *from, long outer_step, long inner_step, long outers, long inners, float *to, long row) {
    constexpr long DEEP = MicroKernel<T>::DEEP;
    const float *end = to + steps_of<T>(inners) * row;
    for (long i = 0; i < inners; i += LANES, from += LANES * inner_step) {
        Vec block[LANES];
        long left = inners - i;
        for (long k = 0; k < LANES; k++)
            block[k] = inner_step == 1 ? (k < outers ? read(from + k * outer_step, left) : all(0.0f))
                                       : (k < left ? read(from + k * inner_step, outers) : all(0.0f));
        if (inner_step == 1) exchange(block);
        for (long k = 0; k < LANES && k < left; k += DEEP, to += row) {
            Vec found = block[k];
            if constexpr (DEEP == 2) {
                Bits even = __builtin_convertvector(rounded(found), Bits), odd = __builtin_convertvector(rounded(block[k + 1]), Bits);
                found = (Vec)(even | odd << 16);
            }
            write(to, found, end - to);  // what is too much is written over by the next
        }
    }
}

// M rows, their numbers of a step side by side, times N panels: out = or (before) += the sums, the first of which begin with a bias.
// columns: how many there are from the first panel's on.  next: a panel that is asked for on the way, or null.
template <typename T, int M, int N, typename Out>
static void pass(const float *numbers, const float *panels, long steps, const float *bias, const float *before, Out *out, long out_row,
                 long columns, const float *next) {
    typedef MicroKernel<T> Kernel;
    Vec total[N][M];
    for (int n = 0; n < N; n++) {
        Vec start = bias ? read(bias + n * LANES, columns - n * LANES) : all(0.0f);
#pragma GCC unroll 32
        for (int m = 0; m < M; m++) total[n][m] = start;
    }
    for (long i = 0; i < steps; i++) {
        typename Kernel::Panel panel[N];
        for (int n = 0; n < N; n++) {
            panel[n] = Kernel::panel(load(panels + (n * steps + i) * LANES));
            __builtin_prefetch(panels + (n * steps + i + VECTORS_AHEAD) * LANES);
        }
        if (next) __builtin_prefetch(next + i * LANES, 0, 2);
#pragma GCC unroll 32
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) total[n][m] = Kernel::add(total[n][m], numbers + i * M + m, panel[n]);
    }
    for (int n = 0; n < N; n++)
#pragma GCC unroll 32
        for (int m = 0; m < M; m++) {
            long left = columns - n * LANES, place = m * out_row + n * LANES;
            if (left <= 0) continue;
            write(out + place, before ? total[n][m] + read(before + place, left) : total[n][m], left);
        }
}

template <typename T, typename Out>
using Pass = void(const float *, const float *, long, const float *, const float *, Out *, long, long, const float *);

template <typename T, int N, typename Out, int... M>
static constexpr Pass<T, Out> *pass_of(int rows, std::integer_sequence<int, M...>) {
    constexpr Pass<T, Out> *made[] = {pass<T, M + 1, N, Out>...};
    return made[rows - 1];
}

// The pass for so many rows, MOST or (four panels) FEW at most, and one, two or four panels.
template <typename T, typename Out>
static inline Pass<T, Out> *pass_for(int rows, int panels) {
    if (panels == 4) return pass_of<T, 4, Out>(rows, std::make_integer_sequence<int, FEW>{});
    if (panels == 2) return pass_of<T, 2, Out>(rows, std::make_integer_sequence<int, MOST>{});
    return pass_of<T, 1, Out>(rows, std::make_integer_sequence<int, MOST>{});
}
