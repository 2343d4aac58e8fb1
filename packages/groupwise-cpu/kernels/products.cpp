// x W^T + b for few rows x: decoding reads every weight for a handful of rows, so the weights stream by once, in the order they lie.
//
// A weight (O, I) is packed into panels of LANES outputs: (panels, I, LANES) in float32; in bfloat16 (panels, I / 2, LANES) pairs of
// inputs, or for processors with matrix tiles (AMX) (panels, I / 32) tiles of 16 x 16 pairs.  Where a panel, a pair or a tile is not
// full, it is padded with zeros.

#include <algorithm>

#include "panels.h"
#include "tiles.h"

#ifdef MATRIX_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

constexpr long AT_ONCE = 240;  // rows whose inputs stay in the cache while the weights pass

// The weight's number (o, i) lies at o * output_step + i * input_step; one of the steps is 1.
template <typename T, typename Source>
static void pack_panels(const Source *weight, long output_step, long input_step, void *packed, long outputs, long inputs, int threads) {
    long size = steps_of<T>(inputs) * LANES;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long panel = 0; panel < padded(outputs) / LANES; panel++)
        fill_panel<T>(weight + panel * LANES * output_step, output_step, input_step, outputs - panel * LANES, inputs,
                      (float *)packed + panel * size, LANES);
}

template <typename T>
static void product_panels(const T *x, const void *packed, const float *bias, T *out, long rows, long outputs, long inputs, int threads) {
    long panels = padded(outputs) / LANES, steps = steps_of<T>(inputs);
    for (long start = 0; start < rows; start += AT_ONCE, x += AT_ONCE * inputs, out += AT_ONCE * outputs) {
        long here = rows - start < AT_ONCE ? rows - start : AT_ONCE;
        long blocks = (here + MOST - 1) / MOST, each = (here + blocks - 1) / blocks;
        float *transposed = workspace(here * steps);
        for (long first = 0; first < here; first += each) {
            long count = here - first < each ? here - first : each;
            fill_panel<T>(x + first * inputs, inputs, 1, count, inputs, transposed + first * steps, count);
        }
        // Few rows take several panels at a time, so that enough sums are under way.  Where there are several blocks of rows, each of
        // the first ones prefetches one of those behind, so that memory does not rest while what is in the cache is multiplied.
        int wide = each <= FEW ? 4 : 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (long group = 0; group < panels; group += wide)
            for (long first = 0; first < here; first += each) {
                int count = here - first < each ? here - first : each, together = group + wide <= panels ? wide : 1;
                Pass<T, T> *micro_kernel = pass_for<T, T>(count, together);
                const float *weights = (const float *)packed;
                long behind = group + wide + first / each;
                const float *next = blocks > 1 && behind < std::min(group + 2 * wide, panels) ? weights + behind * steps * LANES : nullptr;
                for (long panel = group; panel < panels && panel < group + wide; panel += together)
                    micro_kernel(transposed + first * steps, weights + panel * steps * LANES, steps, bias ? bias + panel * LANES : nullptr, nullptr,
                         out + first * outputs + panel * LANES, outputs, outputs - panel * LANES, next);
            }
    }
}

#ifdef MATRIX_TILES
// True if this process may use matrix tiles: the kernel wants to be asked.
extern "C" int has_tiles() {
    static const int granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return granted;
}

template <typename Source>
static void pack_tiles(const Source *weight, long output_step, long input_step, bfloat16 *packed, long outputs, long inputs, int threads) {
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

// 16 rows times four panels, or 32 rows two: four tiles of sums in both.
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
        for (int n = 0; n < N; n++) prefetch(weight + (n < panels ? n : 0) * panel + 4 * WHOLE, 2 * WHOLE);
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

static void product_tiles(const bfloat16 *x, const bfloat16 *packed, const float *bias, bfloat16 *out, long rows, long outputs, long inputs,
                          int threads) {
    long panels = padded(outputs) / TILE, depth = (inputs + DEPTH - 1) / DEPTH, width = depth * DEPTH;
    for (long start = 0; start < rows; start += AT_ONCE, x += AT_ONCE * inputs, out += AT_ONCE * outputs) {
        long here = rows - start < AT_ONCE ? rows - start : AT_ONCE, full = (here + TILE - 1) / TILE * TILE;
        const bfloat16 *from = x;
        if (full != here || width != inputs) {
            bfloat16 *copy = (bfloat16 *)workspace(full * width / 2);
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

template <typename Source>
static void pack(int half, const Source *weight, long output_step, long input_step, void *packed, long outputs, long inputs, int threads) {
    if (!half) return pack_panels<float>(weight, output_step, input_step, packed, outputs, inputs, threads);
#ifdef MATRIX_TILES
    if (has_tiles()) return pack_tiles(weight, output_step, input_step, (bfloat16 *)packed, outputs, inputs, threads);
#endif
    pack_panels<bfloat16>(weight, output_step, input_step, packed, outputs, inputs, threads);
}

// half: of what is packed; from_half: of the weight.
extern "C" void pack_weight(int half, int from_half, const void *weight, long output_step, long input_step, void *packed, long outputs,
                            long inputs, int threads) {
    if (from_half) pack(half, (const bfloat16 *)weight, output_step, input_step, packed, outputs, inputs, threads);
    else pack(half, (const float *)weight, output_step, input_step, packed, outputs, inputs, threads);
}

template <typename T>
static void multiply(const void *x, const void *packed, const float *bias, void *out, long rows, long outputs, long inputs, int threads) {
#ifdef MATRIX_TILES
    if constexpr (sizeof(T) == sizeof(bfloat16))
        if (has_tiles()) return product_tiles((const T *)x, (const T *)packed, bias, (T *)out, rows, outputs, inputs, threads);
#endif
    product_panels((const T *)x, (const T *)packed, bias, (T *)out, rows, outputs, inputs, threads);
}

extern "C" void linear(int half, const void *x, const void *packed, const float *bias, void *out, long rows, long outputs, long inputs,
                       int threads) {
    (half ? multiply<bfloat16> : multiply<float>)(x, packed, bias, out, rows, outputs, inputs, threads);
}
