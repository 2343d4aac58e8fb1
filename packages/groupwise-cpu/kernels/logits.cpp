// What is read off logits: log-probs, entropies, gradients, and tokens drawn.  All sums are float32, but for those
// of a distribution that is drawn from, whose blocks' sums are added up in float64.

#include "rows.h"

// Logits of a row times its scale, a vector at a time; minus infinity behind the last.
template <class T>
struct Logits {
    const T *from;
    long count;
    float scale;

    Vec at(long v) const {
        if (v + LANES <= count) return load(from + v) * scale;
        float held[LANES];
        store(held, read(from + v, count - v) * scale);
        for (long lane = count - v; lane < LANES; lane++) held[lane] = -INFINITY;
        return load(held);
    }
    float one(long v) const { return sum(read(from + v, 1)) * scale; }
    float highest() const {
        Vec found = all(-INFINITY);
        for (long v = 0; v < count; v += LANES) found = largest(found, at(v));
        return peak(found);
    }
};

constexpr long AT_ONCE = 1024;

// What is multiplied by its probability must not be infinite where that is 0.
static inline Vec bounded(Vec x) { return largest(all(-1e4f), x); }

// Of rows of logits: lse = log sum exp z, logp = z[target] - lse, and where it is asked for entropy = -sum p log p; with z = x scale.
extern "C" void read_logits(int half, const void *x, const float *scale, const int64_t *target, float *lse, float *logp, float *entropy,
                            long rows, long width, int threads) {
    typed(half, half, [=](auto zero, auto) {
        each(rows, threads, [=](long t) {
            Logits<decltype(zero)> row{(const decltype(zero) *)x + t * width, width, scale[t]};
            Vec total = all(0.0f), mean = all(0.0f);
            float top = row.highest();
            for (long from = 0; from < width; from += AT_ONCE) {  // sums of sums: of a long row no digits are lost
                Vec weights = all(0.0f), means = all(0.0f);
                for (long v = from; v < width && v < from + AT_ONCE; v += LANES) {
                    Vec below = row.at(v) - top, weight = exponential(below);
                    weights += weight;
                    if (entropy) means += weight * bounded(below);
                }
                total += weights, mean += means;
            }
            float whole = sum(total), log_whole = std::log(whole);
            lse[t] = top + log_whole;
            logp[t] = row.one(target[t]) - lse[t];
            if (entropy) entropy[t] = log_whole - sum(mean) / whole;
        });
    });
}

// Of the same rows, in their place: the gradient of a loss whose gradients in logp and in entropy are given (entropy's: or null).
//   d logp / dx = scale (1 at the target - p),   d entropy / dx = -scale p (log p + entropy)
extern "C" void logits_gradient(int half, void *x, const float *scale, const int64_t *target, const float *lse, const float *entropy,
                                const float *in_logp, const float *in_entropy, long rows, long width, int threads) {
    typed(half, half, [=](auto zero, auto) {
        typedef decltype(zero) T;
        each(rows, threads, [=](long t) {
            T *to = (T *)x + t * width;
            Logits<T> row{to, width, scale[t]};
            float grad_logp = in_logp[t] * scale[t], own = in_entropy ? in_entropy[t] * scale[t] : 0.0f;
            auto found = [=](Vec logp) {
                Vec factor = all(grad_logp);
                if (in_entropy) factor += own * (bounded(logp) + entropy[t]);
                return -factor * exponential(logp);
            };
            Vec chosen = found(all(row.one(target[t]) - lse[t]));
            for (long v = 0; v < width; v += LANES) write(to + v, found(row.at(v) - lse[t]), width - v);
            write(to + target[t], chosen + grad_logp, 1);
        });
    });
}

constexpr long BLOCK = 128;  // of the vocabulary: the cumulative sum is taken over blocks, and inside one of them

// The first number at which the sum of those up to it passes `reach`; never one that is 0 itself, and the last where
// they are no numbers.  before: the sum of those before it.
template <typename Number>
static inline long first_above(const Number *numbers, long count, double reach, double *before) {
    double whole = 0.0, sum = 0.0;
    for (long i = 0; i < count; i++) whole += numbers[i];
    reach = reach < whole * (1.0 - 1e-15) ? reach : whole * (1.0 - 1e-15);  // whatever was rounded
    long i = 0;
    for (; i < count - 1 && !(sum + numbers[i] > reach); i++) sum += numbers[i];
    *before = sum;
    return i;
}

// One token of each row and its log-probability in softmax(x / temperature): the inverse of the cumulative distribution at a uniform
// number; at temperature 0 the first of the likeliest, and its log-probability at temperature 1.
extern "C" void draw_tokens(int half, const void *x, float temperature, const double *uniform, int64_t *token, float *logp, long rows,
                            long width, int threads) {
    float scale = temperature > 0.0f ? std::fmin(1.0f / temperature, 1e30f) : 1.0f;
    typed(half, half, [=](auto zero, auto) {
        each(rows, threads, [=](long t) {
            Logits<decltype(zero)> row{(const decltype(zero) *)x + t * width, width, 1.0f};
            long blocks = (width + BLOCK - 1) / BLOCK;
            float weights[BLOCK], *totals = workspace(blocks), top = row.highest();
            double whole = 0.0, below, inside;
            auto weigh = [&](long block) {
                Vec total = all(0.0f);
                for (long v = 0; v < BLOCK && block * BLOCK + v < width; v += LANES) {
                    Vec weight = exponential((row.at(block * BLOCK + v) - top) * scale);
                    store(weights + v, weight);
                    total += weight;
                }
                return sum(total);
            };
            for (long block = 0; block < blocks; block++) whole += totals[block] = weigh(block);
            if (temperature > 0.0f) {
                long block = first_above(totals, blocks, uniform[t] * whole, &below), from = block * BLOCK;
                weigh(block);
                token[t] = from + first_above(weights, width - from < BLOCK ? width - from : BLOCK, uniform[t] * whole - below, &inside);
            } else {
                long v = 0;
                while (v + LANES < width && peak(row.at(v)) != top) v += LANES;
                while (v < width - 1 && row.one(v) != top) v++;
                token[t] = v;
            }
            logp[t] = (row.one(token[t]) - top) * scale - std::log(whole);
        });
    });
}
