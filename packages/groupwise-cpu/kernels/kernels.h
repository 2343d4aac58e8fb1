// What the kernels' files give one another: `bindings.cpp` makes operations of torch of it.
//
// half      1 if numbers are bfloat16, 0 if they are float32; pointers to such numbers are void
// threads   how many may work at the same time
// What is left out where a pointer may be null is said at the function.

#pragma once

#include <cstdint>

struct bfloat16 { uint16_t bits; };

// Numbers between one head or token and the next.
struct Strides { long head, token; };

// A stretch of a stream: tokens from..to see themselves causally, and the prompt's tokens.
struct Stretch { int64_t from, to, prompt_from, prompt_to; };

// Of decoding: rows[from..to] belong to the prompt of this entry.
struct Part { int64_t entry, from, to; };

// A weight as `pack_weight` packs it.
struct Weight { const void *packed; const float *bias; long outputs; };

// With a bias a layer norm, else an RMSNorm.
struct Norm { const float *weight; const float *bias; float eps; };

// One block of a model like Llama or GPT-2.  head_norm's weight: (heads + shared, width), or null.  up: the gate beside it, or GELU
// follows.  own, prompt: slabs of keys and values, as `keep_entries` fills them.
struct Block {
    Norm norm;
    Norm head_norm;
    Norm mlp_norm;
    Weight qkv;
    Weight out;
    Weight up;
    Weight down;
    void *own_k;
    void *own_v;
    void *prompt_k;
    void *prompt_v;
    long window;
    float scale;
};

// What all blocks share.  own_capacity, prompt_capacity: tokens in an entry of a slab.
struct Model {
    long own_capacity, prompt_capacity, hidden, inner, heads, shared, width;
};

// Around the blocks.  Tables: (vocabulary, hidden) of tokens; of positions (positions, width) cosines and sines or (positions, hidden)
// embeddings, the others null.
struct Ends {
    const float *embedding;
    const float *cosine;
    const float *sine;
    const float *position;
    Norm norm;
    Weight head;
    long blocks;
};

// What is decoded, an entry for each row: its newest token and how many of its own have been kept, both overwritten as tokens are drawn;
// the most it may have; its prompt's entry, and the tokens of each prompt.  uniform: (rows, uniform_stride), one for each of a row's
// tokens.  ending: tokens that end a completion.  steps: the most tokens for each row; at_once: rows whose logits exist at the same
// time.  token, logp: (rows, steps), `drawn` of them are filled.
struct Tokens {
    int64_t *newest;
    int64_t *kept;
    const int64_t *limit;
    const int64_t *prompt;
    const int64_t *prompt_length;
    const double *uniform;
    long uniform_stride;
    const int64_t *ending;
    long endings;
    float temperature;
    int until_one_ends;
    long rows, steps, at_once;
    int64_t *token;
    float *logp;
    int64_t *drawn;
};

extern "C" {

// ---- which processor this is
int has_tiles();
int has_gemm();

// ---- attention.cpp: strides are of query, key, value, out (backward: and grad_out and the three gradients)
void attention_forward(int half, const void *query, const void *key, const void *value, void *out, float *lse, const Strides *strides,
                       long tokens, long heads, long shared, long width, float scale, const int64_t *first, const Stretch *stretches,
                       long families, int threads);
void attention_backward(int half, const void *query, const void *key, const void *value, const void *out, const float *lse,
                        const void *grad_out, void *grad_query, void *grad_key, void *grad_value, const Strides *strides, long tokens,
                        long heads, long shared, long width, float scale, const int64_t *first, const Stretch *stretches, long families,
                        int threads);

// ---- rows.cpp: `add` and `scale` may be null
void add_rms_norm(int x_half, int add_half, int out_half, const void *x, const void *add, void *sum, const float *weight, void *out,
                  float *scale, long rows, long width, float eps, int threads);
void add_layer_norm(int half, float *x, const void *add, const float *weight, const float *bias, void *out, long rows, long width,
                    float eps, int threads);
void rms_norm_backward(int x_half, int grad_half, const void *x, const void *grad, const float *weight, const float *scale,
                       void *grad_x, float *grad_weight, long rows, long width);
void head_norm(int half, void *x, long row_stride, const float *weight, long rows, long heads, long width, float eps, int threads);
void rotate(int half, const void *x, long token_stride, long head_stride, const float *cosine, const float *sine, void *out, long tokens,
            long heads, long width, float sign, int threads);
void gated(int half, const void *gate, const void *up, void *out, long rows, long width, long stride, long out_stride, int threads);
void gated_backward(int half, const void *gate, const void *up, void *grad, void *inner, void *grad_up, long numbers, int threads);
void gelu(int half, const void *x, void *out, long numbers, int threads);
void gelu_backward(int half, const void *x, void *grad, void *out, long numbers, int threads);

// ---- logits.cpp: `entropy` and `in_entropy` may be null
void read_logits(int half, const void *x, const float *scale, const int64_t *target, float *lse, float *logp, float *entropy, long rows,
                 long width, int threads);
void logits_gradient(int half, void *x, const float *scale, const int64_t *target, const float *lse, const float *entropy,
                     const float *in_logp, const float *in_entropy, long rows, long width, int threads);
void draw_tokens(int half, const void *x, float temperature, const double *uniform, int64_t *token, float *logp, long rows, long width,
                 int threads);

// ---- gemm.cpp: `bias` may be null
void gemm(int half, const void *a, long a_row, long a_column, const void *b, long b_row, long b_column, float *out, long out_row,
          long rows, long columns, long inners, const float *bias, int add, int threads);

// ---- products.cpp: `bias` may be null
void pack_weight(int half, int from_half, const void *weight, long output_stride, long input_stride, void *packed, long outputs,
                 long inputs, int threads);
void linear(int half, const void *x, const void *packed, const float *bias, void *out, long rows, long outputs, long inputs,
            int threads);

// ---- decoding.cpp: keep_entries takes strides of key and value one after another, (entry, token, head) each; `places` may be null
void keep_entries(int half, const void *key, const void *value, const long *strides, void *keys, void *values, long capacity, long first,
                  long count, long length, long shared, long width, int threads);
void decode_attention(int half, const void *query, const void *key, const void *value, void *out, const Strides *strides, void *own_k,
                      void *own_v, long own_capacity, void *prompt_k, void *prompt_v, long prompt_capacity, const Part *parts, long count,
                      const int64_t *prompt_length, const int64_t *rows, const int64_t *length, const int64_t *places, long heads,
                      long shared, long width, float scale, long window, int threads);

// ---- blocks.cpp
void decode_tokens(int half, const Block *blocks, const Ends *ends, const Model *model, const Tokens *tokens, int threads);
}
