// x W^T + b for few rows x: decoding reads every weight for a handful of rows, so the weights stream by once, in the order they lie.
//
// A weight (O, I) is packed into panels of LANES outputs: (panels, I, LANES) in float32; in bfloat16, for processors with matrix
// tiles (AMX), (panels, I / 32) tiles of 16 x 16 pairs of inputs.  Rows are padded with zeros where a panel or a tile is not full.

#include "tiles.h"

#ifdef MATRIX_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

constexpr long AT_ONCE = 240;  // rows whose inputs stay in the cache while the weights pass
constexpr int FEW_ROWS = LANES == 8 ? 3 : 7, MOST_ROWS = LANES == 8 ? 6 : 14;  // whose sums with four panels, with two fill the registers
constexpr long VECTORS_AHEAD = 64;  // between the weights in use and those that are asked for

// The weight's number (o, i) lies at o * output_step + i * input_step; one of the steps is 1.
extern "C" void pack_float(const float *weight, long output_step, long input_step, float *packed, long outputs, long inputs,
                           int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long panel = 0; panel < padded(outputs) / LANES; panel++)
        for (long i = 0; i < inputs; i += LANES) {
            Vec block[LANES];
            const float *from = weight + panel * LANES * output_step + i * input_step;
            long left_o = outputs - panel * LANES, left_i = inputs - i;
            for (long k = 0; k < LANES; k++)
                block[k] = output_step == 1 ? (k < left_i ? read(from + k * input_step, left_o) : all(0.0f))
                                            : (k < left_o ? read(from + k * output_step, left_i) : all(0.0f));
            if (output_step != 1) exchange(block);
            for (long k = 0; k < LANES && k < left_i; k++) store(packed + (panel * inputs + i + k) * LANES, block[k]);
        }
}

// M rows of inputs, turned to (I, M), meet N panels.
template <int M, int N>
static void pass(const float *turned, const float *packed, long inputs, const float *bias, float *out, long outputs, long first) {
    Vec total[N][M];
    for (int n = 0; n < N; n++) {
        Vec start = bias ? read(bias + first + n * LANES, outputs - first - n * LANES) : all(0.0f);
#pragma GCC unroll 32
        for (int m = 0; m < M; m++) total[n][m] = start;
    }
    for (long i = 0; i < inputs; i++) {
        Vec weight[N];
        for (int n = 0; n < N; n++) {
            weight[n] = load(packed + (n * inputs + i) * LANES);
            __builtin_prefetch(packed + (n * inputs + i + VECTORS_AHEAD) * LANES);
        }
#pragma GCC unroll 32
        for (int m = 0; m < M; m++) {
            Vec number = all(turned[i * M + m]);
            for (int n = 0; n < N; n++) total[n][m] += number * weight[n];
        }
    }
    for (int n = 0; n < N; n++)
#pragma GCC unroll 32
        for (int m = 0; m < M; m++) {
            float *to = out + m * outputs + first + n * LANES;
            long left = outputs - first - n * LANES;
            if (left > 0) write(to, total[n][m], left);
        }
}

typedef void Pass(const float *, const float *, long, const float *, float *, long, long);

template <int N, int... M>
static constexpr Pass *pass_of(int rows, std::integer_sequence<int, M...>) {
    constexpr Pass *made[] = {pass<M + 1, N>...};
    return made[rows - 1];
}

extern "C" void product_float(const float *x, const float *packed, const float *bias, float *out, long rows, long outputs, long inputs,
                              int threads) {
    long panels = padded(outputs) / LANES;
    for (long start = 0; start < rows; start += AT_ONCE, x += AT_ONCE * inputs, out += AT_ONCE * outputs) {
        long here = rows - start < AT_ONCE ? rows - start : AT_ONCE;
        long blocks = (here + MOST_ROWS - 1) / MOST_ROWS, each = (here + blocks - 1) / blocks;
        float *turned = room(here * inputs);
        for (long first = 0; first < here; first += each) {
            long count = here - first < each ? here - first : each;
            float *block = turned + first * inputs;
            for (long m = 0; m < count; m++)
                for (long i = 0; i < inputs; i++) block[i * count + m] = x[(first + m) * inputs + i];
        }
        // Few rows take several panels at a time, so that enough sums are under way.
        int wide = each <= FEW_ROWS ? 4 : 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (long group = 0; group < (panels + wide - 1) / wide; group++)
            for (long first = 0; first < here; first += each) {
                int count = here - first < each ? here - first : each;
                const float *block = turned + first * inputs;
                float *to = out + first * outputs;
                long panel = group * wide;
                if (wide == 4 && panel + 4 <= panels) {
                    pass_of<4>(count, std::make_integer_sequence<int, FEW_ROWS>{})(
                        block, packed + panel * inputs * LANES, inputs, bias, to, outputs, panel * LANES);
                    continue;
                }
                if (wide == 2 && panel + 2 <= panels) {
                    pass_of<2>(count, std::make_integer_sequence<int, MOST_ROWS>{})(
                        block, packed + panel * inputs * LANES, inputs, bias, to, outputs, panel * LANES);
                    continue;
                }
                for (; panel < panels && panel < (group + 1) * wide; panel++)
                    pass_of<1>(count, std::make_integer_sequence<int, MOST_ROWS>{})(
                        block, packed + panel * inputs * LANES, inputs, bias, to, outputs, panel * LANES);
            }
    }
}

