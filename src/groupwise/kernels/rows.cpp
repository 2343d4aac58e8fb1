// What a block does between its matrix products, in one pass each: norms, rotary positions, the gate of an MLP.
//
// Streams are (T, D) with their rows one behind the other unless a step is given; all sums are float32.

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

// out = x weight / sqrt(mean(x^2) + eps), of one row; returns the root's inverse.
template <typename X, typename Out>
static inline float normed(const X *x, const float *weight, Out *out, long width, float eps) {
    Vec squares = all(0.0f);
    for (long d = 0; d < width; d += LANES) {
        Vec number = load(x + d);
        squares += number * number;
    }
    float factor = 1.0f / std::sqrt(sum(squares) / width + eps);
    for (long d = 0; d < width; d += LANES) store(out + d, load(x + d) * factor * load(weight + d));
    return factor;
}

// Norms of rows; scale: what each was multiplied by.
extern "C" void rms_norm(int x_half, int out_half, const void *x, const float *weight, void *out, float *scale, long rows, long width,
                         float eps, int threads) {
    typed(x_half, out_half, [=](auto x_zero, auto out_zero) {
        auto from = (const decltype(x_zero) *)x;
        auto to = (decltype(out_zero) *)out;
        each(rows, threads, [=](long t) { scale[t] = normed(from + t * width, weight, to + t * width, width, eps); });
    });
}

// x += add, then the norm of x.
extern "C" void add_rms_norm(int add_half, int out_half, float *x, const void *add, const float *weight, void *out, long rows,
                             long width, float eps, int threads) {
    typed(add_half, out_half, [=](auto add_zero, auto out_zero) {
        auto more = (const decltype(add_zero) *)add;
        auto to = (decltype(out_zero) *)out;
        each(rows, threads, [=](long t) {
            for (long d = t * width; more && d < (t + 1) * width; d += LANES) store(x + d, load(x + d) + load(more + d));
            normed(x + t * width, weight, to + t * width, width, eps);
        });
    });
}

// With u = x scale:  grad_x = scale (g w - u mean(u g w)),  grad_weight += sum over rows of u g.
extern "C" void rms_norm_backward(int x_half, int grad_half, const void *x, const void *grad, const float *weight, const float *scale,
                                  void *grad_x, float *grad_weight, long rows, long width) {
    typed(x_half, grad_half, [=](auto x_zero, auto grad_zero) {
        auto from = (const decltype(x_zero) *)x;
        auto slope = (const decltype(grad_zero) *)grad;
        auto to = (decltype(x_zero) *)grad_x;
        for (long t = 0; t < rows; t++) {
            Vec along = all(0.0f);
            for (long d = 0; d < width; d += LANES) {
                Vec part = load(from + t * width + d) * scale[t] * load(slope + t * width + d);
                store(grad_weight + d, load(grad_weight + d) + part);
                along += part * load(weight + d);
            }
            float share = sum(along) / width;
            for (long d = 0; d < width; d += LANES) {
                Vec unit = load(from + t * width + d) * scale[t];
                store(to + t * width + d, (load(slope + t * width + d) * load(weight + d) - unit * share) * scale[t]);
            }
        }
    });
}

// Pairs (i, i + width/2) of every head turned by the position's angle; sign -1: turned back.  x: (T, heads, width), with steps.
extern "C" void rotate(int half, const void *x, long token_step, long head_step, const float *cosine, const float *sine, void *out,
                       long tokens, long heads, long width, float sign, int threads) {
    typed(half, half, [=](auto zero, auto) {
        typedef decltype(zero) T;
        each(tokens, threads, [=](long t) {
            for (long head = 0; head < heads; head++) {
                const T *from = (const T *)x + t * token_step + head * head_step;
                T *to = (T *)out + (t * heads + head) * width;
                for (long d = 0; d < width / 2; d += LANES) {
                    Vec a = load(from + d), b = load(from + width / 2 + d);
                    const float *turn = sine + t * width, *stay = cosine + t * width;
                    Vec low = load(turn + d) * sign, high = load(turn + width / 2 + d) * sign;
                    // Turned back, a number meets the sine of the one it is paired with.
                    if (sign < 0) { Vec other = low; low = high, high = other; }
                    store(to + d, a * load(stay + d) - b * low);
                    store(to + width / 2 + d, b * load(stay + width / 2 + d) + a * high);
                }
            }
        });
    });
}

static inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-x)); }

// out = silu(gate) up; rows of gate and of up are `step` apart.
extern "C" void gated(int half, const void *gate, const void *up, void *out, long rows, long width, long step, long out_step,
                      int threads) {
    typed(half, half, [=](auto zero, auto) {
        typedef decltype(zero) T;
        each(rows, threads, [=](long t) {
            for (long d = 0; d < width; d += LANES) {
                Vec opened = load((const T *)gate + t * step + d);
                store((T *)out + t * out_step + d, opened * sigmoid(opened) * load((const T *)up + t * step + d));
            }
        });
    });
}

// Of the same: inner = silu(gate) up again;  grad_up = grad silu(gate);  grad becomes the gate's: grad up silu'(gate).
extern "C" void gated_backward(int half, const void *gate, const void *up, void *grad, void *inner, void *grad_up, long numbers,
                               int threads) {
    typed(half, half, [=](auto zero, auto) {
        typedef decltype(zero) T;
        each(numbers / LANES, threads, [=](long i) {
            long d = i * LANES;
            Vec x = load((const T *)gate + d), other = load((const T *)up + d), slope = load((const T *)grad + d);
            Vec open = sigmoid(x), opened = x * open;
            store((T *)inner + d, opened * other);
            store((T *)grad_up + d, slope * opened);
            store((T *)grad + d, slope * other * open * (1.0f + x * (1.0f - open)));
        });
    });
}

// GELU's tanh form is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
constexpr float BEND = 1.5957691216057308f, CUBE = 0.044715f;

extern "C" void gelu(int half, const void *x, void *out, long numbers, int threads) {
    typed(half, half, [=](auto zero, auto) {
        typedef decltype(zero) T;
        each(numbers / LANES, threads, [=](long i) {
            Vec number = load((const T *)x + i * LANES);
            store((T *)out + i * LANES, number * sigmoid(BEND * number * (1.0f + CUBE * number * number)));
        });
    });
}

// Of the same: out = gelu(x) again;  grad becomes that of x.
extern "C" void gelu_backward(int half, const void *x, void *grad, void *out, long numbers, int threads) {
    typed(half, half, [=](auto zero, auto) {
        typedef decltype(zero) T;
        each(numbers / LANES, threads, [=](long i) {
            Vec number = load((const T *)x + i * LANES), square = number * number;
            Vec open = sigmoid(BEND * number * (1.0f + CUBE * square));
            Vec slope = open + number * open * (1.0f - open) * BEND * (1.0f + 3.0f * CUBE * square);
            store((T *)out + i * LANES, number * open);
            store((T *)grad + i * LANES, load((const T *)grad + i * LANES) * slope);
        });
    });
}
