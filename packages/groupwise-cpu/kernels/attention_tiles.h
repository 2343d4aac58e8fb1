// Attention in training on matrix tiles, 32 queries and 32 keys at a time.
//
// Scores are made transposed, S = K Q^T, with keys below each other and queries side by side.  A softmax then runs down the lanes of vectors,
// and what leaves it is a tile for the next product without being transposed: rows of it side by side in pairs (weights times values,
// gradients of scores times keys), or 32 queries in a row (both, times queries and gradients of outputs).
//
// PARTS of a tile: 1 for bfloat16 numbers, and weights and gradients are rounded to it; 3 for float32 (tiles.h).

#pragma once

#include "tiles.h"

#ifdef MATRIX_TILES
static_assert(PAIR == DEPTH && TILE == LANES, "a block of keys is as deep as a tile, queries of a tile are lanes");

static inline long whole(long count) { return (count + PAIR - 1) / PAIR * PAIR; }

// Hands out parts of a thread's workspace.  They are whole cache lines: one of their sides is a multiple of 32, the other of 16.
struct Arena {
    float *next;

    float *floats(long count) { next += count; return next - count; }
    bfloat16 *tiles(long outer, long inner, int parts) { return (bfloat16 *)floats(outer * inner * parts / 2); }
};

// Keys or values of a head, the prompt's and a stretch's own behind them, and the same in tiles.
template <int PARTS, typename T>
struct Held {
    static constexpr long ONE = PARTS * WHOLE;
    long width, wide;
    T *rows;             // (keys, width)
    bfloat16 *tokens;    // outside: keys, inside: width
    bfloat16 *transposed;    // outside: width, inside: keys, block of keys by block

    static long numbers(long most, long width) { return most * (width + whole(width) * PARTS); }  // of workspace, for both kinds of tiles

    Held(Arena &arena, long most, long width, bool by_token, bool by_width) : width(width), wide(whole(width)) {
        rows = (T *)arena.floats(most * width);
        tokens = by_token ? arena.tiles(most, wide, PARTS) : nullptr;
        transposed = by_width ? arena.tiles(most, wide, PARTS) : nullptr;
    }

    // The tokens from..to behind the first `before`, and zeros to the end of a block.
    void take(const T *from, Strides step, long head, long first, long count, long before) {
        long end = whole(before + count);
        for (long t = 0; t < count; t++)
            std::memcpy(rows + (before + t) * width, from + head * step.head + (first + t) * step.token, width * sizeof(T));
        std::memset((void *)(rows + (before + count) * width), 0, (end - before - count) * width * sizeof(T));
        for (long t = before / PAIR * PAIR; t < end; t += PAIR) {
            if (tokens)
                for (long half = 0; half < PAIR; half += TILE)
                    for (long d = 0; d < wide; d += DEPTH)
                        fill_tiles<PARTS>(ROWS_OUTSIDE, rows + (t + half) * width + d, width, 1, TILE, width - d,
                                          tokens + (t + half) * wide * PARTS + d / DEPTH * ONE);
            if (transposed)
                for (long d = 0; d < wide; d += TILE)
                    fill_tiles<PARTS>(ROWS_OUTSIDE, rows + t * width + d, 1, width, width - d, DEPTH,
                                      transposed + t * wide * PARTS + d / TILE * ONE);
        }
    }

    Tiles keys(long first) const { return {tokens + first * wide * PARTS, wide / DEPTH * ONE, ONE}; }
    Tiles widths(long first) const { return {transposed + first / TILE * ONE, ONE, wide / TILE * ONE}; }
};

// 32 queries as the columns of a product, from `from` on: summed over their width, or over themselves.
template <int PARTS, typename T>
struct Columns {
    static constexpr long ONE = PARTS * WHOLE;
    long wide;
    bfloat16 *tiles;

    Columns(Arena &arena, long width) : wide(whole(width)), tiles(arena.tiles(PAIR, wide, PARTS)) {}

    Tiles by_query(const T *from, Strides step, long rows, long width) const {
        for (long half = 0; half < PAIR; half += TILE)
            for (long d = 0; d < wide; d += DEPTH)
                fill_tiles<PARTS>(ROWS_INSIDE, from + half * step.token + d, step.token, 1, rows - half, width - d,
                                  tiles + half * wide * PARTS + d / DEPTH * ONE);
        return {tiles, wide / DEPTH * ONE, ONE};
    }

