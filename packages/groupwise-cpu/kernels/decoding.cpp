// Attention of one new token per row while completions are decoded: to its prompt, which its group shares, and to its own tokens.
//
// query, key, value   (R, heads, D) of the new tokens; strides: how far apart two heads and two rows lie, tensor by tensor
// own, prompt         slabs (entries, K, capacity, D) of kept keys and values; row r's own tokens are entry places[r], or r without places
// parts               (prompt entry, from, to): rows[from..to] belong to that prompt, whose keys they are multiplied by in one product
//
// What is kept lies as products read it, in words: a float32 number, or two bfloat16 ones over which a product sums.  Keys: 16 tokens'
// first words, their second ones and so on, then the next 16 tokens.  Values: a word holds a number of one token, or of two neighbours.
// A slab has capacity for whole blocks of 32 tokens, in which zeros lie behind the last token's values.
//
// All sums are float32.  Where bfloat16 numbers are multiplied in pairs or on tiles, weights are rounded to it first and subnormal numbers are
// zeros.

#include "tiles.h"

constexpr long BLOCK = 32, PANEL = 16;

static inline long whole(long count, long of) { return (count + of - 1) / of * of; }


// Words as the second matrix of a product: `row` from one to what is summed with it next, `panel` from 16 columns to the next 16.
template <typename T>
struct Kept {
    static constexpr int DEEP = 4 / sizeof(T), PARTS = DEEP;
    const T *from;
    long row, panel;

    const T *word(long k, long column) const { return from + (k / DEEP * row + column / PANEL * panel + column % PANEL) * DEEP; }
    Kept behind(long columns) const { return {word(0, columns), row, panel}; }

    Vec at(long k, int part, int n) const {
        Bits words;
        std::memcpy(&words, word(k, n * LANES), sizeof words);
        return (Vec)(DEEP == 1 ? words : part ? words & 0xffff0000 : words << 16);
    }
    static Vec broadcast(const float *number) { return all(*number); }
    static Vec add(Vec total, Vec number, Vec row) { return plus(total, number, row); }
};

#if defined(__AVX512BF16__)
// The same words, multiplied by pairs of bfloat16 numbers as they are.
struct Pairs {
    static constexpr int DEEP = 2, PARTS = 1;
    Kept<bfloat16> kept;

    Pairs behind(long columns) const { return {kept.behind(columns)}; }
    Vec at(long k, int, int n) const { return load((const float *)kept.word(k, n * LANES)); }
    static Vec broadcast(const bfloat16 *pair) {
        uint32_t both;
        std::memcpy(&both, pair, sizeof both);
        return bits(both);
    }
    static Vec add(Vec total, Vec pair, Vec row) { return (Vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)pair, (__m512bh)row); }
};
#endif

// Keys and values of one entry's head.
template <typename T>
struct Head {
    T *k, *v;
    long width;

    Kept<T> keys() const { return {k, PANEL, PANEL * width / Kept<T>::DEEP}; }
    Kept<T> values() const { return {v, width, PANEL}; }

    // Token t's, behind those that are there.
    void keep(const T *key, const T *value, long t) const {
        constexpr long DEEP = Kept<T>::DEEP;
        T *key_words = k + t / PANEL * PANEL * width + t % PANEL * DEEP, *value_words = v + t / DEEP * DEEP * width;
        for (long d = 0; d < width; d += DEEP) std::memcpy(key_words + d * PANEL, key + d, DEEP * sizeof(T));
        if (t % BLOCK == 0) std::memset((void *)value_words, 0, BLOCK * width * sizeof(T));
        if constexpr (DEEP == 1) std::memcpy(value_words, value, width * sizeof(T));
        else
            for (long d = 0; d < width; d += LANES) {
                Bits pair, number = (Bits)load(value + d);
                std::memcpy(&pair, value_words + d * DEEP, sizeof pair);
                pair = t % DEEP ? (pair & 0xffff) | number : number >> 16;
                std::memcpy(value_words + d * DEEP, &pair, sizeof pair);
            }
    }
};

template <typename T>
struct Slab {
    T *keys, *values;
    long capacity;

    Head<T> at(long entry, long head, long shared, long width) const {
        long place = (entry * shared + head) * capacity * width;
        return {keys + place, values + place, width};
    }
};

// How queries are multiplied by keys, and weights by values.  Number: in which type; UNIT: of how many tokens scores are found at a time.
struct OneByOne {
    typedef float Number;
    static constexpr long UNIT = PANEL;
    static void open(long) {}
    static void close() {}

