// Attention in training: causal inside stretches of a stream, and from a completion to the whole of its prompt.
//
// q, k, v   queries (H, T, D), keys and values (K, T, D): H query heads in groups of H / K share a key-value head
// strides   how far apart two heads and two tokens lie, in numbers, tensor by tensor; the numbers of a head lie side by side
// families  a prompt and its completions; one thread works on one family and key-value head at a time, so nothing is added by two
// stretches (from, to, prompt from, prompt to): the tokens from..to see themselves causally and all of the prompt, which is the
//           head of its family's first stretch
//
// All sums are float32, whatever the type of what is read and written.

#include "vectors.h"

constexpr long BLOCK = 4 * ROWS;  // queries that are worked on at a time

// Most keys that a query of a family may see.
static long most_keys(const Stretch *stretches, long count) {
    long most = 0;
    for (long s = 0; s < count; s++) {
        long keys = stretches[s].to - stretches[s].from + stretches[s].prompt_to - stretches[s].prompt_from;
        if (keys > most) most = keys;
    }
    return padded(most);
}

template <typename T>
static void read_rows(const T *from, Strides step, long head, long first, long count, long width, float scale, float *to) {
    for (long t = 0; t < count; t++) {
        const T *row = from + head * step.head + (first + t) * step.token;
        for (long d = 0; d < width; d += LANES) store(to + t * width + d, load(row + d) * scale);
    }
}

template <typename T>
static void write_rows(const float *from, long from_row, long count, long width, float scale, T *to, Strides step, long head, long first) {
    for (long t = 0; t < count; t++) {
        T *row = to + head * step.head + (first + t) * step.token;
        for (long d = 0; d < width; d += LANES) store(row + d, load(from + t * from_row + d) * scale);
    }
}

template <typename T>
static void forward(const T *q, const T *k, const T *v, T *out, float *lse, const Strides *step, long tokens, long group, long width,
                    float scale, const Stretch *stretches, long count, long shared) {
    long most = most_keys(stretches, count);
    float *transposed = workspace(2 * most * width + BLOCK * (most + 2 * width));
    float *values = transposed + most * width, *scores = values + most * width;
    float *queries = scores + BLOCK * most, *found = queries + BLOCK * width;
    std::memset(transposed, 0, most * width * sizeof(float));
    for (long s = 0; s < count; s++) {
        Stretch stretch = stretches[s];
        long length = stretch.to - stretch.from, before = stretch.prompt_to - stretch.prompt_from;
        read_rows(k, step[1], shared, stretch.from, length, width, 1.0f, values + before * width);
        transpose(values + before * width, length, width, transposed, most, before);
        read_rows(v, step[2], shared, stretch.from, length, width, 1.0f, values + before * width);
        for (long head = shared * group; head < (shared + 1) * group; head++)
            for (long first = 0; first < length; first += BLOCK) {
                long rows = first + BLOCK < length ? BLOCK : length - first, keys = before + first + rows, across = padded(keys);
                read_rows(q, step[0], head, stretch.from + first, rows, width, scale, queries);
                product(rows, across, width, queries, width, 1, transposed, most, scores, most, false);
                for (long r = 0; r < rows; r++) {
                    float *score = scores + r * most;
                    long seen = before + first + r + 1;
                    for (long t = seen; t < across; t++) score[t] = -INFINITY;
                    lse[head * tokens + stretch.from + first + r] = softmax(score, across);
                }
                product(rows, width, keys, scores, most, 1, values, width, found, width, false);
                write_rows(found, width, rows, width, 1.0f, out, step[3], head, stretch.from + first);
            }
    }
}

