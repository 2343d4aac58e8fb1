// One new token per row through the blocks of a Llama-like model.  The kernels of a block stand in other files; here they follow one
// another, block after block, with no interpreter between them, in which small models would spend half of a step.

#include <memory>

#include "vectors.h"

struct Weight { const void *packed; const float *bias; long outputs; };  // as products.cpp packs it

struct Block {
    const float *norm, *head_norm, *mlp_norm;  // head_norm: (heads + shared, width), or null
    Weight qkv, out, gate_up, down;
    void *own_k, *own_v, *prompt_k, *prompt_v;  // slabs, as decoding.cpp keeps them
    long window;
    float norm_eps, head_eps, mlp_eps, scale;
};

struct Step {
    float *x;    // (rows, hidden), to which all is added but what the last block's MLP adds
    void *last;  // (rows, hidden): that
    const float *cosine, *sine;
    const Part *parts;
    long part_count;
    const int64_t *prompt_length, *rows_of_parts, *length;
    long own_room, prompt_room, rows, hidden, inner, heads, shared, width;
};

extern "C" {
void add_rms_norm(int, int, int, const void *, const void *, void *, const float *, void *, float *, long, long, float, int);
void head_norm(int, void *, long, const float *, long, long, long, float, int);
void rotate(int, const void *, long, long, const float *, const float *, void *, long, long, long, float, int);
void gated(int, const void *, const void *, void *, long, long, long, long, int);
void product_float(const float *, const float *, const float *, float *, long, long, long, int);
void product_half(const bfloat16 *, const bfloat16 *, const float *, bfloat16 *, long, long, long, int);
void decode_attention(int, const void *, const void *, const void *, void *, const Strides *, void *, void *, long, void *, void *, long,
                      const Part *, long, const int64_t *, const int64_t *, const int64_t *, long, long, long, float, long, int);
}

template <typename T>
static void run(const Block *blocks, long count, const Step &s, int threads) {
    constexpr int HALF = sizeof(T) == sizeof(bfloat16);
    long both = s.heads + s.shared, all = both + s.shared, width = s.width;
    std::unique_ptr<T[]> room(new T[s.rows * (s.hidden + (all + both + s.heads) * width + 3 * s.inner)]);
    T *normed = room.get(), *qkv = normed + s.rows * s.hidden, *turned = qkv + s.rows * all * width, *seen = turned + s.rows * both * width;
    T *gate_up = seen + s.rows * s.heads * width, *inner = gate_up + s.rows * 2 * s.inner, *last = (T *)s.last;
    auto multiply = [&](const T *from, long inputs, const Weight &weight, T *to) {
        if constexpr (!HALF) product_float(from, (const float *)weight.packed, weight.bias, to, s.rows, weight.outputs, inputs, threads);
        else product_half(from, (const bfloat16 *)weight.packed, weight.bias, to, s.rows, weight.outputs, inputs, threads);
    };
    auto add_norm = [&](const T *add, const float *weight, float eps) {
        add_rms_norm(false, HALF, HALF, s.x, add, s.x, weight, normed, nullptr, s.rows, s.hidden, eps, threads);
    };
    const Strides steps[] = {{width, both * width}, {width, both * width}, {width, all * width}};
    for (const Block *b = blocks; b < blocks + count; b++) {
        add_norm(b == blocks ? nullptr : last, b->norm, b->norm_eps);
        multiply(normed, s.hidden, b->qkv, qkv);
        if (b->head_norm) head_norm(HALF, qkv, all * width, b->head_norm, s.rows, both, width, b->head_eps, threads);
        rotate(HALF, qkv, all * width, width, s.cosine, s.sine, turned, s.rows, both, width, 1.0f, threads);
        decode_attention(HALF, turned, turned + s.heads * width, qkv + both * width, seen, steps, b->own_k, b->own_v, s.own_room, b->prompt_k,
                         b->prompt_v, s.prompt_room, s.parts, s.part_count, s.prompt_length, s.rows_of_parts, s.length, s.heads, s.shared,
                         width, b->scale, b->window, threads);
        multiply(seen, s.heads * width, b->out, last);
        add_norm(last, b->mlp_norm, b->mlp_eps);
        multiply(normed, s.hidden, b->gate_up, gate_up);
        gated(HALF, gate_up, gate_up + s.inner, inner, s.rows, s.inner, 2 * s.inner, s.inner, threads);
        multiply(inner, s.inner, b->down, last);
    }
}

extern "C" void decode_blocks(int half, const Block *blocks, long count, const Step *step, int threads) {
    (half ? run<bfloat16> : run<float>)(blocks, count, *step, threads);
}