    template <typename T>
    static void multiply(long rows, long columns, long depth, const float *a, long a_row, Kept<T> b, float *c, long c_row, bool add) {
        product(rows, columns, depth, a, a_row, 1, b, c, c_row, add);
    }
};

#if defined(__AVX512BF16__)
struct InPairs : OneByOne {
    typedef bfloat16 Number;

    static void multiply(long rows, long columns, long depth, const bfloat16 *a, long a_row, Kept<bfloat16> b, float *c, long c_row,
                         bool add) {
        product(rows, columns, depth, a, a_row, 1, Pairs{b}, c, c_row, add);
    }
};
#else
typedef OneByOne InPairs;
#endif

#ifdef MATRIX_TILES
struct OnTiles {
    typedef bfloat16 Number;
    static constexpr long UNIT = BLOCK;
    static void open(long rows) { open_tiles(rows < TILE ? rows : TILE); }
    static void close() { _tile_release(); }

    // By tiles of as many rows as they were opened with; what lies behind the last row is overwritten.  Columns: whole pairs of tiles.
    static void multiply(long rows, long columns, long depth, const bfloat16 *a, long a_row, Kept<bfloat16> b, float *c, long c_row,
                         bool add) {
        __asm__ volatile("" ::: "memory");  // what is loaded below is in memory by now
        for (long m = 0; m < rows; m += TILE, a += TILE * a_row, c += TILE * c_row)
            for (long n = 0; n < columns; n += PAIR) {
                float *sums = c + n;
                if (add) {
                    _tile_loadd(0, sums, c_row * 4);
                    _tile_loadd(2, sums + TILE, c_row * 4);
                } else {
                    _tile_zero(0);
                    _tile_zero(2);
                }
                for (long k = 0; k < depth; k += DEPTH) {
                    _tile_loadd(4, a + k, a_row * 2);
                    _tile_loadd(6, b.word(k, n), b.row * 4);
                    _tile_loadd(7, b.word(k, n + TILE), b.row * 4);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(2, 4, 7);
                }
                _tile_stored(0, sums, c_row * 4);
                _tile_stored(2, sums + TILE, c_row * 4);
            }
        __asm__ volatile("" ::: "memory");
    }
};
#endif

// Scores (a whole number of vectors) -> e^(scale (score - highest)), in their place or rounded; returns the sum of what was stored.
template <typename Number>
static float weigh(const float *scores, long count, float scale, Number *weights) {
    Vec top = load(scores), total = all(0.0f);
    for (long t = LANES; t < count; t += LANES) top = largest(top, load(scores + t));
    float highest = peak(top);
    for (long t = 0; t < count; t += LANES) {
        store(weights + t, exponential((load(scores + t) - highest) * scale));
        total += load(weights + t);
    }
    return sum(total);
}

// Rows of one prompt, for one key-value head.
template <typename Way, typename T>
static void decode(const T *query, const T *key, const T *value, T *out, const Strides *step, Slab<T> own, Slab<T> prompt, long entry,
                   long prompt_length, const int64_t *rows, long count, const int64_t *length, const int64_t *places, long group,
                   long shared, long width, float scale, long window, long head) {
    typedef typename Way::Number Number;
    constexpr bool HALF = sizeof(Number) == sizeof(bfloat16);
    constexpr long UNIT = Way::UNIT;
    long longest = 0, m = prompt_length, wide_m = whole(m, BLOCK), heads = shared * group, queries = count * group;
    for (long i = 0; i < count; i++) longest = length[rows[i]] > longest ? length[rows[i]] : longest;
    long across = wide_m + whole(longest, BLOCK), high = queries + PANEL;
    float *scores = workspace(high * (2 * across + 2 * width + 1)), *found = scores + high * across, *totals = found + high * width;
    Number *asked = (Number *)(totals + high), *weights = HALF ? asked + high * width : (Number *)scores;
    for (long q = 0; q < queries; q++)
        for (long d = 0; d < width; d += LANES)
            store(asked + q * width + d, load(query + rows[q / group] * step[0].token + (head * group + q % group) * step[0].head + d));
    auto at = [&](long row) { return own.at(places ? places[row] : row, head, shared, width); };
    // What a row has kept is too short a stretch for the processor to notice in time that it is being read.
    auto ask_for = [&](long i) {
        Head<T> kept = at(rows[i]);
        long bytes = whole(length[rows[i]], PANEL) * width * sizeof(T);
        prefetch(kept.k, bytes);
        prefetch(kept.v, bytes);
    };
    ask_for(0);
    Head<T> shown = prompt.at(entry, head, shared, width);
    Way::open(queries);
    Way::multiply(queries, whole(m, UNIT), width, asked, width, shown.keys(), scores, across, false);
    Way::open(group);
    for (long i = 0; i < count; i++) {
        if (i + 1 < count) ask_for(i + 1);
        long row = rows[i], n = length[row], end = wide_m + whole(n, UNIT), hidden = window > 0 && m + n > window ? m + n - window : 0;
        Head<T> kept = at(row);
        kept.keep(key + row * step[1].token + head * step[1].head, value + row * step[2].token + head * step[2].head, n - 1);
        float *here = scores + i * group * across;
        Number *weight = weights + i * group * across;
        Way::multiply(group, end - wide_m, width, asked + i * group * width, width, kept.keys(), here + wide_m, across, false);
        for (long g = 0; g < group; g++) {
            float *score = here + g * across;
            for (long t = 0; t < (hidden < m ? hidden : m); t++) score[t] = -INFINITY;
            for (long t = m; t < wide_m + (hidden > m ? hidden - m : 0); t++) score[t] = -INFINITY;
            for (long t = wide_m + n; t < end; t++) score[t] = -INFINITY;
            totals[i * group + g] = weigh(score, end, scale, weight + g * across);
        }
        Way::multiply(group, width, n, weight + wide_m, across, kept.values(), found + i * group * width, width, false);
    }
    Way::open(queries);
    Way::multiply(queries, width, m, weights, across, shown.values(), found, width, true);
    Way::close();
    for (long q = 0; q < queries; q++)
        for (long d = 0; d < width; d += LANES)
            store(out + (rows[q / group] * heads + head * group + q % group) * width + d, load(found + q * width + d) * (1.0f / totals[q]));
}

