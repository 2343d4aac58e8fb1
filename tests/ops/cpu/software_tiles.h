// Matrix tiles (AMX) in software, for processors that have none: given to the compiler before the kernels, so that what they do with
// tiles is tested there too (with AVX-512).  Pairs of bfloat16 numbers and sums in float32, as the processor has them; subnormal ones
// count.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig software_open
#define _tile_release software_close
#define _tile_zero software_zero
#define _tile_loadd software_load
#define _tile_stored software_store
#define _tile_dpbf16ps software_multiply
#define syscall(...) 0  // the kernel has nothing to grant

struct SoftwareTiles { bool open; int rows[8], bytes[8]; float numbers[8][16][16]; };
static thread_local SoftwareTiles software;

static inline void software_open(const void *config) {
    software.open = true;
    for (int t = 0; t < 8; t++) {
        uint16_t bytes;
        std::memcpy(&bytes, (const char *)config + 16 + 2 * t, sizeof bytes);
        software.bytes[t] = bytes, software.rows[t] = ((const uint8_t *)config)[48 + t];
    }
}

static inline void software_close() { std::memset(&software, 0, sizeof software); }

// Tiles that were not opened fault, as the processor's do.
static inline void software_asked() { if (!software.open) __builtin_trap(); }

static inline void software_zero(int tile) { software_asked(), std::memset(software.numbers[tile], 0, sizeof software.numbers[tile]); }

static inline void software_load(int tile, const void *from, long stride) {
    software_zero(tile);
    for (int r = 0; r < software.rows[tile]; r++)
        std::memcpy(software.numbers[tile][r], (const char *)from + r * stride, software.bytes[tile]);
}

static inline void software_store(int tile, void *to, long stride) {
    software_asked();
    for (int r = 0; r < software.rows[tile]; r++)
        std::memcpy((char *)to + r * stride, software.numbers[tile][r], software.bytes[tile]);
}

static inline void software_multiply(int to, int a, int b) {
    software_asked();
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    for (int m = 0; m < software.rows[to]; m++) {
        __m512 first = _mm512_setzero_ps(), second = first;  // sums of each pair's halves, before the two meet what was there
        for (int k = 0; k < software.bytes[a] / 4; k++) {
            const __m512i one = _mm512_castps_si512(_mm512_set1_ps(software.numbers[a][m][k]));
            const __m512i row = _mm512_loadu_si512(software.numbers[b][k]);
            first = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(one, 16), (__m512)_mm512_slli_epi32(row, 16), first);
            second = _mm512_fmadd_ps((__m512)_mm512_and_si512(one, upper), (__m512)_mm512_and_si512(row, upper), second);
        }
        float *sums = software.numbers[to][m];
        _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), _mm512_add_ps(first, second)));
    }
}
