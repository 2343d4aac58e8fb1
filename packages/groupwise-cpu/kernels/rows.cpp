// What is done between matrix products, in one pass each: RMS and layer norms, rotary positions, the gate of an MLP or its GELU.
//
// Streams are (T, D) with their rows one behind the other unless a step is given; all sums are float32.

#include "rows.h"

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

// sum = x + add (or x alone), and the norm of the sum; scale: what each row was multiplied by.  `sum` may be x; sum and scale may be null.
extern "C" void add_rms_norm(int x_half, int add_half, int out_half, const void *x, const void *add, void *sum, const float *weight,
                             void *out, float *scale, long rows, long width, float eps, int threads) {
    typed(x_half, out_half, [=](auto x_zero, auto out_zero) {
        typedef decltype(x_zero) X;
        typedef decltype(out_zero) Out;
        auto from = (const X *)x;
        auto total = (X *)sum;
        auto work = [=](auto more) {
            each(rows, threads, [=](long t) {
                for (long d = t * width; more && d < (t + 1) * width; d += LANES) store(total + d, load(from + d) + load(more + d));
                float factor = normed((more ? total : from) + t * width, weight, (Out *)out + t * width, width, eps);
                if (scale) scale[t] = factor;
            });
        };
        if (add_half) work((const bfloat16 *)add);
        else work((const float *)add);
    });
}

// x += add (or nothing), and the layer norm of the sum.  add, out: of the type that `half` says.
extern "C" void add_layer_norm(int half, float *x, const void *add, const float *weight, const float *bias, void *out, long rows, long width,
                               float eps, int threads) {
    typed(half, half, [=](auto zero, auto) {
        typedef decltype(zero) T;
        each(rows, threads, [=](long t) {
            float *from = x + t * width;
            Vec total = all(0.0f), squares = all(0.0f);
            for (long d = 0; d < width; d += LANES) {
                Vec number = load(from + d);
                if (add) store(from + d, number += load((const T *)add + t * width + d));
                total += number;
            }
            float mean = sum(total) / width;
            for (long d = 0; d < width; d += LANES) {
                Vec off = load(from + d) - mean;
                squares += off * off;
            }
            float factor = 1.0f / std::sqrt(sum(squares) / width + eps);
            for (long d = 0; d < width; d += LANES)
                store((T *)out + t * width + d, (load(from + d) - mean) * factor * load(weight + d) + load(bias + d));
        });
    });
}

// Norms of heads in place, (rows, heads, width) with rows `row_step` apart; every head has its own weight.
extern "C" void head_norm(int half, void *x, long row_step, const float *weight, long rows, long heads, long width, float eps, int threads) {
    typed(half, half, [=](auto zero, auto) {
        each(rows, threads, [=](long t) {
            for (long head = 0; head < heads; head++) {
                auto here = (decltype(zero) *)x + t * row_step + head * width;
                normed(here, weight + head * width, here, width, eps);
            }
        });
    });
}

// With u = x scale:  grad_x = scale (g w - u mean(u g w)),  grad_weight += sum over rows of u g.
extern "C" void rms_norm_backward(int x_half, int grad_half, const void *x, const void *grad, const float *weight, const float *scale,
                                  void *grad_x, float *grad_weight, long rows, long width) {
    typed(x_half, grad_half, [=](auto x_zero, auto grad_zero) {
        typedef decltype(x_zero) X;
        typedef decltype(grad_zero) Grad;
        for (long t = 0; t < rows; t++) {
            const X *from = (const X *)x + t * width;
            const Grad *grad_row = (const Grad *)grad + t * width;
            X *to = (X *)grad_x + t * width;
            Vec along = all(0.0f);
            for (long d = 0; d < width; d += LANES) {
                Vec part = load(from + d) * scale[t] * load(grad_row + d);
                store(grad_weight + d, load(grad_weight + d) + part);
                along += part * load(weight + d);
            }
            float share = sum(along) / width;
            for (long d = 0; d < width; d += LANES) {
                Vec unit = load(from + d) * scale[t];
                store(to + d, (load(grad_row + d) * load(weight + d) - unit * share) * scale[t]);
            }
        }
    });
}

// Pairs (i, i + width/2) of every head rotated by the position's angle; sign -1: rotated back.  x: (T, heads, width), with steps.
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
                    const float *sin_row = sine + t * width, *cos_row = cosine + t * width;
                    Vec low = load(sin_row + d) * sign, high = load(sin_row + width / 2 + d) * sign;
                    // Rotated back, a number takes the sine of the one it is paired with.
                    if (sign < 0) { Vec other = low; low = high, high = other; }
                    store(to + d, a * load(cos_row + d) - b * low);
                    store(to + width / 2 + d, b * load(cos_row + width / 2 + d) + a * high);
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
            Vec x = load((const T *)gate + d), other = load((const T *)up + d), grad_out = load((const T *)grad + d);
            Vec open = sigmoid(x), opened = x * open;
            store((T *)inner + d, opened * other);
            store((T *)grad_up + d, grad_out * opened);
            store((T *)grad + d, grad_out * other * open * (1.0f + x * (1.0f - open)));
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
            Vec derivative = open + number * open * (1.0f - open) * BEND * (1.0f + 3.0f * CUBE * square);
            store((T *)out + i * LANES, number * open);
            store((T *)grad + i * LANES, load((const T *)grad + i * LANES) * derivative);
        });
    });
}
