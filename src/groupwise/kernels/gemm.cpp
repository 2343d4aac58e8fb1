// Products of whole matrices on matrix tiles: bfloat16 numbers as they are, float32 numbers as sums of three bfloat16 numbers.
//
// x = hi + mid + lo holds all 24 bits of a float32 number, and x y is six products of parts; the other three lie below its rounding
// (Henry, Tang, Heinecke: Leveraging the bfloat16 Artificial Intelligence Datatype, 2019).  All sums are float32.
//
// (M, K) x (K, N) -> (M, N) in blocks: `COLUMNS` columns of b and a stretch of K are packed into tiles once and pass by blocks of
// a's rows, packed likewise, that stay in a core's cache.

#include "tiles.h"

#ifdef MATRIX_TILES
constexpr long COLUMNS = 1024, FEW_COLUMNS = 128, BLOCK_ROWS = 256, STRETCH = 1536;  // of K, divided by the number of parts
constexpr long PAIR = 2 * TILE;

static inline long ceiling(long count, long of) { return (count + of - 1) / of; }

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

static inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

static inline void store_sums(float *to, long row) {
    _tile_stored(0, to, row * 4);
    _tile_stored(1, to + TILE * row, row * 4);
    _tile_stored(2, to + TILE, row * 4);
    _tile_stored(3, to + TILE * row + TILE, row * 4);
}

// Two tiles of rows meet two of columns, in every combination of parts that counts, over a stretch of `depth` tiles.
template <int PARTS>
static inline void meet(const bfloat16 *a, const bfloat16 *b, long depth) {
    constexpr long STEP = PARTS * WHOLE, MID = WHOLE, LOW = 2 * WHOLE;
    const bfloat16 *a_next = a + depth * STEP, *b_next = b + depth * STEP;
    for (long k = 0; k < depth; k++, a += STEP, a_next += STEP, b += STEP, b_next += STEP) {
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
}

// One square of the result, `rows` x `columns` of it inside.  before: what it is added to, rows of it `before_row` apart; or null.  The
// sums begin with nothing, so that what is added to many times loses no digits of each.
template <int PARTS>
static void square(const bfloat16 *a, const bfloat16 *b, long depth, const float *before, long before_row, float *out, long out_row, long rows,
                   long columns) {
    alignas(64) float sums[PAIR * PAIR];
    __asm__ volatile("" ::: "memory");  // what is loaded below is in memory by now
    clear_sums();
    meet<PARTS>(a, b, depth);
    store_sums(sums, PAIR);
    __asm__ volatile("" ::: "memory");
    for (long m = 0; m < PAIR && m < rows; m++)
        for (long n = 0; n < PAIR && n < columns; n += LANES) {
            Vec found = load(sums + m * PAIR + n);
            if (before) found += read(before + m * before_row + n, columns - n);
            write(out + m * out_row + n, found, columns - n);
        }
}

struct Sizes { long rows, columns, depth; };
struct Steps { long row, column; };

// A block of a matrix in tiles, `outers` x `inners` numbers: every 16 outer ones behind another, a stretch of `depth` tiles each.  The
// part'th of so many parts of the work; what lies side by side in memory is read one after another.
template <int PARTS, class T>
static void pack(Form form, const T *from, long outer_step, long inner_step, long outers, long inners, bfloat16 *tiles, long part, long of) {
    long depth = ceiling(inners, DEPTH), across = ceiling(outers, PAIR) * 2, all = across * depth;
    for (long place = all * part / of; place < all * (part + 1) / of; place++) {
        long outer = inner_step == 1 ? place / depth : place % across, inner = inner_step == 1 ? place % depth : place / across;
        fill_tiles<PARTS>(form, from + outer * TILE * outer_step + inner * DEPTH * inner_step, outer_step, inner_step,
                          outers - outer * TILE, inners - inner * DEPTH, tiles + (outer * depth + inner) * PARTS * WHOLE);
    }
}

template <int PARTS, class A, class B>
static void multiply(const A *a, Steps a_step, const B *b, Steps b_step, float *out, long out_row, Sizes size, const float *bias, bool add,
                     int threads) {
    long stretches = ceiling(size.depth, STRETCH / PARTS), stretch = ceiling(ceiling(size.depth, stretches), DEPTH) * DEPTH;
    long height = ceiling(ceiling(size.rows, threads), PAIR) * PAIR;
    if (height > BLOCK_ROWS) height = BLOCK_ROWS;
    // Where every thread has one block of rows, which it packs once, few columns at a time stay in the cache between packing and use.
    bool once = height * threads >= size.rows;
    long width = once ? FEW_COLUMNS : COLUMNS;
    if (width > size.columns) width = ceiling(size.columns, PAIR) * PAIR;
    bfloat16 *columns = (bfloat16 *)room<1>(stretch * width * PARTS / 2);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        open_tiles();
        bfloat16 *rows = (bfloat16 *)room(height * stretch * PARTS / 2);
        for (long first_k = 0; first_k < size.depth; first_k += stretch)
            for (long first_n = 0; first_n < size.columns; first_n += width) {
                long wide = size.columns - first_n < width ? size.columns - first_n : width;
                long deep = size.depth - first_k < stretch ? size.depth - first_k : stretch, depth = ceiling(deep, DEPTH);
#pragma omp for schedule(static)
                for (long part = 0; part < threads; part++)
                    pack<PARTS>(ROWS_INSIDE, b + first_n * b_step.column + first_k * b_step.row, b_step.column, b_step.row, wide, deep,
                                columns, part, threads);
#pragma omp for schedule(static, 1)
                for (long first_m = 0; first_m < size.rows; first_m += height) {
                    long high = size.rows - first_m < height ? size.rows - first_m : height;
                    if (first_n == 0 || !once)
                        pack<PARTS>(ROWS_OUTSIDE, a + first_m * a_step.row + first_k * a_step.column, a_step.row, a_step.column, high, deep,
                                    rows, 0, 1);
                    for (long n = 0; n < wide; n += PAIR)
                        for (long m = 0; m < high; m += PAIR) {
                            float *to = out + (first_m + m) * out_row + first_n + n;
                            bool more = first_k || add;
                            square<PARTS>(rows + m / TILE * depth * PARTS * WHOLE, columns + n / TILE * depth * PARTS * WHOLE, depth,
                                          more ? to : bias ? bias + first_n + n : nullptr, more ? out_row : 0, to, out_row, high - m, wide - n);
                        }
                }
            }
        _tile_release();
    }
}

// out = a b + bias, or out += a b.  Numbers lie steps apart, one of a matrix's two steps is 1, out's rows are whole.  halves: bits 0 and 1:
// a, b are bfloat16.
extern "C" void gemm(int halves, const void *a, long a_row, long a_column, const void *b, long b_row, long b_column, float *out, long out_row,
                     long rows, long columns, long depth, const float *bias, int add, int threads) {
    Sizes size{rows, columns, depth};
    Steps a_step{a_row, a_column}, b_step{b_row, b_column};
    auto *af = (const float *)a, *bf = (const float *)b;
    auto *ah = (const bfloat16 *)a, *bh = (const bfloat16 *)b;
    switch (halves) {
        case 0: return multiply<3>(af, a_step, bf, b_step, out, out_row, size, bias, add, threads);
        case 1: return multiply<1>(ah, a_step, bf, b_step, out, out_row, size, bias, add, threads);
        case 2: return multiply<1>(af, a_step, bh, b_step, out, out_row, size, bias, add, threads);
        case 3: return multiply<1>(ah, a_step, bh, b_step, out, out_row, size, bias, add, threads);
    }
}
#endif