#ifdef MATRIX_TILES
// True if this process may use matrix tiles: the kernel wants to be asked.
extern "C" int has_tiles() {
    static const int granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return granted;
}

extern "C" void pack_half(const float *weight, long output_step, long input_step, bfloat16 *packed, long outputs, long inputs,
                          int threads) {
    long depth = (inputs + DEPTH - 1) / DEPTH;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long panel = 0; panel < padded(outputs) / TILE; panel++)
        for (long k = 0; k < depth; k++)
            fill_tiles<1>(ROWS_INSIDE, weight + panel * TILE * output_step + k * DEPTH * input_step, output_step, input_step,
                          outputs - panel * TILE, inputs - k * DEPTH, packed + (panel * depth + k) * WHOLE);
}

static void write_tile(const float *sums, long rows, const float *bias, bfloat16 *out, long outputs, long first) {
    long left = outputs - first;
    Vec start = bias ? read(bias + first, left) : all(0.0f);
    for (long m = 0; m < rows; m++) write(out + m * outputs + first, load(sums + m * TILE) + start, left);
}

// 16 rows meet four panels, or 32 rows two: four tiles of sums in both.
template <int M, int N>
static void tile_pass(const bfloat16 *x, long stride, const bfloat16 *packed, long panels, long depth, float *sums) {
    long panel = depth * TILE * DEPTH;
    __asm__ volatile("" ::: "memory");  // what is loaded below is in memory by now
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < depth; k++) {
        const bfloat16 *weight = packed + k * TILE * DEPTH;
        for (int n = 0; n < N; n++) ask(weight + (n < panels ? n : 0) * panel + 4 * WHOLE, 2 * WHOLE);
        _tile_loadd(4, x + k * DEPTH, stride);
        _tile_loadd(6, weight, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (M == 2) {
            _tile_loadd(5, x + TILE * stride / 2 + k * DEPTH, stride);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (panels > 1) {
            _tile_loadd(7, weight + panel, 64);
            if (M == 2) {
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            } else {
                _tile_dpbf16ps(1, 4, 7);
            }
        }
        if (N > 2 && panels > 2) {
            _tile_loadd(6, weight + 2 * panel, 64);
            _tile_dpbf16ps(2, 4, 6);
        }
        if (N > 2 && panels > 3) {
            _tile_loadd(7, weight + 3 * panel, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

extern "C" void product_half(const bfloat16 *x, const bfloat16 *packed, const float *bias, bfloat16 *out, long rows, long outputs,
                             long inputs, int threads) {
    long panels = padded(outputs) / TILE, depth = (inputs + DEPTH - 1) / DEPTH, width = depth * DEPTH;
    for (long start = 0; start < rows; start += AT_ONCE, x += AT_ONCE * inputs, out += AT_ONCE * outputs) {
        long here = rows - start < AT_ONCE ? rows - start : AT_ONCE, full = (here + TILE - 1) / TILE * TILE;
        const bfloat16 *from = x;
        if (full != here || width != inputs) {
            bfloat16 *copy = (bfloat16 *)room(full * width / 2);
            std::memset(copy, 0, full * width * sizeof(bfloat16));
            for (long m = 0; m < here; m++) std::memcpy(copy + m * width, x + m * inputs, inputs * sizeof(bfloat16));
            from = copy;
        }
        long wide = full > TILE ? 2 : 4;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            open_tiles();
            alignas(64) float sums[4 * 256];
#pragma omp for schedule(static)
            for (long panel = 0; panel < panels; panel += wide)
                for (long m = 0; m < full; m += 2 * TILE) {
                    const bfloat16 *weight = packed + panel * depth * TILE * DEPTH;
                    long many = panels - panel < wide ? panels - panel : wide, count = here - m;
                    bool pair = full - m > TILE;
                    if (pair) tile_pass<2, 2>(from + m * width, 2 * width, weight, many, depth, sums);
                    else tile_pass<1, 4>(from + m * width, 2 * width, weight, many, depth, sums);
                    for (long n = 0; n < many; n++)
                        for (int half = 0; half < (pair ? 2 : 1); half++)
                            write_tile(sums + (pair ? 2 * n + half : n) * 256, count - half * TILE < TILE ? count - half * TILE : TILE,
                                       bias, out + (m + half * TILE) * outputs, outputs, (panel + n) * TILE);
                }
            _tile_release();
        }
    }
}
#else
extern "C" int has_tiles() { return 0; }
#endif
