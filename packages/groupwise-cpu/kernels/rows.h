// How kernels go over rows: type by type, and split over threads.

#pragma once

#include "vectors.h"

// Runs `work(zero of the type of x, zero of the type of y)`; a set bit says bfloat16.
template <typename Work>
static void typed(int x_half, int y_half, Work work) {
    if (x_half && y_half) work(bfloat16{}, bfloat16{});
    else if (x_half) work(bfloat16{}, 0.0f);
    else if (y_half) work(0.0f, bfloat16{});
    else work(0.0f, 0.0f);
}

// Splits rows over threads.
template <typename Work>
static void each(long rows, int threads, Work work) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long t = 0; t < rows; t++) work(t);
}
