// Products of whole matrices, (M, K) x (K, N) -> (M, N), in blocks: some columns of b and a stretch of K are packed once and pass by
// blocks of a's rows, packed likewise, that stay in a core's cache.  All sums are float32.
//
// On matrix tiles bfloat16 numbers are multiplied as they are and float32 numbers as sums of three bfloat16 numbers: x = hi + mid + lo
// holds all 24 bits of one, and x y is six products of parts; the other three lie below its rounding (Henry, Tang, Heinecke: Leveraging
// the bfloat16 Artificial Intelligence Datatype, 2019).  On vectors they are packed into panels, as for decoding.

#include "panels.h"
#include "tiles.h"

constexpr long FEW_COLUMNS = 128, COLUMNS = 1024;  // of b that are packed at a time: for few rows by each thread, for many by all

static inline long ceiling(long count, long of) { return (count + of - 1) / of; }
static inline long least(long a, long b) { return a < b ? a : b; }

// A matrix of outer numbers (rows of a, columns of b) and inner ones, and how far from one to the next; one of the steps is 1.
template <class T>
struct Matrix {
    const T *from;
    long outer_step, inner_step;

    Matrix at(long outer, long inner) const { return {from + outer * outer_step + inner * inner_step, outer_step, inner_step}; }
};

// A part of the result, and what its sums are added to: itself (add), or a bias, or nothing.
struct Result {
    float *to;
    long row, rows, columns;
    const float *bias;
    bool add;

    Result at(long m, long n, bool first) const {
        return {to + m * row + n, row, rows - m, columns - n, add || !first || !bias ? nullptr : bias + n, add || !first};
    }
};

#ifdef MATRIX_TILES
template <int PARTS, typename T>
struct OnTiles {
    static constexpr long ROWS_OF_BLOCK = 256, SIDE = PAIR, STRETCH = 1536 / PARTS, ONE = PARTS * WHOLE;
    typedef bfloat16 Packed;

    static void open() { open_tiles(); }
    static void close() { _tile_release(); }
    static long numbers(long outers, long stretch) { return ceiling(outers, PAIR) * PAIR * stretch * PARTS; }

    // A part'th of so many parts of a block in tiles: every 16 outer numbers behind another, `depth` tiles each.  What lies side by side
    // in memory is read one after another.
    static void pack(Form form, Matrix<T> matrix, long outers, long inners, bfloat16 *tiles, long part, long of) {
        long depth = ceiling(inners, DEPTH), across = ceiling(outers, PAIR) * 2, all = across * depth;
        for (long place = all * part / of; place < all * (part + 1) / of; place++) {
            long o = matrix.inner_step == 1 ? place / depth : place % across, i = matrix.inner_step == 1 ? place % depth : place / across;
            fill_tiles<PARTS>(form, matrix.at(o * TILE, i * DEPTH).from, matrix.outer_step, matrix.inner_step, outers - o * TILE,
                              inners - i * DEPTH, tiles + (o * depth + i) * ONE);
        }
    }

    static void pack_rows(Matrix<T> matrix, long outers, long inners, bfloat16 *to, long part, long of) {
        pack(ROWS_OUTSIDE, matrix, outers, inners, to, part, of);
    }

    static void pack_columns(Matrix<T> matrix, long outers, long inners, bfloat16 *to, long part, long of) {
        pack(ROWS_INSIDE, matrix, outers, inners, to, part, of);
    }

    // Packed rows times packed columns, 32 and 32 at a time.
    static void block(const bfloat16 *a, const bfloat16 *b, Result out, long inners) {
        long depth = ceiling(inners, DEPTH);
        for (long j = 0; j < out.columns; j += PAIR)
            for (long i = 0; i < out.rows; i += PAIR) square(a + i / TILE * depth * ONE, b + j / TILE * depth * ONE, depth, out.at(i, j, true));
    }

