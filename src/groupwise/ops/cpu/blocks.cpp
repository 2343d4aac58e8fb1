// Decoding with a model like Llama or GPT-2.  The kernels of a block stand in other files; here they follow one another, block after block and
// token after token, with no interpreter between them, in which small models would spend half of a step.

#include <algorithm>
#include <memory>

#include "vectors.h"

struct Weight { const void *packed; const float *bias; long outputs; };  // as products.cpp packs it
struct Norm { const float *weight, *bias; float eps; };                // with a bias a layer norm, else an RMSNorm

struct Block {
    Norm norm, head_norm, mlp_norm;  // head_norm's weight: (heads + shared, width), or null
    Weight qkv, out, up, down;       // up: the gate beside it, or GELU follows
    void *own_k, *own_v, *prompt_k, *prompt_v;  // slabs, as decoding.cpp keeps them
    long window;
    float scale;
};

struct Step {
    float *x;    // (rows, hidden), to which all is added but what the last block's MLP adds
    void *last;  // (rows, hidden): that
    const float *cosine, *sine;  // of the rows' positions; null: nothing turns
    const Part *parts;
    long part_count;
    const int64_t *prompt_length, *rows_of_parts, *length, *places;  // places: the entries of rows' own tokens; null: their numbers
    long own_room, prompt_room, rows, hidden, inner, heads, shared, width;
};

// Around the blocks.  Tables: (vocabulary, hidden) of tokens; of positions (positions, width) cosines and sines or (positions, hidden)
// embeddings, the others null.
struct Ends {
    const float *embedding, *cosine, *sine, *position;
    Norm norm;
    Weight head;
    long blocks;
};

// What is decoded, an entry for each row: its newest token and how many of its own have been kept, both overwritten as tokens are drawn;
// the most it may have, its prompt.
struct Tokens {
    int64_t *newest, *kept;
    const int64_t *limit, *prompt;
    const double *uniform;  // (rows, uniform_step), one for each of a row's tokens
    long uniform_step;
    const int64_t *ending;  // tokens that end a completion
    long endings;
    float temperature;
    int until_one_ends;
    long steps, at_once;  // the most tokens for each row; rows whose logits exist at the same time
    int64_t *token;       // (rows, steps), drawn of them
    float *logp;
    int64_t *drawn;
};

extern "C" {
void add_rms_norm(int, int, int, const void *, const void *, void *, const float *, void *, float *, long, long, float, int);
void add_layer_norm(int, float *, const void *, const float *, const float *, void *, long, long, float, int);
void head_norm(int, void *, long, const float *, long, long, long, float, int);
void rotate(int, const void *, long, long, const float *, const float *, void *, long, long, long, float, int);
void gated(int, const void *, const void *, void *, long, long, long, long, int);
void gelu(int, const void *, void *, long, int);
void product_float(const float *, const float *, const float *, float *, long, long, long, int);
void product_half(const bfloat16 *, const bfloat16 *, const float *, bfloat16 *, long, long, long, int);
void decode_attention(int, const void *, const void *, const void *, void *, const Strides *, void *, void *, long, void *, void *, long,
                      const Part *, long, const int64_t *, const int64_t *, const int64_t *, const int64_t *, long, long, long, float, long,
                      int);
void draw_tokens(int, const void *, float, const double *, int64_t *, float *, long, long, int);
}

static void multiply(const float *from, const Weight &weight, float *to, long rows, long inputs, int threads) {
    product_float(from, (const float *)weight.packed, weight.bias, to, rows, weight.outputs, inputs, threads);
}

static void multiply(const bfloat16 *from, const Weight &weight, bfloat16 *to, long rows, long inputs, int threads) {
    product_half(from, (const bfloat16 *)weight.packed, weight.bias, to, rows, weight.outputs, inputs, threads);
}

// x += add (or nothing); out: the norm of the sum.
template <typename T>
static void normalize(float *x, const T *add, const Norm &norm, T *out, long rows, long width, int threads) {
    constexpr int HALF = sizeof(T) == sizeof(bfloat16);
    if (norm.bias) add_layer_norm(HALF, x, add, norm.weight, norm.bias, out, rows, width, norm.eps, threads);
    else add_rms_norm(false, HALF, HALF, x, add, x, norm.weight, out, nullptr, rows, width, norm.eps, threads);
}

template <typename T>
static void run(const Block *blocks, long count, const Step &s, int threads) {
    constexpr int HALF = sizeof(T) == sizeof(bfloat16);
    long both = s.heads + s.shared, all = both + s.shared, width = s.width;
    std::unique_ptr<T[]> room(new T[s.rows * (s.hidden + (all + both + s.heads) * width + 3 * s.inner)]);
    T *normed = room.get(), *qkv = normed + s.rows * s.hidden, *turned = qkv + s.rows * all * width, *seen = turned + s.rows * both * width;
    T *up = seen + s.rows * s.heads * width, *inner = up + s.rows * 2 * s.inner, *last = (T *)s.last, *asked = s.cosine ? turned : qkv;
    const long asked_step = (s.cosine ? both : all) * width;
    const Strides steps[] = {{width, asked_step}, {width, asked_step}, {width, all * width}};
    for (const Block *b = blocks; b < blocks + count; b++) {
        normalize(s.x, b == blocks ? nullptr : last, b->norm, normed, s.rows, s.hidden, threads);
        multiply(normed, b->qkv, qkv, s.rows, s.hidden, threads);
        if (b->head_norm.weight) head_norm(HALF, qkv, all * width, b->head_norm.weight, s.rows, both, width, b->head_norm.eps, threads);
        if (s.cosine) rotate(HALF, qkv, all * width, width, s.cosine, s.sine, turned, s.rows, both, width, 1.0f, threads);
        decode_attention(HALF, asked, asked + s.heads * width, qkv + both * width, seen, steps, b->own_k, b->own_v, s.own_room, b->prompt_k,
                         b->prompt_v, s.prompt_room, s.parts, s.part_count, s.prompt_length, s.rows_of_parts, s.length, s.places, s.heads,
                         s.shared, width, b->scale, b->window, threads);
        multiply(seen, b->out, last, s.rows, s.heads * width, threads);
        normalize(s.x, last, b->mlp_norm, normed, s.rows, s.hidden, threads);
        multiply(normed, b->up, up, s.rows, s.hidden, threads);
        if (b->up.outputs == s.inner) gelu(HALF, up, inner, s.rows * s.inner, threads);
        else gated(HALF, up, up + s.inner, inner, s.rows, s.inner, 2 * s.inner, s.inner, threads);
        multiply(inner, b->down, last, s.rows, s.inner, threads);
    }
}

