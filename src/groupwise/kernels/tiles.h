// Matrix tiles (AMX): 16 rows of 32 bfloat16 numbers, and how matrices are put into them.

#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512F__)
#define MATRIX_TILES  // whose rows are as long as a vector
#include <immintrin.h>

constexpr long TILE = 16, DEPTH = 32, WHOLE = TILE * DEPTH;

struct Config { uint8_t palette = 1, start = 0, zeros[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; };

// Eight full tiles, until `_tile_release`.
static inline void open_tiles() {
    Config config;
    for (int t = 0; t < 8; t++) config.bytes[t] = 64, config.rows[t] = TILE;
    __asm__ volatile("" ::"r"(&config) : "memory");  // GCC takes it that the next line reads 8 bytes
    _tile_loadconfig(&config);
}

// Numbers as bfloat16 ones, in the lower halves: PARTS = 1 rounds them, and of three parts the sum is the number itself, for 24 bits are
// three times 8.  To the last of them nothing is added: it needs no rounding, and what is not a number stays so, whatever its bits.
template <int PARTS>
static inline void split(Vec x, Bits *parts) {
    if constexpr (PARTS == 1) parts[0] = upper(x);
    else
        for (int part = 0; part < PARTS; part++) {
            parts[part] = ((Bits)x + (part < PARTS - 1 ? 0x8000 : 0)) >> 16;
            x -= (Vec)(parts[part] << 16);
        }
}

// The first `count` numbers from there on, zeros behind them.
template <int PARTS>
static inline void take(const float *from, long count, Bits *parts) { split<PARTS>(read(from, count), parts); }

template <int PARTS>
static inline void take(const bfloat16 *from, long count, Bits *parts) {
    Halves halves{};
    if (count >= LANES) std::memcpy(&halves, from, sizeof halves);
    else if (count > 0) std::memcpy(&halves, from, count * sizeof(bfloat16));
    parts[0] = __builtin_convertvector(halves, Bits);
}

constexpr long AHEAD = 8 * LANES;  // numbers between those in use and those that are asked for

static inline void ask(const void *from, long bytes) {
    for (long line = 0; line < bytes; line += 64) __builtin_prefetch((const char *)from + line);
}

enum Form { ROWS_OUTSIDE, ROWS_INSIDE };  // a tile's rows: an outer index with 32 inner numbers, or a pair of inner ones for 16 outer

// The numbers (outer, inner) at from + outer * outer_step + inner * inner_step, one of which is 1, as PARTS tiles one behind another;
// zeros where the matrix ends after `outers` and `inners`.
template <int PARTS, class T>
static inline void fill_tiles(Form form, const T *from, long outer_step, long inner_step, long outers, long inners, bfloat16 *tiles) {
    Vec block[PARTS][TILE];
    if (inner_step == 1)
        for (long r = 0; r < TILE; r++) {
            const T *row = from + r * outer_step;
            ask(row + TILE * outer_step, DEPTH * sizeof(T));  // the tiles below these
            long left = r < outers ? inners : 0;
            Bits low[PARTS], high[PARTS];
            take<PARTS>(row, left, low);
            take<PARTS>(row + LANES, left - LANES, high);
            for (int part = 0; part < PARTS; part++) {
                Halves pairs[2] = {__builtin_convertvector(low[part], Halves), __builtin_convertvector(high[part], Halves)};
                std::memcpy(&block[part][r], pairs, sizeof pairs);
            }
        }
    else
        for (long r = 0; r < TILE; r++) {
            const T *row = from + 2 * r * inner_step;
            ask(row + AHEAD, 64), ask(row + inner_step + AHEAD, 64);  // the tiles beside these
            Bits even[PARTS], odd[PARTS];
            take<PARTS>(row, 2 * r < inners ? outers : 0, even);
            take<PARTS>(row + inner_step, 2 * r + 1 < inners ? outers : 0, odd);
            for (int part = 0; part < PARTS; part++) block[part][r] = (Vec)(even[part] | odd[part] << 16);
        }
    for (int part = 0; part < PARTS; part++) {
        if ((inner_step == 1) != (form == ROWS_OUTSIDE)) exchange(block[part]);
        std::memcpy(tiles + part * WHOLE, block[part], sizeof block[part]);
    }
}
#endif