    // The sums begin with nothing, so that what is added to many times loses no digits of each.
    static void square(const bfloat16 *a, const bfloat16 *b, long depth, Result out) {
        alignas(64) float sums[PAIR * PAIR];
        for (long m = 0; m < PAIR && m < out.rows; m++) {
            const float *line = out.to + m * out.row;
            __builtin_prefetch(line, 1), __builtin_prefetch(line + TILE, 1);
        }
        tile_kernel<PARTS>({a, depth * ONE, ONE}, {b, depth * ONE, ONE}, depth, sums, PAIR, false);
        for (long m = 0; m < PAIR && m < out.rows; m++)
            for (long n = 0; n < PAIR && n < out.columns; n += LANES) {
                Vec found = load(sums + m * PAIR + n);
                float *to = out.to + m * out.row + n;
                if (out.add) found += read(to, out.columns - n);
                else if (out.bias) found += read(out.bias + n, out.columns - n);
                write(to, found, out.columns - n);
            }
    }
};
#endif

template <typename T>
struct OnVectors {
    static constexpr long ROWS_OF_BLOCK = 252 / MOST * MOST, SIDE = MOST;
    static constexpr long STRETCH = MicroKernel<T>::DEEP == 1 ? 192 : 512;  // longer sums would be less exact than MKL's
    typedef float Packed;

    static void open() {}
    static void close() {}
    static long numbers(long outers, long stretch) { return ceiling(outers, LANES) * LANES * steps_of<T>(stretch); }

    // Every `width` outer numbers behind another, in vectors, or (close) so close together as there are rows.
    static void pack(long width, bool close, Matrix<T> matrix, long outers, long inners, float *to, long part, long of) {
        long all = ceiling(outers, width);
        for (long place = all * part / of; place < all * (part + 1) / of; place++) {
            long first = place * width, count = least(width, outers - first);
            fill_panel<T>(matrix.at(first, 0).from, matrix.outer_step, matrix.inner_step, count, inners, to + first * steps_of<T>(inners),
                          close ? count : LANES);
        }
    }

    static void pack_rows(Matrix<T> matrix, long outers, long inners, float *to, long part, long of) {
        pack(MOST, true, matrix, outers, inners, to, part, of);
    }

    static void pack_columns(Matrix<T> matrix, long outers, long inners, float *to, long part, long of) {
        pack(LANES, false, matrix, outers, inners, to, part, of);
    }

    // Two panels stay in the innermost cache while rows pass, MOST of them at a time.
    static void block(const float *a, const float *b, Result out, long inners) {
        long steps = steps_of<T>(inners);
        for (long j = 0; j < out.columns; j += 2 * LANES)
            for (long i = 0; i < out.rows; i += MOST) {
                Result here = out.at(i, j, true);
                Pass<T, float> *micro_kernel = pass_for<T, float>(least(MOST, here.rows), here.columns > LANES ? 2 : 1);
                micro_kernel(a + i * steps, b + j * steps, steps, here.bias, here.add ? here.to : nullptr, here.to, here.row, here.columns,
                     nullptr);
            }
    }
};

// Few rows are packed by all threads together and stay in the caches, and each takes some of the columns at a time.
template <typename On, typename T>
static void few_rows(Matrix<T> a, Matrix<T> b, Result out, long inners, long stretch, int threads) {
    typedef typename On::Packed Packed;
    Packed *rows = (Packed *)workspace<1>(On::numbers(out.rows, stretch) * sizeof(Packed) / sizeof(float));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        On::open();
        Packed *columns = (Packed *)workspace(On::numbers(FEW_COLUMNS, stretch) * sizeof(Packed) / sizeof(float));
        for (long k = 0; k < inners; k += stretch) {
            long deep = least(stretch, inners - k);
#pragma omp for schedule(static)
            for (long part = 0; part < threads; part++) On::pack_rows(a.at(0, k), out.rows, deep, rows, part, threads);
#pragma omp for schedule(static)
            for (long n = 0; n < out.columns; n += FEW_COLUMNS) {
                Result here = out.at(0, n, k == 0);
                here.columns = least(FEW_COLUMNS, here.columns);
                On::pack_columns(b.at(n, k), here.columns, deep, columns, 0, 1);
                On::block(rows, columns, here, deep);
            }
        }
        On::close();
    }
}

