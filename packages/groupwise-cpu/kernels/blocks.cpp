// Decoding with a model like Llama or GPT-2.  The kernels of a block stand in other files; here they follow one another, block after block and
// token after token, with no interpreter between them, in which small models would spend half of a step.

#include <algorithm>
#include <memory>

#include "vectors.h"

// Where the rows of a step stand: x (rows, hidden), to which all is added but what the last block's MLP adds; last: that; cosine,
// sine: of the rows' positions, null where nothing is rotated; places: the entries of rows' own tokens.
struct Step {
    float *x;
    void *last;
    const float *cosine, *sine;
    const Part *parts;
    long part_count;
    const int64_t *rows_of_parts, *length, *places;
    long rows;
};

template <typename T>
static void multiply(const T *from, const Weight &weight, T *to, long rows, long inputs, int threads) {
    linear(sizeof(T) == sizeof(bfloat16), from, weight.packed, weight.bias, to, rows, weight.outputs, inputs, threads);
}

// x += add (or nothing); out: the norm of the sum.
template <typename T>
static void normalize(float *x, const T *add, const Norm &norm, T *out, long rows, long width, int threads) {
    constexpr int HALF = sizeof(T) == sizeof(bfloat16);
    if (norm.bias) add_layer_norm(HALF, x, add, norm.weight, norm.bias, out, rows, width, norm.eps, threads);
    else add_rms_norm(false, HALF, HALF, x, add, x, norm.weight, out, nullptr, rows, width, norm.eps, threads);
}

template <typename T>
static void run(const Block *blocks, long count, const Model &m, const Step &s, const int64_t *prompt_length, int threads) {
    constexpr int HALF = sizeof(T) == sizeof(bfloat16);
    long both = m.heads + m.shared, all = both + m.shared, width = m.width;
    std::unique_ptr<T[]> workspace(new T[s.rows * (m.hidden + (all + both + m.heads) * width + 3 * m.inner)]);
    T *normed = workspace.get(), *qkv = normed + s.rows * m.hidden, *rotated = qkv + s.rows * all * width, *seen = rotated + s.rows * both * width;
    T *up = seen + s.rows * m.heads * width, *inner = up + s.rows * 2 * m.inner, *last = (T *)s.last, *query = s.cosine ? rotated : qkv;
    const long query_step = (s.cosine ? both : all) * width;
    const Strides steps[] = {{width, query_step}, {width, query_step}, {width, all * width}};
    for (const Block *b = blocks; b < blocks + count; b++) {
        normalize(s.x, b == blocks ? nullptr : last, b->norm, normed, s.rows, m.hidden, threads);
        multiply(normed, b->qkv, qkv, s.rows, m.hidden, threads);
        if (b->head_norm.weight) head_norm(HALF, qkv, all * width, b->head_norm.weight, s.rows, both, width, b->head_norm.eps, threads);
        if (s.cosine) rotate(HALF, qkv, all * width, width, s.cosine, s.sine, rotated, s.rows, both, width, 1.0f, threads);
        decode_attention(HALF, query, query + m.heads * width, qkv + both * width, seen, steps, b->own_k, b->own_v, m.own_capacity, b->prompt_k,
                         b->prompt_v, m.prompt_capacity, s.parts, s.part_count, prompt_length, s.rows_of_parts, s.length, s.places, m.heads,
                         m.shared, width, b->scale, b->window, threads);
        multiply(seen, b->out, last, s.rows, m.heads * width, threads);
        normalize(s.x, last, b->mlp_norm, normed, s.rows, m.hidden, threads);
        multiply(normed, b->up, up, s.rows, m.hidden, threads);
        if (b->up.outputs == m.inner) gelu(HALF, up, inner, s.rows * m.inner, threads);
        else gated(HALF, up, up + m.inner, inner, s.rows, m.inner, 2 * m.inner, m.inner, threads);
        multiply(inner, b->down, last, s.rows, m.inner, threads);
    }
}

constexpr long ROWS_OF_PART = 16;  // as decoding.py's ROWS_AT_ONCE

// The live rows prompt by prompt: whose queries are multiplied by the prompt's keys in one product.
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
static void decode(const Block *blocks, const Ends &ends, const Model &m, const Tokens &t, int threads) {
    Step s{};
    s.rows = t.rows;
    constexpr int HALF = sizeof(T) == sizeof(bfloat16);
    long vocabulary = ends.head.outputs, at_once = std::min(t.at_once, s.rows);
    std::vector<int64_t> live, length(s.rows), token(s.rows);
    for (long entry = 0; entry < s.rows; entry++) live.push_back(entry);
    std::vector<float> x(s.rows * m.hidden), cosine(s.rows * m.width), sine(s.rows * m.width), logp(s.rows);
    std::vector<double> uniform(s.rows);
    std::unique_ptr<T[]> last(new T[s.rows * m.hidden]), normed(new T[s.rows * m.hidden]), logits(new T[at_once * vocabulary]);
    s.x = x.data(), s.last = last.get(), s.length = length.data();
    if (ends.cosine) s.cosine = cosine.data(), s.sine = sine.data();
    auto lay_out = [&](long row, long entry) {
        long position = t.prompt_length[t.prompt[entry]] + t.kept[entry];
        length[row] = ++t.kept[entry];
        uniform[row] = t.uniform[entry * t.uniform_stride + length[row]];
        std::copy_n(ends.embedding + t.newest[entry] * m.hidden, m.hidden, s.x + row * m.hidden);
        for (long d = 0; ends.position && d < m.hidden; d++) s.x[row * m.hidden + d] += ends.position[position * m.hidden + d];
        if (!ends.cosine) return;
        std::copy_n(ends.cosine + position * m.width, m.width, &cosine[row * m.width]);
        std::copy_n(ends.sine + position * m.width, m.width, &sine[row * m.width]);
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
        run<T>(blocks, ends.blocks, m, s, t.prompt_length, threads);
        normalize(s.x, (const T *)s.last, ends.norm, normed.get(), s.rows, m.hidden, threads);
        for (long row = 0; row < s.rows; row += at_once) {
            long rows = std::min(at_once, s.rows - row);
            multiply(normed.get() + row * m.hidden, ends.head, logits.get(), rows, m.hidden, threads);
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
extern "C" void decode_tokens(int half, const Block *blocks, const Ends *ends, const Model *model, const Tokens *tokens, int threads) {
    (half ? decode<bfloat16> : decode<float>)(blocks, *ends, *model, *tokens, threads);
}