// With p = exp(score - lse) and c = rowsum(grad_out * out):  dv = p^T grad_out,  ds = p (grad_out v^T - c),  dq = ds k,  dk = ds^T q.
template <typename T>
static void backward(const T *q, const T *k, const T *v, const T *out, const float *lse, const T *grad_out, T *grad_q, T *grad_k,
                     T *grad_v, const Strides *step, long tokens, long group, long width, float scale, const Stretch *stretches,
                     long count, long shared) {
    long most = most_keys(stretches, count), matrix = most * width;
    float *transposed_k = workspace(5 * matrix + BLOCK * (2 * most + 3 * width) + BLOCK);
    float *transposed_v = transposed_k + matrix, *keys = transposed_v + matrix, *sum_k = keys + matrix, *sum_v = sum_k + matrix;
    float *weights = sum_v + matrix, *score_grads = weights + BLOCK * most;
    float *queries = score_grads + BLOCK * most, *grads = queries + BLOCK * width, *rows_out = grads + BLOCK * width;
    std::memset(transposed_k, 0, 2 * matrix * sizeof(float));
    long prompt = 0, start = stretches[0].from;  // of the family's tokens, those whose sums wait for the last stretch
    if (count > 1) prompt = stretches[1].prompt_to - stretches[1].prompt_from;
    for (long s = 0; s < count; s++) {
        Stretch stretch = stretches[s];
        long length = stretch.to - stretch.from, before = stretch.prompt_to - stretch.prompt_from, own = before * width;
        read_rows(v, step[2], shared, stretch.from, length, width, 1.0f, keys + own);
        transpose(keys + own, length, width, transposed_v, most, before);
        read_rows(k, step[1], shared, stretch.from, length, width, 1.0f, keys + own);
        transpose(keys + own, length, width, transposed_k, most, before);
        std::memset(sum_k + own, 0, length * width * sizeof(float));
        std::memset(sum_v + own, 0, length * width * sizeof(float));
        for (long head = shared * group; head < (shared + 1) * group; head++)
            for (long first = 0; first < length; first += BLOCK) {
                long rows = first + BLOCK < length ? BLOCK : length - first, seen = before + first + rows, across = padded(seen);
                long place = stretch.from + first;
                read_rows(q, step[0], head, place, rows, width, scale, queries);
                read_rows(grad_out, step[4], head, place, rows, width, 1.0f, grads);
                read_rows(out, step[3], head, place, rows, width, 1.0f, rows_out);
                product(rows, across, width, queries, width, 1, transposed_k, most, weights, most, false);
                product(rows, across, width, grads, width, 1, transposed_v, most, score_grads, most, false);
                for (long r = 0; r < rows; r++) {
                    float *weight = weights + r * most, *score_grad = score_grads + r * most;
                    for (long t = before + first + r + 1; t < across; t++) weight[t] = -INFINITY;
                    Vec along = all(0.0f);
                    for (long d = 0; d < width; d += LANES) along += load(grads + r * width + d) * load(rows_out + r * width + d);
                    float less = sum(along), level = lse[head * tokens + place + r];
                    for (long t = 0; t < across; t += LANES) {
                        Vec p = exponential(load(weight + t) - level);
                        store(weight + t, p);
                        store(score_grad + t, p * (load(score_grad + t) - less));
                    }
                }
                product(rows, width, seen, score_grads, most, 1, keys, width, rows_out, width, false);
                write_rows(rows_out, width, rows, width, scale, grad_q, step[5], head, place);
                product(seen, width, rows, score_grads, 1, most, queries, width, sum_k, width, true);
                product(seen, width, rows, weights, 1, most, grads, width, sum_v, width, true);
            }
        // The first stretch begins with the prompt, whose sums stay until the last completion has added its own.
        long kept = s == 0 ? prompt : 0;
        write_rows(sum_k + own + kept * width, width, length - kept, width, 1.0f, grad_k, step[6], shared, stretch.from + kept);
        write_rows(sum_v + own + kept * width, width, length - kept, width, 1.0f, grad_v, step[7], shared, stretch.from + kept);
    }
    write_rows(sum_k, width, prompt, width, 1.0f, grad_k, step[6], shared, start);
    write_rows(sum_v, width, prompt, width, 1.0f, grad_v, step[7], shared, start);
}

#include "attention_tiles.h"

template <typename T, typename... Rest>
static void forward_best(const T *q, Rest... rest) {
#ifdef MATRIX_TILES
    if (has_tiles()) return forward_tiles<sizeof(T) == 2 ? 1 : 3>(q, rest...);
#endif
    forward(q, rest...);
}

template <typename T, typename... Rest>
static void backward_best(const T *q, Rest... rest) {
#ifdef MATRIX_TILES
    if (has_tiles()) return backward_tiles<sizeof(T) == 2 ? 1 : 3>(q, rest...);
#endif
    backward(q, rest...);
}

template <typename Work>
static void each(long families, long shared, int threads, Work work) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (long item = 0; item < families * shared; item++) work(item / shared, item % shared);
}

extern "C" void attention_forward(int half, const void *q, const void *k, const void *v, void *out, float *lse, const Strides *step,
                                  long tokens, long heads, long shared, long width, float scale, const int64_t *first,
                                  const Stretch *stretches, long families, int threads) {
    each(families, shared, threads, [=](long f, long head) {
        auto run = [=](auto zero) {
            typedef decltype(zero) T;
            forward_best((const T *)q, (const T *)k, (const T *)v, (T *)out, lse, step, tokens, heads / shared, width, scale,
                    stretches + first[f], first[f + 1] - first[f], head);
        };
        if (half) run(bfloat16{}); else run(0.0f);
    });
}

extern "C" void attention_backward(int half, const void *q, const void *k, const void *v, const void *out, const float *lse,
                                   const void *grad_out, void *grad_q, void *grad_k, void *grad_v, const Strides *step, long tokens,
                                   long heads, long shared, long width, float scale, const int64_t *first, const Stretch *stretches,
                                   long families, int threads) {
    each(families, shared, threads, [=](long f, long head) {
        auto run = [=](auto zero) {
            typedef decltype(zero) T;
            backward_best((const T *)q, (const T *)k, (const T *)v, (const T *)out, lse, (const T *)grad_out, (T *)grad_q, (T *)grad_k,
                     (T *)grad_v, step, tokens, heads / shared, width, scale, stretches + first[f], first[f + 1] - first[f], head);
        };
        if (half) run(bfloat16{}); else run(0.0f);
    });
}
