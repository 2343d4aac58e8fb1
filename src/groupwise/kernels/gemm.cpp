// Products of whole matrices on matrix tiles: bfloat16 numbers as they are, float32 numbers as sums of three bfloat16 numbers.
//
// x = hi + mid + lo holds all 24 bits of a float32 number, and x y is six products of parts; the other three lie below its rounding
// (Henry, Tang, Heinecke: Leveraging the bfloat16 Artificial Intelligence Datatype, 2019).  All sums are float32.
//
// (M, K) x (K, N) -> (M, N) in blocks: `COLUMNS` columns of b and a stretch of K are packed into tiles once and pass by blocks of
// a's rows, packed likewise, that stay in a core's cache.

#include "tiles.h"

#ifdef MATRIX_TILES
constexpr long FEW_ROWS = 256, FEW_COLUMNS = 128, COLUMNS = 1024, STRETCH = 1536;  // of inner numbers, by the number of parts

static inline long ceiling(long count, long of) { return (count + of - 1) / of; }

// One square of the result, `rows` x `columns` of it inside.  before: what it is added to, rows of it `before_row` apart; or null.  The
// sums begin with nothing, so that what is added to many times loses no digits of each.
template <int PARTS>
static void square(const bfloat16 *a, const bfloat16 *b, long depth, const float *before, long before_row, float *out, long out_row, long rows,
                   long columns) {
    alignas(64) float sums[PAIR * PAIR];
    constexpr long ONE = PARTS * WHOLE;
    for (long m = 0; m < PAIR && m < rows; m++) {
        const float *line = out + m * out_row;
        __builtin_prefetch(line, 1), __builtin_prefetch(line + TILE, 1);
    }
    meet<PARTS>({a, depth * ONE, ONE}, {b, depth * ONE, ONE}, depth, sums, PAIR, false);
    for (long m = 0; m < PAIR && m < rows; m++)
        for (long n = 0; n < PAIR && n < columns; n += LANES) {
            Vec found = load(sums + m * PAIR + n);
            if (before) found += read(before + m * before_row + n, columns - n);
            write(out + m * out_row + n, found, columns - n);
        }
}

// A matrix of outer numbers (rows of a, columns of b) and inner ones, and how far from one to the next; one of the steps is 1.
template <class T>
struct Matrix {
    const T *from;
    long outer_step, inner_step;

    const T *at(long outer, long inner) const { return from + outer * outer_step + inner * inner_step; }
};

// A part'th of so many parts of a block, from `outer` and `inner` on, in tiles: every 16 outer numbers behind another, `depth` tiles
// each.  What lies side by side in memory is read one after another.
template <int PARTS, class T>
static void pack(Form form, Matrix<T> matrix, long outer, long inner, long outers, long inners, bfloat16 *tiles, long part, long of) {
    long depth = ceiling(inners, DEPTH), across = ceiling(outers, PAIR) * 2, all = across * depth;
    for (long place = all * part / of; place < all * (part + 1) / of; place++) {
        long o = matrix.inner_step == 1 ? place / depth : place % across, i = matrix.inner_step == 1 ? place % depth : place / across;
        fill_tiles<PARTS>(form, matrix.at(outer + o * TILE, inner + i * DEPTH), matrix.outer_step, matrix.inner_step, outers - o * TILE,
                          inners - i * DEPTH, tiles + (o * depth + i) * PARTS * WHOLE);
    }
}

struct Result {
    float *to;
    long row, rows, columns;
    const float *bias;
    bool add;
};

// Packed rows meet packed columns: the block of the result from (m, n) on, over a stretch of the inner numbers that is the first or not.
template <int PARTS>
static void block(const bfloat16 *a, const bfloat16 *b, long depth, Result out, long m, long n, long rows, long columns, bool first) {
    for (long j = 0; j < columns; j += PAIR)
        for (long i = 0; i < rows; i += PAIR) {
            float *to = out.to + (m + i) * out.row + n + j;
            bool more = out.add || !first;
            square<PARTS>(a + i / TILE * depth * PARTS * WHOLE, b + j / TILE * depth * PARTS * WHOLE, depth,
                          more ? to : out.bias ? out.bias + n + j : nullptr, more ? out.row : 0, to, out.row, rows - i, columns - j);
        }
}