    Tiles by_width(const T *from, Strides step, long rows, long width) const {
        for (long d = 0; d < wide; d += TILE)
            fill_tiles<PARTS>(ROWS_INSIDE, from + d, 1, step.token, width - d, rows, tiles + d / TILE * ONE);
        return {tiles, ONE, ONE};
    }
};

// Two neighbouring rows of 16 numbers as the row of a tile in which what is summed over stands in pairs.
template <int PARTS>
static inline void store_pairs(Vec even, Vec odd, bfloat16 *tile, long row) {
    Bits low[PARTS], high[PARTS];
    split<PARTS>(even, low), split<PARTS>(odd, high);
    for (int part = 0; part < PARTS; part++) {
        Bits pairs = low[part] | high[part] << 16;
        std::memcpy(tile + part * WHOLE + row * DEPTH, &pairs, sizeof pairs);
    }
}

// 32 numbers as the row of a tile.
template <int PARTS>
static inline void store_row(Vec first, Vec second, bfloat16 *tile, long row) {
    if constexpr (PARTS == 1) return store(tile + row * DEPTH, first), store(tile + row * DEPTH + LANES, second);
    Bits low[PARTS], high[PARTS];
    split<PARTS>(first, low), split<PARTS>(second, high);
    for (int part = 0; part < PARTS; part++) {
        Halves halves[2] = {__builtin_convertvector(low[part], Halves), __builtin_convertvector(high[part], Halves)};
        std::memcpy(tile + part * WHOLE + row * DEPTH, halves, sizeof halves);
    }
}

static inline Ints lanes() {
    Ints found;
    for (int i = 0; i < LANES; i++) found[i] = i;
    return found;
}

// Sums (width, 32 queries) -> rows of the queries, each times its factor.
template <typename T>
static inline void write_transposed(const float *sums, long rows, long width, const Vec *factor, T *to, long step) {
    for (long d = 0; d < width; d += LANES)
        for (long half = 0; half < PAIR && half < rows; half += TILE) {
            Vec block[LANES];
            for (int i = 0; i < LANES; i++) block[i] = load(sums + (d + i) * PAIR + half) * factor[half / TILE];
            exchange(block);
            for (long i = 0; i < LANES && half + i < rows; i++) store(to + (half + i) * step + d, block[i]);
        }
}

// 16 queries' scores of keys -> weights in tiles, not yet divided by their sums, which are returned; top: each query's highest score.
template <int PARTS>
static inline Vec weigh(const float *scores, long keys, float scale, bfloat16 *tiles, Vec *top) {
    Vec tops[4], total = all(0.0f);  // four, so that none waits for the last
    for (int i = 0; i < 4; i++) tops[i] = load(scores + i * PAIR);
    for (long t = 4; t < keys; t += 4)
        for (int i = 0; i < 4; i++) tops[i] = largest(tops[i], load(scores + (t + i) * PAIR));
    Vec highest = largest(largest(tops[0], tops[1]), largest(tops[2], tops[3]));
    for (long t = 0; t < keys; t += 2) {
        Vec even = exponential((load(scores + t * PAIR) - highest) * scale);
        Vec odd = exponential((load(scores + (t + 1) * PAIR) - highest) * scale);
        total += even, total += odd;
        store_pairs<PARTS>(even, odd, tiles + t / PAIR * PARTS * WHOLE, t % PAIR / 2);
    }
    *top = highest * scale;
    return total;
}