extern "C" void decode_blocks(int half, const Block *blocks, long count, const Step *step, int threads) {
    (half ? run<bfloat16> : run<float>)(blocks, count, *step, threads);
}

constexpr long ROWS_OF_PART = 16;  // as decoding.py's ROWS_AT_ONCE

// The live rows prompt by prompt: whose keys of the prompt meet all of them in one product.
struct Order {
    std::vector<Part> parts;
    std::vector<int64_t> rows;

    Order(const std::vector<int64_t> &live, const int64_t *prompt) {
        for (size_t row = 0; row < live.size(); row++) rows.push_back(row);
        auto of = [&](int64_t row) { return prompt[live[row]]; };
        std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return of(a) < of(b); });
        for (int64_t i = 0; i < (int64_t)rows.size(); i++) {
            bool more = i && of(rows[i]) == of(rows[i - 1]) && i - parts.back().from < ROWS_OF_PART;
            if (more) parts.back().to = i + 1;
            else parts.push_back({of(rows[i]), i, i + 1});
        }
    }
};

template <typename T>
static void decode(const Block *blocks, const Ends &ends, Step s, const Tokens &t, int threads) {
    constexpr int HALF = sizeof(T) == sizeof(bfloat16);
    long vocabulary = ends.head.outputs, at_once = std::min(t.at_once, s.rows);
    std::vector<int64_t> live, length(s.rows), token(s.rows);
    for (long entry = 0; entry < s.rows; entry++) live.push_back(entry);
    std::vector<float> x(s.rows * s.hidden), cosine(s.rows * s.width), sine(s.rows * s.width), logp(s.rows);
    std::vector<double> uniform(s.rows);
    std::unique_ptr<T[]> last(new T[s.rows * s.hidden]), normed(new T[s.rows * s.hidden]), logits(new T[at_once * vocabulary]);
    s.x = x.data(), s.last = last.get(), s.length = length.data();
    if (ends.cosine) s.cosine = cosine.data(), s.sine = sine.data();
    auto lay_out = [&](long row, long entry) {
        long position = s.prompt_length[t.prompt[entry]] + t.kept[entry];
        length[row] = ++t.kept[entry];
        uniform[row] = t.uniform[entry * t.uniform_step + length[row]];
        std::copy_n(ends.embedding + t.newest[entry] * s.hidden, s.hidden, s.x + row * s.hidden);
        for (long d = 0; ends.position && d < s.hidden; d++) s.x[row * s.hidden + d] += ends.position[position * s.hidden + d];
        if (!ends.cosine) return;
        std::copy_n(ends.cosine + position * s.width, s.width, &cosine[row * s.width]);
        std::copy_n(ends.sine + position * s.width, s.width, &sine[row * s.width]);
    };
    auto goes_on = [&](long row, long entry) {
        long place = entry * t.steps + t.drawn[entry]++;
        t.token[place] = t.newest[entry] = token[row];
        t.logp[place] = logp[row];
        bool ended = std::find(t.ending, t.ending + t.endings, token[row]) != t.ending + t.endings;
        return !ended && t.kept[entry] + 1 < t.limit[entry];
    };
    Order order(live, t.prompt);
    for (long step = 0; step < t.steps && !live.empty(); step++) {
        s.rows = live.size(), s.places = live.data();
        s.parts = order.parts.data(), s.part_count = order.parts.size(), s.rows_of_parts = order.rows.data();
        for (long row = 0; row < s.rows; row++) lay_out(row, live[row]);
        run<T>(blocks, ends.blocks, s, threads);
        normalize(s.x, (const T *)s.last, ends.norm, normed.get(), s.rows, s.hidden, threads);
        for (long row = 0; row < s.rows; row += at_once) {
            long rows = std::min(at_once, s.rows - row);
            multiply(normed.get() + row * s.hidden, ends.head, logits.get(), rows, s.hidden, threads);
            draw_tokens(HALF, logits.get(), t.temperature, &uniform[row], &token[row], &logp[row], rows, vocabulary, threads);
        }
        std::vector<int64_t> still;
        for (long row = 0; row < s.rows; row++)
            if (goes_on(row, live[row])) still.push_back(live[row]);
        if (still.size() == live.size()) continue;
        if (t.until_one_ends) return;
        live = still;
        order = Order(live, t.prompt);
    }
}

// Tokens after one another, until all rows (or, where it is said, one of them) have ended or drawn so many.
extern "C" void decode_tokens(int half, const Block *blocks, const Ends *ends, const Step *step, const Tokens *tokens, int threads) {
    (half ? decode<bfloat16> : decode<float>)(blocks, *ends, *step, *tokens, threads);
}