static inline long least(long a, long b) { return a < b ? a : b; }

// Few rows are packed by all threads together and stay in the caches, and each takes some of the columns at a time.
template <int PARTS, class T>
static void few_rows(Matrix<T> a, Matrix<T> b, Result out, long inners, long stretch, int threads) {
    bfloat16 *rows = (bfloat16 *)room<1>(ceiling(out.rows, PAIR) * PAIR * stretch * PARTS / 2);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        open_tiles();
        bfloat16 *columns = (bfloat16 *)room(FEW_COLUMNS * stretch * PARTS / 2);
        for (long k = 0; k < inners; k += stretch) {
            long deep = least(stretch, inners - k), depth = ceiling(deep, DEPTH);
#pragma omp for schedule(static)
            for (long part = 0; part < threads; part++) pack<PARTS>(ROWS_OUTSIDE, a, 0, k, out.rows, deep, rows, part, threads);
#pragma omp for schedule(static)
            for (long n = 0; n < out.columns; n += FEW_COLUMNS) {
                long wide = least(FEW_COLUMNS, out.columns - n);
                pack<PARTS>(ROWS_INSIDE, b, n, k, wide, deep, columns, 0, 1);
                block<PARTS>(rows, columns, depth, out, 0, n, out.rows, wide, k == 0);
            }
        }
        _tile_release();
    }
}

// Of many rows each thread takes a block at a time, which stays in its core's cache while columns that all have packed together pass.
template <int PARTS, class T>
static void many_rows(Matrix<T> a, Matrix<T> b, Result out, long inners, long stretch, int threads) {
    long height = least(FEW_ROWS, ceiling(ceiling(out.rows, threads), PAIR) * PAIR);
    bfloat16 *columns = (bfloat16 *)room<1>(COLUMNS * stretch * PARTS / 2);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        open_tiles();
        bfloat16 *rows = (bfloat16 *)room(height * stretch * PARTS / 2);
        for (long n = 0; n < out.columns; n += COLUMNS)
            for (long k = 0; k < inners; k += stretch) {
                long wide = least(COLUMNS, out.columns - n), deep = least(stretch, inners - k), depth = ceiling(deep, DEPTH);
#pragma omp for schedule(static)
                for (long part = 0; part < threads; part++) pack<PARTS>(ROWS_INSIDE, b, n, k, wide, deep, columns, part, threads);
#pragma omp for schedule(dynamic)
                for (long m = 0; m < out.rows; m += height) {
                    long high = least(height, out.rows - m);
                    pack<PARTS>(ROWS_OUTSIDE, a, m, k, high, deep, rows, 0, 1);
                    block<PARTS>(rows, columns, depth, out, m, n, high, wide, k == 0);
                }
            }
        _tile_release();
    }
}

template <int PARTS, class T>
static void multiply(Matrix<T> a, Matrix<T> b, Result out, long inners, int threads) {
    long stretches = ceiling(inners, STRETCH / PARTS), stretch = ceiling(ceiling(inners, stretches), DEPTH) * DEPTH;
    if (out.rows <= FEW_ROWS) few_rows<PARTS>(a, b, out, inners, stretch, threads);
    else many_rows<PARTS>(a, b, out, inners, stretch, threads);
}

// out = a b + bias, or out += a b; a and b are float32 or (half) bfloat16.  Numbers lie steps apart, one of a matrix's two steps is 1,
// out's rows are whole.
extern "C" void gemm(int half, const void *a, long a_row, long a_column, const void *b, long b_row, long b_column, float *out, long out_row,
                     long rows, long columns, long inners, const float *bias, int add, int threads) {
    Result to{out, out_row, rows, columns, bias, (bool)add};
    if (half)
        multiply<1>(Matrix<bfloat16>{(const bfloat16 *)a, a_row, a_column}, Matrix<bfloat16>{(const bfloat16 *)b, b_column, b_row}, to,
                    inners, threads);
    else
        multiply<3>(Matrix<float>{(const float *)a, a_row, a_column}, Matrix<float>{(const float *)b, b_column, b_row}, to, inners,
                    threads);
}
#endif