template <int PARTS, typename T>
static void forward_tiles(const T *q, const T *k, const T *v, T *out, float *lse, const Strides *step, long tokens, long group, long width,
                          float scale, const Stretch *stretches, long count, long shared) {
    typedef Held<PARTS, T> Keys;
    long most = whole(most_keys(stretches, count)), wide = whole(width), ONE = PARTS * WHOLE;
    Arena taken{workspace(2 * Keys::numbers(most, width) + PAIR * (most + wide) * (1 + PARTS))};
    Keys keys(taken, most, width, true, false), values(taken, most, width, false, true);
    Columns<PARTS, T> columns(taken, width);
    float *scores = taken.floats(most * PAIR), *found = taken.floats(wide * PAIR);
    bfloat16 *weights = taken.tiles(PAIR, most, PARTS);
    open_tiles();
    for (long s = 0; s < count; s++) {
        Stretch stretch = stretches[s];
        long length = stretch.to - stretch.from, before = stretch.prompt_to - stretch.prompt_from;
        keys.take(k, step[1], shared, stretch.from, length, before);
        values.take(v, step[2], shared, stretch.from, length, before);
        for (long head = shared * group; head < (shared + 1) * group; head++)
            for (long first = 0; first < length; first += PAIR) {
                long rows = first + PAIR < length ? PAIR : length - first, place = stretch.from + first;
                long seen = before + first, across = whole(seen + rows), blocks = across / PAIR;
                Tiles queries = columns.by_query(q + head * step[0].head + place * step[0].token, step[0], rows, width);
                for (long t = 0; t < across; t += PAIR) tile_kernel<PARTS>(keys.keys(t), queries, wide / DEPTH, scores + t * PAIR, PAIR, false);
                Vec share[2];
                for (int half = 0; half < 2; half++) {
                    float *score = scores + half * TILE;
                    for (long t = seen + 1; t < across; t++) {
                        Ints sees = lanes() + half * (int)TILE >= (int)(t - seen);
                        store(score + t * PAIR, select(sees, load(score + t * PAIR), all(-INFINITY)));
                    }
                    Vec top, total = weigh<PARTS>(score, across, scale, weights + half * blocks * ONE, &top);
                    share[half] = 1.0f / total;
                    for (long i = 0; i < TILE && half * TILE + i < rows; i++)
                        lse[head * tokens + place + half * TILE + i] = top[i] + std::log(total[i]);
                }
                for (long d = 0; d < wide; d += PAIR)
                    tile_kernel<PARTS>(values.widths(d), {weights, blocks * ONE, ONE}, blocks, found + d * PAIR, PAIR, false);
                write_transposed(found, rows, width, share, out + head * step[3].head + place * step[3].token, step[3].token);
            }
    }
    _tile_release();
}