template <typename T>
static void run(const void *query, const void *key, const void *value, void *out, const Strides *step, void *own_k, void *own_v,
                long own_capacity, void *prompt_k, void *prompt_v, long prompt_capacity, const Part *parts, long count,
                const int64_t *prompt_length, const int64_t *rows, const int64_t *length, const int64_t *places, long heads, long shared,
                long width, float scale, long window, int threads) {
    Slab<T> own{(T *)own_k, (T *)own_v, own_capacity}, prompt{(T *)prompt_k, (T *)prompt_v, prompt_capacity};
    auto way = decode<OneByOne, T>;
    if constexpr (sizeof(T) == sizeof(bfloat16)) {
        way = decode<InPairs, T>;
#ifdef MATRIX_TILES
        if (width % PAIR == 0 && has_tiles()) way = decode<OnTiles, T>;
#endif
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (long item = 0; item < shared * count; item++) {
        Part part = parts[item / shared];
        way((const T *)query, (const T *)key, (const T *)value, (T *)out, step, own, prompt, part.entry, prompt_length[part.entry],
            rows + part.from, part.to - part.from, length, places, heads / shared, shared, width, scale, window, item % shared);
    }
}

template <typename T>
static void keep(const void *key, const void *value, const long *step, void *keys, void *values, long capacity, long first, long count,
                 long length, long shared, long width, int threads) {
    Slab<T> slab{(T *)keys, (T *)values, capacity};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long item = 0; item < count * shared; item++) {
        long entry = item / shared, head = item % shared;
        Head<T> to = slab.at(first + entry, head, shared, width);
        for (long t = 0; t < length; t++)
            to.keep((const T *)key + entry * step[0] + t * step[1] + head * step[2],
                    (const T *)value + entry * step[3] + t * step[4] + head * step[5], t);
    }
}

// Whole entries from `first` on; key, value: (count, length, K, D), whose steps are said one after another.
extern "C" void keep_entries(int half, const void *key, const void *value, const long *step, void *keys, void *values, long capacity,
                             long first, long count, long length, long shared, long width, int threads) {
    (half ? keep<bfloat16> : keep<float>)(key, value, step, keys, values, capacity, first, count, length, shared, width, threads);
}

extern "C" void decode_attention(int half, const void *query, const void *key, const void *value, void *out, const Strides *step,
                                 void *own_k, void *own_v, long own_capacity, void *prompt_k, void *prompt_v, long prompt_capacity,
                                 const Part *parts, long count, const int64_t *prompt_length, const int64_t *rows,
                                 const int64_t *length, const int64_t *places, long heads, long shared, long width, float scale, long window,
                                 int threads) {
    (half ? run<bfloat16> : run<float>)(query, key, value, out, step, own_k, own_v, own_capacity, prompt_k, prompt_v, prompt_capacity, parts,
                                        count, prompt_length, rows, length, places, heads, shared, width, scale, window, threads);
}