// Of many rows each thread takes a block at a time, which stays in its core's cache while columns that all have packed together pass.
template <typename On, typename T>
static void many_rows(Matrix<T> a, Matrix<T> b, Result out, long inners, long stretch, int threads) {
    typedef typename On::Packed Packed;
    long shared = ceiling(out.rows, threads), height = least(On::ROWS_OF_BLOCK, ceiling(shared, On::SIDE) * On::SIDE);
    Packed *columns = (Packed *)workspace<1>(On::numbers(COLUMNS, stretch) * sizeof(Packed) / sizeof(float));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        On::open();
        Packed *rows = (Packed *)workspace(On::numbers(height, stretch) * sizeof(Packed) / sizeof(float));
        for (long n = 0; n < out.columns; n += COLUMNS)
            for (long k = 0; k < inners; k += stretch) {
                long wide = least(COLUMNS, out.columns - n), deep = least(stretch, inners - k);
#pragma omp for schedule(static)
                for (long part = 0; part < threads; part++) On::pack_columns(b.at(n, k), wide, deep, columns, part, threads);
#pragma omp for schedule(dynamic)
                for (long m = 0; m < out.rows; m += height) {
                    Result here = out.at(m, n, k == 0);
                    here.rows = least(height, here.rows), here.columns = wide;
                    On::pack_rows(a.at(m, k), here.rows, deep, rows, 0, 1);
                    On::block(rows, columns, here, deep);
                }
            }
        On::close();
    }
}

template <typename On, typename T>
static void multiply(Matrix<T> a, Matrix<T> b, Result out, long inners, int threads) {
    long stretches = ceiling(inners, On::STRETCH), stretch = ceiling(ceiling(inners, stretches), 32) * 32;
    if (out.rows <= On::ROWS_OF_BLOCK) few_rows<On>(a, b, out, inners, stretch, threads);
    else many_rows<On>(a, b, out, inners, stretch, threads);
}

// True if these products are worth it: on matrix tiles, and on long vectors of processors that MKL was not written for.  With shorter
// vectors other libraries' are as good, and on AMD's family 19h (Zen 4), which computes long vectors in halves.
extern "C" int has_gemm() {
#if defined(__AVX512F__)
    return has_tiles() || !(__builtin_cpu_is("intel") || __builtin_cpu_is("amdfam19h"));
#else
    return 0;
#endif
}

// out = a b + bias, or out += a b; a and b are float32 or (half) bfloat16.  Numbers lie steps apart, one of a matrix's two steps is 1,
// out's rows are whole.
extern "C" void gemm(int half, const void *a, long a_row, long a_column, const void *b, long b_row, long b_column, float *out, long out_row,
                     long rows, long columns, long inners, const float *bias, int add, int threads) {
    Result to{out, out_row, rows, columns, bias, (bool)add};
    Matrix<bfloat16> half_a{(const bfloat16 *)a, a_row, a_column}, half_b{(const bfloat16 *)b, b_column, b_row};
    Matrix<float> whole_a{(const float *)a, a_row, a_column}, whole_b{(const float *)b, b_column, b_row};
#ifdef MATRIX_TILES
    if (has_tiles()) {
        if (half) multiply<OnTiles<1, bfloat16>>(half_a, half_b, to, inners, threads);
        else multiply<OnTiles<3, float>>(whole_a, whole_b, to, inners, threads);
        return;
    }
#endif
    if (half) multiply<OnVectors<bfloat16>>(half_a, half_b, to, inners, threads);
    else multiply<OnVectors<float>>(whole_a, whole_b, to, inners, threads);
}
