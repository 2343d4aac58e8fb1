// Matrix tiles (AMX): 16 rows of 32 bfloat16 numbers, and how matrices are put into them.

#pragma once

#include "vectors.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define MATRIX_TILES  // whose rows are as long as a vector

constexpr long TILE = 16, DEPTH = 32, WHOLE = TILE * DEPTH, PAIR = 2 * TILE;

struct Config { uint8_t palette = 1, start = 0, zeros[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; };

// Eight tiles, until `_tile_release`: two of columns, which are full, and six of so many rows.
static inline void open_tiles(long rows = TILE) {
    Config config;
    for (int t = 0; t < 8; t++) config.bytes[t] = 64, config.rows[t] = t < 6 ? rows : TILE;
    __asm__ volatile("" ::"r"(&config) : "memory");  // GCC takes it that the next line reads 8 bytes
    _tile_loadconfig(&config);
}

// Numbers as bfloat16 ones, in the lower halves: PARTS = 1 rounds them, and of three parts the sum is the number itself, for 24 bits are
// three times 8.  To the last of them nothing is added: it needs no rounding, and what is not a number stays so, whatever its bits.
template <int PARTS>
static inline void split(Vec x, Bits *parts) {
    if constexpr (PARTS == 1) parts[0] = __builtin_convertvector(rounded(x), Bits);
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

enum Form { ROWS_OUTSIDE, ROWS_INSIDE };  // a tile's rows: an outer index with 32 inner numbers, or a pair of inner ones for 16 outer

// The numbers (outer, inner) at from + outer * outer_step + inner * inner_step, one of which is 1, as PARTS tiles one behind another;
// zeros where the matrix ends after `outers` and `inners`.
template <int PARTS, class T>
static inline void fill_tiles(Form form, const T *from, long outer_step, long inner_step, long outers, long inners, bfloat16 *tiles) {
    Vec block[PARTS][TILE];
    if (inner_step == 1)
        for (long r = 0; r < TILE; r++) {
            const T *row = from + r * outer_step;
            prefetch(row + TILE * outer_step, DEPTH * sizeof(T));  // the tiles below these
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
            prefetch(row + DEPTH * inner_step, 64), prefetch(row + (DEPTH + 1) * inner_step, 64);  // the tiles below these
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

static inline void load_rows(const bfloat16 *first, const bfloat16 *second) {
    _tile_loadd(4, first, 64);
    _tile_loadd(5, second, 64);
}

static inline void load_columns(const bfloat16 *first, const bfloat16 *second) {
    _tile_loadd(6, first, 64);
    _tile_loadd(7, second, 64);
}

static inline void multiply_tiles() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
}

// A matrix in tiles of so many parts each: how many numbers from one to the next outside, and inside (what is summed over).
struct Tiles {
    const bfloat16 *from;
    long outer, inner;
};

// 32 x 32 numbers, `row` apart = or += two tiles of rows times two of columns, in every combination of parts that counts, over `depth` of
// them.
template <int PARTS>
static inline void tile_kernel(Tiles rows, Tiles columns, long depth, float *sums, long row, bool add) {
    constexpr long MID = WHOLE, LOW = 2 * WHOLE;
    float *right = sums + TILE, *below = sums + TILE * row, *last = below + TILE;
    __asm__ volatile("" ::: "memory");  // what is loaded below is in memory by now
    if (add) {
        _tile_loadd(0, sums, row * 4);
        _tile_loadd(1, below, row * 4);
        _tile_loadd(2, right, row * 4);
        _tile_loadd(3, last, row * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const bfloat16 *a = rows.from, *b = columns.from;
    for (long k = 0; k < depth; k++, a += rows.inner, b += columns.inner) {
        const bfloat16 *a_next = a + rows.outer, *b_next = b + columns.outer;
        if constexpr (PARTS == 3) {  // in an order in which little is loaded twice
            load_rows(a + LOW, a_next + LOW), load_columns(b, b_next), multiply_tiles();
            load_rows(a, a_next), multiply_tiles();
            load_columns(b + LOW, b_next + LOW), multiply_tiles();
            load_columns(b + MID, b_next + MID), multiply_tiles();
            load_rows(a + MID, a_next + MID), multiply_tiles();
            load_columns(b, b_next), multiply_tiles();
        } else {
            load_rows(a, a_next), load_columns(b, b_next), multiply_tiles();
        }
    }
    _tile_stored(0, sums, row * 4);
    _tile_stored(1, below, row * 4);
    _tile_stored(2, right, row * 4);
    _tile_stored(3, last, row * 4);
    __asm__ volatile("" ::: "memory");
}
#endif