// `backward` of attention.cpp, with the same names.
template <int PARTS, typename T>
static void backward_tiles(const T *q, const T *k, const T *v, const T *out, const float *lse, const T *grad_out, T *grad_q, T *grad_k,
                           T *grad_v, const Strides *step, long tokens, long group, long width, float scale, const Stretch *stretches,
                           long count, long shared) {
    typedef Held<PARTS, T> Keys;
    long most = whole(most_keys(stretches, count)), wide = whole(width), ONE = PARTS * WHOLE;
    Arena taken{workspace(2 * Keys::numbers(most, width) + 2 * most * wide + PAIR * (most + wide) * (1 + 2 * PARTS))};
    Keys keys(taken, most, width, true, true), values(taken, most, width, true, false);
    Columns<PARTS, T> queries_d(taken, width), grads_d(taken, width), queries_q(taken, width), grads_q(taken, width);
    float *sum_k = taken.floats(most * wide), *sum_v = taken.floats(most * wide), *found = taken.floats(wide * PAIR);
    bfloat16 *score_grads = taken.tiles(PAIR, most, PARTS);
    alignas(64) bfloat16 weight_rows[2 * PARTS * WHOLE], score_grad_rows[2 * PARTS * WHOLE];
    alignas(64) float score[PAIR * PAIR], score_grad[PAIR * PAIR];
    long prompt = count > 1 ? stretches[1].prompt_to - stretches[1].prompt_from : 0, start = stretches[0].from;
    open_tiles();
    for (long s = 0; s < count; s++) {
        Stretch stretch = stretches[s];
        long length = stretch.to - stretch.from, before = stretch.prompt_to - stretch.prompt_from, end = whole(before + length);
        keys.take(k, step[1], shared, stretch.from, length, before);
        values.take(v, step[2], shared, stretch.from, length, before);
        std::memset(sum_k + before * wide, 0, (end - before) * wide * sizeof(float));
        std::memset(sum_v + before * wide, 0, (end - before) * wide * sizeof(float));
        for (long head = shared * group; head < (shared + 1) * group; head++)
            for (long first = 0; first < length; first += PAIR) {
                long rows = first + PAIR < length ? PAIR : length - first, place = stretch.from + first;
                long seen = before + first, across = whole(seen + rows), blocks = across / PAIR;
                const T *query = q + head * step[0].head + place * step[0].token;
                const T *output = out + head * step[3].head + place * step[3].token;
                const T *grad = grad_out + head * step[4].head + place * step[4].token;
                Tiles q_d = queries_d.by_query(query, step[0], rows, width), g_d = grads_d.by_query(grad, step[4], rows, width);
                Tiles q_q = queries_q.by_width(query, step[0], rows, width), g_q = grads_q.by_width(grad, step[4], rows, width);
                Vec level[2], less[2];
                for (int half = 0; half < 2; half++) {
                    Vec along[LANES];
                    for (long i = 0; i < LANES; i++) {
                        along[i] = all(0.0f);
                        long r = half * TILE + i;
                        for (long d = 0; r < rows && d < width; d += LANES)
                            along[i] += load(grad + r * step[4].token + d) * load(output + r * step[3].token + d);
                    }
                    less[half] = sums(along);
                    level[half] = read(lse + head * tokens + place + half * TILE, rows - half * TILE);
                }
                for (long t = 0; t < across; t += PAIR) {
                    tile_kernel<PARTS>(keys.keys(t), q_d, wide / DEPTH, score, PAIR, false);
                    tile_kernel<PARTS>(values.keys(t), g_d, wide / DEPTH, score_grad, PAIR, false);
                    for (long r = 0; r < PAIR; r += 2) {
                        Vec weight[2][2], slope[2][2];  // row, half
                        for (int row = 0; row < 2; row++)
                            for (int half = 0; half < 2; half++) {
                                long at = (r + row) * PAIR + half * TILE;
                                Vec p = exponential(load(score + at) * scale - level[half]);
                                if (t + r + row > seen) p = select(lanes() + half * (int)TILE >= (int)(t + r + row - seen), p, all(0.0f));
                                weight[row][half] = p;
                                slope[row][half] = p * (load(score_grad + at) - less[half]);
                            }
                        for (int row = 0; row < 2; row++) {
                            long tile = (r + row) / TILE * ONE;
                            store_row<PARTS>(weight[row][0], weight[row][1], weight_rows + tile, (r + row) % TILE);
                            store_row<PARTS>(slope[row][0], slope[row][1], score_grad_rows + tile, (r + row) % TILE);
                        }
                        for (int half = 0; half < 2; half++)
                            store_pairs<PARTS>(slope[0][half], slope[1][half], score_grads + (half * blocks + t / PAIR) * ONE, r / 2);
                    }
                    for (long d = 0; d < wide; d += PAIR) {
                        Tiles grads = {g_q.from + d / TILE * ONE, ONE, ONE}, queries = {q_q.from + d / TILE * ONE, ONE, ONE};
                        tile_kernel<PARTS>({weight_rows, ONE, ONE}, grads, 1, sum_v + t * wide + d, wide, true);
                        tile_kernel<PARTS>({score_grad_rows, ONE, ONE}, queries, 1, sum_k + t * wide + d, wide, true);
                    }
                }
                for (long d = 0; d < wide; d += PAIR)
                    tile_kernel<PARTS>(keys.widths(d), {score_grads, blocks * ONE, ONE}, blocks, found + d * PAIR, PAIR, false);
                Vec scales[2] = {all(scale), all(scale)};
                write_transposed(found, rows, width, scales, grad_q + head * step[5].head + place * step[5].token, step[5].token);
            }
        // The first stretch begins with the prompt, whose sums stay until the last completion has added its own.
        long kept = s == 0 ? prompt : 0;
        write_rows(sum_k + (before + kept) * wide, wide, length - kept, width, scale, grad_k, step[6], shared, stretch.from + kept);
        write_rows(sum_v + (before + kept) * wide, wide, length - kept, width, 1.0f, grad_v, step[7], shared, stretch.from + kept);
    }
    write_rows(sum_k, wide, prompt, width, scale, grad_k, step[6], shared, start);
    write_rows(sum_v, wide, prompt, width, 1.0f, grad_v, step[7], shared, start);
    _tile_release();
}
#endif
