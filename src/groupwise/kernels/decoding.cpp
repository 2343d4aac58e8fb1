// Attention of one new token per row while completions are decoded: to its prompt, which its group shares, and to its own tokens.
//
// query, key, value   (R, heads, D) of the new tokens; strides: how far apart two heads and two rows lie, tensor by tensor
// own, prompt         slabs (entries, K, room, D) of kept keys and values; row r's own tokens are entry r
// parts               (prompt entry, from, to): rows[from..to] belong to that prompt, whose keys they meet in one product
//
// All sums are float32, whatever the type of what is read and written.

#include "vectors.h"

struct Strides { long head, token; };
struct Part { int64_t entry, from, to; };

template <typename T> struct Slab {
    T *keys, *values;
    long room;
    long place(long entry, long head, long shared, long width) const { return (entry * shared + head) * room * width; }
};

// Scores of `count` kept keys for N queries (N, width), which meet a key while it is in registers.
template <int N, typename T>
static void meet(const T *keys, long count, long width, const float *query, float *scores, long across) {
    for (long t = 0; t < count; t += LANES) {
        long here = t + LANES < count ? LANES : count - t;
        Vec part[N][LANES];
        for (long i = 0; i < LANES; i++) {
            const T *key = keys + (i < here ? t + i : t) * width;
            Vec found[N];
            for (int n = 0; n < N; n++) found[n] = all(0.0f);
            for (long d = 0; d < width; d += LANES) {
                Vec number = load(key + d);
                for (int n = 0; n < N; n++) found[n] += number * load(query + n * width + d);
            }
            for (int n = 0; n < N; n++) part[n][i] = found[n];
        }
        for (int n = 0; n < N; n++) {
            Vec found = sums(part[n]);
            if (here == LANES) store(scores + n * across + t, found);
            else for (long i = 0; i < here; i++) scores[n * across + t + i] = found[i];
        }
    }
}

template <typename T>
static void meet_all(long queries, const T *keys, long count, long width, const float *query, float *scores, long across) {
    for (; queries >= 4; queries -= 4, query += 4 * width, scores += 4 * across) meet<4>(keys, count, width, query, scores, across);
    switch (queries) {
        case 1: return meet<1>(keys, count, width, query, scores, across);
        case 2: return meet<2>(keys, count, width, query, scores, across);
        case 3: return meet<3>(keys, count, width, query, scores, across);
    }
}

// Rows of one prompt, for one key-value head.
template <typename T>
static void decode(const T *query, const T *key, const T *value, T *out, const Strides *step, Slab<T> own, Slab<T> prompt, long entry,
                   long prompt_length, const int64_t *rows, long count, const int64_t *length, long group, long shared, long width,
                   float scale, long window, long head) {
    long longest = 0, m = prompt_length, wide_m = padded(m), heads = shared * group;
    for (long i = 0; i < count; i++) longest = length[rows[i]] > longest ? length[rows[i]] : longest;
    long across = wide_m + padded(longest);
    float *scores = room(count * group * (across + 2 * width) + 2 * wide_m * width);
    float *queries = scores + count * group * across, *found = queries + count * group * width;
    float *keys = found + count * group * width, *turned = keys + wide_m * width;
    const T *prompt_k = prompt.keys + prompt.place(entry, head, shared, width);
    const T *prompt_v = prompt.values + prompt.place(entry, head, shared, width);
    for (long i = 0; i < count; i++)
        for (long g = 0; g < group; g++)
            for (long d = 0; d < width; d += LANES)
                store(queries + (i * group + g) * width + d,
                      load(query + rows[i] * step[0].token + (head * group + g) * step[0].head + d) * scale);
    // Zeros behind a prompt's last key: their scores are hidden below.
    for (long t = 0; t < wide_m; t++)
        for (long d = 0; d < width; d += LANES) store(keys + t * width + d, t < m ? load(prompt_k + t * width + d) : all(0.0f));
    turn(keys, wide_m, width, turned, wide_m, 0);
    product(count * group, wide_m, width, queries, width, 1, turned, wide_m, scores, across, false);
    for (long i = 0; i < count; i++) {
        long row = rows[i], n = length[row], end = wide_m + padded(n), hidden = window > 0 && m + n > window ? m + n - window : 0;
        T *own_k = own.keys + own.place(row, head, shared, width), *own_v = own.values + own.place(row, head, shared, width);
        for (long d = 0; d < width; d++) {
            own_k[(n - 1) * width + d] = key[row * step[1].token + head * step[1].head + d];
            own_v[(n - 1) * width + d] = value[row * step[2].token + head * step[2].head + d];
        }
        float *here = scores + i * group * across;
        meet_all(group, own_k, n, width, queries + i * group * width, here + wide_m, across);
        for (long g = 0; g < group; g++, here += across) {
            for (long t = 0; t < (hidden < m ? hidden : m); t++) here[t] = -INFINITY;
            for (long t = m; t < wide_m + (hidden > m ? hidden - m : 0); t++) here[t] = -INFINITY;
            for (long t = wide_m + n; t < end; t++) here[t] = -INFINITY;
            softmax(here, end);
        }
    }
    product(count * group, width, m, scores, across, 1, prompt_v, width, found, width, false);
    for (long i = 0; i < count; i++) {
        long row = rows[i];
        float *sums = found + i * group * width;
        product(group, width, length[row], scores + i * group * across + wide_m, across, 1,
                own.values + own.place(row, head, shared, width), width, sums, width, true);
        for (long g = 0; g < group; g++)
            for (long d = 0; d < width; d += LANES)
                store(out + (row * heads + head * group + g) * width + d, load(sums + g * width + d));
    }
}

template <typename T>
static void run(const void *query, const void *key, const void *value, void *out, const Strides *step, void *own_k, void *own_v,
                long own_room, void *prompt_k, void *prompt_v, long prompt_room, const Part *parts, long count,
                const int64_t *prompt_length, const int64_t *rows, const int64_t *length, long heads, long shared, long width,
                float scale, long window, int threads) {
    Slab<T> own{(T *)own_k, (T *)own_v, own_room}, prompt{(T *)prompt_k, (T *)prompt_v, prompt_room};
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (long item = 0; item < shared * count; item++) {
        Part part = parts[item / shared];
        decode((const T *)query, (const T *)key, (const T *)value, (T *)out, step, own, prompt, part.entry,
               prompt_length[part.entry], rows + part.from, part.to - part.from, length, heads / shared, shared, width, scale, window,
               item % shared);
    }
}

extern "C" void decode_attention(int half, const void *query, const void *key, const void *value, void *out, const Strides *step,
                                 void *own_k, void *own_v, long own_room, void *prompt_k, void *prompt_v, long prompt_room,
                                 const Part *parts, long count, const int64_t *prompt_length, const int64_t *rows,
                                 const int64_t *length, long heads, long shared, long width, float scale, long window, int threads) {
    (half ? run<bfloat16> : run<float>)(query, key, value, out, step, own_k, own_v, own_room, prompt_k, prompt_v, prompt_room, parts,
                                        count, prompt_length, rows, length, heads, shared, width, scale, window, threads);
}
