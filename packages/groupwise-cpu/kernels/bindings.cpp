// The kernels as operations of torch, `torch.ops.groupwise.NAME`, by its stable interface: what each takes and gives, checked before
// memory is touched.  None has a gradient: the autograd Functions that call them have.  None counts the changes of what it changes in
// place: whoever calls it owns these tensors.  Types are float32 or bfloat16 unless the text says otherwise; rows are whole vectors.
//
// T tokens of a stream   R rows   D width of the model   H query heads   K key-value heads   W head width   O outputs   I inputs
// C rows of logits   V vocabulary   E entries of a slab   P prompts

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Sizes = std::vector<int64_t>;

constexpr long WHOLE = 16;   // numbers of the longest vector that any processor has
constexpr long BLOCK = 32;   // tokens by which a slab grows, as decoding.py's BLOCK

static void require(bool taken, const std::string &what) {
    if (!taken) throw std::invalid_argument("the kernel takes " + what);
}

// 1 for bfloat16, 0 for float32.
static int half(const Tensor &x) {
    bool wide = x.scalar_type() == ScalarType::Float;
    require(x.is_cpu() && (wide || x.scalar_type() == ScalarType::BFloat16), "float32 or bfloat16 on a CPU");
    return !wide;
}

template <typename... Others>
static int one_type(const Tensor &first, const Others &...others) {
    require(((half(others) == half(first)) && ...), "tensors of one type");
    return half(first);
}

static void *typed(const Tensor &x, ScalarType type, const char *name) {
    require(x.is_cpu() && x.scalar_type() == type, std::string("numbers of type ") + name + " on a CPU");
    return x.data_ptr();
}

static float *floats(const Tensor &x) { return (float *)typed(x, ScalarType::Float, "float32"); }
static double *doubles(const Tensor &x) { return (double *)typed(x, ScalarType::Double, "float64"); }
static int64_t *integers(const Tensor &x) { return (int64_t *)typed(x, ScalarType::Long, "int64"); }
static float *floats(const Maybe &x) { return x ? floats(*x) : nullptr; }
static void *numbers(const Maybe &x) { return x ? x->data_ptr() : nullptr; }

static int threads() { return torch::stable::get_num_threads(); }

static Tensor room(const Tensor &like, const Sizes &sizes, std::optional<ScalarType> type = {}) {
    return torch::stable::new_empty(like, sizes, type);
}

static Tensor room_like(const Tensor &like, std::optional<ScalarType> type = {}) {
    auto sizes = like.sizes();
    return room(like, Sizes(sizes.begin(), sizes.end()), type);
}

static bool same_shape(const Tensor &a, const Tensor &b) {
    auto x = a.sizes(), y = b.sizes();
    return std::equal(x.begin(), x.end(), y.begin(), y.end());
}

static int64_t last(const Tensor &x) { return x.size(x.dim() - 1); }

// ---------------------------------------------------------------- attention of packed streams

static Strides steps(const Tensor &x) { return {x.stride(1), x.stride(2)}; }

template <typename... Tensors>
static void require_heads(const Tensors &...heads) {
    one_type(heads...);
    bool whole = ((heads.dim() == 4 && heads.size(0) == 1 && heads.size(3) % WHOLE == 0 && heads.stride(3) == 1) && ...);
    const Tensor *first[] = {&heads...};
    for (const Tensor *one : first) whole = whole && one->size(3) == first[0]->size(3) && one->size(2) == first[0]->size(2);
    require(whole, "heads (1, H, T, W) of one width, which is whole vectors");
}

// (1, heads, T, W), tokens first in memory; zeros of filler.
static Tensor heads_like(const Tensor &x, int64_t end) {
    int64_t count = x.size(1), tokens = x.size(2), width = x.size(3);
    Tensor made = room(x, {1, tokens, count, width});
    size_t bytes = count * width * (half(x) ? 2 : 4);
    std::memset((char *)made.data_ptr() + end * bytes, 0, (tokens - end) * bytes);
    return torch::stable::transpose(made, 1, 2);
}

// Outputs, tokens first in memory, and log-sum-exps (1, H, T).  first, stretch, end: `kernels.stretches`.
static std::tuple<Tensor, Tensor> attention(const Tensor &query, const Tensor &key, const Tensor &value, const Tensor &first,
                                            const Tensor &stretch, int64_t end, double scale) {
    require_heads(query, key, value);
    int64_t heads = query.size(1), tokens = query.size(2);
    Tensor out = heads_like(query, end), lse = room(query, {1, heads, tokens}, ScalarType::Float);
    for (int64_t h = 0; h < heads; h++) std::fill(floats(lse) + h * tokens + end, floats(lse) + (h + 1) * tokens, 0.0f);
    Strides strides[] = {steps(query), steps(key), steps(value), steps(out)};
    attention_forward(half(query), query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), floats(lse), strides, tokens,
                      heads, key.size(1), query.size(3), scale, integers(first), (Stretch *)integers(stretch), first.size(0) - 1,
                      threads());
    return {out, lse};
}

static std::tuple<Tensor, Tensor, Tensor> attention_backward_(const Tensor &grad, const Tensor &query, const Tensor &key,
                                                              const Tensor &value, const Tensor &out, const Tensor &lse,
                                                              const Tensor &first, const Tensor &stretch, int64_t end, double scale) {
    require_heads(query, key, value, out, grad);
    Tensor grad_query = heads_like(query, end), grad_key = heads_like(key, end), grad_value = heads_like(value, end);
    Strides strides[] = {steps(query), steps(key),        steps(value),    steps(out),
                         steps(grad),  steps(grad_query), steps(grad_key), steps(grad_value)};
    attention_backward(half(query), query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), floats(lse), grad.data_ptr(),
                       grad_query.data_ptr(), grad_key.data_ptr(), grad_value.data_ptr(), strides, query.size(2), query.size(1),
                       key.size(1), query.size(3), scale, integers(first), (Stretch *)integers(stretch), first.size(0) - 1, threads());
    return {grad_query, grad_key, grad_value};
}

// ---------------------------------------------------------------- norms, rotations, activations

template <typename... Tensors>
static int64_t require_rows(const Tensor &weight, const Tensors &...rows) {
    bool whole = weight.is_contiguous() && weight.dim() == 1 && weight.size(0) % WHOLE == 0;
    require(whole && ((rows.is_contiguous() && last(rows) == weight.size(0)) && ...),
            "contiguous rows as long as the float32 weights, of whole vectors");
    return weight.size(0);
}

static void norm_into(const Tensor &x, const Maybe &add, const Tensor &weight, const Tensor &out, float *scale, double eps) {
    int64_t width = require_rows(weight, x, out);
    require(!add || (add->is_contiguous() && same_shape(*add, x)), "rows to add like those that they are added to");
    ::add_rms_norm(half(x), add ? half(*add) : 0, half(out), x.data_ptr(), numbers(add), x.data_ptr(), floats(weight), out.data_ptr(),
                   scale, x.numel() / width, width, eps, threads());
}

// x += add in place; of the sum weight * x / sqrt(mean(x^2) + eps).
static Tensor add_rms_norm_(const Tensor &x, const Maybe &add, const Tensor &weight, double eps, ScalarType type) {
    Tensor out = room_like(x, type);
    norm_into(x, add, weight, out, nullptr, eps);
    return out;
}

// The same with a layer norm; `add` is of the type of the result, all else float32.
static Tensor add_layer_norm_(const Tensor &x, const Maybe &add, const Tensor &weight, double eps, const Tensor &bias, ScalarType type) {
    int64_t width = require_rows(weight, x, bias);
    Tensor out = room_like(x, type);
    require(!add || (add->is_contiguous() && same_shape(*add, x) && half(*add) == half(out)), "rows to add like those of the result");
    ::add_layer_norm(half(out), floats(x), numbers(add), floats(weight), floats(bias), out.data_ptr(), x.numel() / width, width, eps,
                     threads());
    return out;
}

// The norm in `type`, and the factors 1 / sqrt(...) of its rows.
static std::tuple<Tensor, Tensor> rms_norm(const Tensor &x, const Tensor &weight, double eps, ScalarType type) {
    Tensor out = room_like(x, type), scale = room(x, {x.numel() / last(x)}, ScalarType::Float);
    norm_into(x, {}, weight, out, floats(scale), eps);
    return {out, scale};
}

// Gradients of x and of the weight.
static std::tuple<Tensor, Tensor> rms_norm_backward_(const Tensor &grad, const Tensor &x, const Tensor &weight, const Tensor &scale) {
    int64_t width = require_rows(weight, x, grad);
    require(same_shape(x, grad) && scale.numel() == x.numel() / width, "gradients like what they are of");
    Tensor grad_x = room_like(x), grad_weight = torch::stable::new_zeros(weight, Sizes{width});
    ::rms_norm_backward(half(x), half(grad), x.data_ptr(), grad.data_ptr(), floats(weight), floats(scale), grad_x.data_ptr(),
                        floats(grad_weight), x.numel() / width, width);
    return {grad_x, grad_weight};
}

// Norms of heads (T, H, W) in place, each with weights of its own (H, W).
static void head_norm_(const Tensor &x, const Tensor &weight, double eps) {
    int64_t heads = x.size(1), width = x.size(2);
    bool near = x.stride(1) == width && x.stride(2) == 1 && weight.is_contiguous() && weight.size(0) == heads && last(weight) == width;
    require(near && width % WHOLE == 0, "heads (T, H, W) side by side and weights of each");
    ::head_norm(half(x), x.data_ptr(), x.stride(0), floats(weight), x.size(0), heads, width, eps, threads());
}

// Pairs (i, i + W / 2) of heads (T, H, W) rotated by their position's angles; sign -1: rotated back.  Tables (T, W) are float32.
static Tensor rotary(const Tensor &x, const Tensor &cosine, const Tensor &sine, double sign) {
    int64_t tokens = x.size(0), heads = x.size(1), width = x.size(2);
    bool tables = cosine.is_contiguous() && sine.is_contiguous() && cosine.numel() == tokens * width && same_shape(cosine, sine);
    require(tables && x.stride(2) == 1 && width / 2 % WHOLE == 0, "heads (T, H, W), W / 2 whole vectors, and tables (T, W)");
    Tensor out = room(x, {tokens, heads, width});
    rotate(half(x), x.data_ptr(), x.stride(0), x.stride(1), floats(cosine), floats(sine), out.data_ptr(), tokens, heads, width, sign,
           threads());
    return out;
}

// silu(gate) * up, of rows equally far apart in both.
static Tensor gated_(const Tensor &gate, const Tensor &up) {
    int64_t rows = gate.size(0), width = gate.size(1);
    bool alike = same_shape(gate, up) && gate.stride(0) == up.stride(0) && gate.stride(1) == 1 && up.stride(1) == 1;
    require(alike && width % WHOLE == 0, "two matrices alike in all but numbers, of whole vectors");
    Tensor out = room(gate, {rows, width});
    ::gated(one_type(gate, up), gate.data_ptr(), up.data_ptr(), out.data_ptr(), rows, width, gate.stride(0), width, threads());
    return out;
}

template <typename... Tensors>
static void require_alike(const Tensor &first, const Tensors &...others) {
    one_type(first, others...);
    require(first.is_contiguous() && last(first) % WHOLE == 0 && ((others.is_contiguous() && same_shape(first, others)) && ...),
            "contiguous tensors of one shape, rows of whole vectors");
}

// Of `gated`: its result again and the gradient of `up`; `grad` becomes the gradient of `gate`.
static std::tuple<Tensor, Tensor> gated_backward_(const Tensor &grad, const Tensor &gate, const Tensor &up) {
    require_alike(grad, gate, up);
    Tensor inner = room_like(gate), grad_up = room_like(gate);
    ::gated_backward(half(gate), gate.data_ptr(), up.data_ptr(), grad.data_ptr(), inner.data_ptr(), grad_up.data_ptr(), gate.numel(),
                     threads());
    return {inner, grad_up};
}

// GELU's tanh form.
static Tensor gelu_(const Tensor &x) {
    require_alike(x);
    Tensor out = room_like(x);
    ::gelu(half(x), x.data_ptr(), out.data_ptr(), x.numel(), threads());
    return out;
}

// Of `gelu`: its result again; `grad` becomes the gradient of `x`.
static Tensor gelu_backward_(const Tensor &grad, const Tensor &x) {
    require_alike(grad, x);
    Tensor out = room_like(x);
    ::gelu_backward(half(x), x.data_ptr(), grad.data_ptr(), out.data_ptr(), x.numel(), threads());
    return out;
}

// ---------------------------------------------------------------- logits

template <typename... Tensors>
static void require_logits(const Tensor &raw, const Tensors &...each) {
    bool rows = raw.dim() == 2 && raw.is_contiguous();
    require(rows && ((each.dim() == 1 && each.size(0) == raw.size(0) && each.is_contiguous()) && ...),
            "contiguous logits (C, V) and a number of each row");
}

// Of rows of logits z = raw * scale, in nats: log sum exp z, log-probs of the targets (each below V: nothing looks), and entropies where
// there is room for them.  All is float32 but for the logits and the targets.
static void read_logits_(const Tensor &raw, const Tensor &scale, const Tensor &target, const Tensor &lse, const Tensor &logp,
                         const Maybe &entropy) {
    require_logits(raw, scale, target, lse, logp, entropy.value_or(lse));
    ::read_logits(half(raw), raw.data_ptr(), floats(scale), integers(target), floats(lse), floats(logp), floats(entropy), raw.size(0),
                  raw.size(1), threads());
}

// `raw` becomes the gradient with respect to itself of a loss with these gradients in what `read_logits` gave:
// d logp / d raw = scale (onehot - p), d entropy / d raw = -scale p (log p + entropy).
static void logits_gradient_(const Tensor &raw, const Tensor &scale, const Tensor &target, const Tensor &lse, const Tensor &entropy,
                             const Tensor &in_logp, const Maybe &in_entropy) {
    require_logits(raw, scale, target, lse, entropy, in_logp, in_entropy.value_or(lse));
    ::logits_gradient(half(raw), raw.data_ptr(), floats(scale), integers(target), floats(lse), floats(entropy), floats(in_logp),
                      floats(in_entropy), raw.size(0), raw.size(1), threads());
}

// A token of each row (int64) and its log-probability (nats, float32) at this temperature: the first at which the cumulative probability
// passes `uniform` (float64, in [0, 1)), never one of probability 0.  At temperature 0 the likeliest, the first of several, and its
// log-probability at temperature 1.
static std::tuple<Tensor, Tensor> draw_tokens_(const Tensor &logits, const Tensor &uniform, double temperature) {
    require_logits(logits, uniform);
    int64_t rows = logits.size(0);
    Tensor token = room(uniform, {rows}, ScalarType::Long), logp = room(uniform, {rows}, ScalarType::Float);
    ::draw_tokens(half(logits), logits.data_ptr(), temperature, doubles(uniform), integers(token), floats(logp), rows, logits.size(1),
                  threads());
    return {token, logp};
}

// ---------------------------------------------------------------- products

static bool near(const Tensor &x) { return x.stride(0) == 1 || x.stride(1) == 1; }

// out = a b + bias, or out += a b; `out` and `bias` are float32.  Two float32 matrices are multiplied as such: on matrix tiles each number
// is the sum of three in bfloat16, nothing of it lost; above 3.39e38, where bfloat16 ends, the result is not a number, and below 1e-30 it
// has fewer digits.  Subnormal bfloat16 numbers are zeros to tiles and to AVX-512's products of them.
static void gemm_(const Tensor &a, const Tensor &b, const Tensor &out, const Maybe &bias, bool add) {
    int64_t rows = a.size(0), depth = a.size(1), columns = b.size(1);
    require(b.size(0) == depth && out.size(0) == rows && out.size(1) == columns && out.stride(1) == 1 && near(a) && near(b),
            "matrices that fit together, whose rows or columns are whole");
    ::gemm(one_type(a, b), a.data_ptr(), a.stride(0), a.stride(1), b.data_ptr(), b.stride(0), b.stride(1), floats(out), out.stride(0),
           rows, columns, depth, floats(bias), add, threads());
}

static int64_t packed_size(int64_t outputs, int64_t inputs, int half) {
    return (outputs + WHOLE - 1) / WHOLE * WHOLE * (half ? (inputs + 31) / 32 * 32 : inputs);
}

// A weight (O, I) as `linear` reads it.
static Tensor pack_weight_(const Tensor &weight, ScalarType type) {
    require(near(weight), "rows or columns whose numbers lie one behind the other");
    int64_t outputs = weight.size(0), inputs = weight.size(1);
    Tensor packed = room(weight, {packed_size(outputs, inputs, type == ScalarType::BFloat16)}, type);
    ::pack_weight(half(packed), half(weight), weight.data_ptr(), weight.stride(0), weight.stride(1), packed.data_ptr(), outputs, inputs,
                  threads());
    return packed;
}

// x W^T + bias of rows (R, I), with a packed weight of their type; the bias is float32.
static Tensor linear_(const Tensor &x, const Tensor &packed, const Maybe &bias, int64_t outputs) {
    int64_t rows = x.size(0), inputs = x.size(1);
    require(packed.numel() == packed_size(outputs, inputs, one_type(x, packed)) && x.is_contiguous(),
            "contiguous rows and a packed weight for them");
    Tensor out = room(x, {rows, outputs});
    ::linear(half(x), x.data_ptr(), packed.data_ptr(), floats(bias), out.data_ptr(), rows, outputs, inputs, threads());
    return out;
}

// ---------------------------------------------------------------- decoding: slabs are (E, K, blocks, BLOCK x W)

// Entries of a slab from `first` on get tokens 0 .. M - 1 of keys and values (N, M, K, W).
static void keep_entries_(const Tensor &key, const Tensor &value, const Tensor &keys, const Tensor &values, int64_t first) {
    int64_t count = key.size(0), length = key.size(1), shared = key.size(2), width = key.size(3);
    bool room = first + count <= keys.size(0) && keys.size(1) == shared && keys.size(2) * BLOCK >= length && keys.size(3) == BLOCK * width;
    one_type(key, value, keys, values);
    require(room && same_shape(key, value) && same_shape(keys, values) && keys.is_contiguous() && values.is_contiguous(),
            "slabs with room for these");
    long strides[] = {key.stride(0), key.stride(1), key.stride(2), value.stride(0), value.stride(1), value.stride(2)};
    ::keep_entries(half(key), key.data_ptr(), value.data_ptr(), strides, keys.data_ptr(), values.data_ptr(), keys.size(2) * BLOCK, first,
                   count, length, shared, width, threads());
}

// One new token of each row, whose key and value are written into `own`: (R, H, W) and twice (R, K, W) -> (R, H, W).  Before its first
// token an entry may hold anything.  part, prompt_length, order: `decoding.Rows`; length: own tokens, the new one included.  window: 0 for
// none.  In bfloat16 weights are rounded too, and subnormal numbers may count as zeros.
static Tensor decode_attention_(const Tensor &query, const Tensor &key, const Tensor &value, const Tensor &own_key,
                                const Tensor &own_value, const Tensor &prompt_key, const Tensor &prompt_value, const Tensor &part,
                                const Tensor &prompt_length, const Tensor &order, const Tensor &length, double scale, int64_t window) {
    int64_t rows = query.size(0), heads = query.size(1), width = query.size(2);
    one_type(query, key, value, own_key, own_value, prompt_key, prompt_value);
    require(width % WHOLE == 0 && last(own_key) == BLOCK * width && last(prompt_key) == BLOCK * width, "heads of whole vectors and their slabs");
    Tensor out = room(query, {rows, heads, width});
    Strides strides[] = {{query.stride(1), query.stride(0)}, {key.stride(1), key.stride(0)}, {value.stride(1), value.stride(0)}};
    ::decode_attention(half(query), query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), strides, own_key.data_ptr(),
                       own_value.data_ptr(), own_key.size(2) * BLOCK, prompt_key.data_ptr(), prompt_value.data_ptr(),
                       prompt_key.size(2) * BLOCK, (Part *)integers(part), part.size(0), integers(prompt_length), integers(order),
                       integers(length), nullptr, heads, key.size(1), width, scale, window, threads());
    return out;
}

// An absent tensor of a list has no numbers.
static float *optional_floats(const Tensor &x) { return x.numel() ? floats(x) : nullptr; }

static Weight weight_of(const Tensor &packed, const Tensor &bias, int64_t outputs, int64_t inputs, int type) {
    require(half(packed) == type && packed.numel() == packed_size(outputs, inputs, type), "packed weights that fit together");
    require(bias.numel() == 0 || bias.numel() == outputs, "a bias for each output");
    return {packed.data_ptr(), optional_floats(bias), (long)outputs};
}

static Norm norm_of(const Tensor &weight, const Tensor &bias, double eps) {
    return {optional_floats(weight), optional_floats(bias), (float)eps};
}

// Up to `steps` tokens for each of R rows by a model like Llama or GPT-2, block after block and token after token.
//
// weights: of each block the norm's weight and bias, the head norms', the second norm's weight and bias, and packed weight and bias of
// qkv, out, up (gate beside up, or up alone, which GELU follows) and down.  numbers (blocks, 5, float64): eps of the three norms, scale of
// the scores, window (0: none).  ends: weight and bias of the last norm, packed weight and bias of the head; float32 tables of all tokens,
// of positions' cosines and sines, or of learnt positions.  slabs: of each block own keys and values, and prompts'.
// rows: newest token, own tokens that are kept (both change), most own tokens, prompt entry, tokens of each prompt (P,), uniform numbers
// for all own tokens (R, T; float64), ids that end a completion; int64 but for the uniform numbers.
// -> tokens (R, steps), their log-probs (nats), and how many of them each row has drawn.
static std::tuple<Tensor, Tensor, Tensor> decode_tokens_(const Tensors &weights, const Tensor &numbers, const Tensors &ends,
                                                         double eps, const Tensors &slabs, const Tensors &rows, int64_t heads,
                                                         int64_t shared, int64_t inner, bool gates, int64_t vocabulary, int64_t steps,
                                                         double temperature, bool until_one_ends, int64_t at_once) {
    constexpr size_t EACH = 13, SLABS = 4;
    size_t count = numbers.size(0);
    require(weights.size() == count * EACH && slabs.size() == count * SLABS && ends.size() == 8 && rows.size() == 7, "a whole model");
    int type = half(weights[5]);
    int64_t hidden = ends[4].size(1), width = last(slabs[0]) / BLOCK, entries = rows[0].size(0);
    std::vector<Block> blocks;
    for (size_t i = 0; i < count; i++) {
        const Tensor *w = &weights[i * EACH], *s = &slabs[i * SLABS];
        const double *n = doubles(numbers) + i * 5;
        for (size_t j = 0; j < SLABS; j++) require(half(s[j]) == type && last(s[j]) == BLOCK * width, "slabs of one type and width");
        require(w[0].numel() == hidden && w[3].numel() == hidden, "norms as wide as the model");
        blocks.push_back({norm_of(w[0], w[1], n[0]), {optional_floats(w[2]), nullptr, (float)n[1]}, norm_of(w[3], w[4], n[2]),
                          weight_of(w[5], w[6], (heads + 2 * shared) * width, hidden, type), weight_of(w[7], w[8], hidden, heads * width, type),
                          weight_of(w[9], w[10], gates ? 2 * inner : inner, hidden, type), weight_of(w[11], w[12], hidden, inner, type),
                          s[0].data_ptr(), s[1].data_ptr(), s[2].data_ptr(), s[3].data_ptr(), (long)n[4], (float)n[3]});
    }
    Ends last_ones{floats(ends[4]), optional_floats(ends[5]), optional_floats(ends[6]), optional_floats(ends[7]),
                   norm_of(ends[0], ends[1], eps), weight_of(ends[2], ends[3], vocabulary, hidden, type), (long)count};
    Model model{slabs[0].size(2) * BLOCK, slabs[2].size(2) * BLOCK, hidden, inner, heads, shared, width};
    Tensor token = room(rows[0], {entries, steps}), logp = room(rows[0], {entries, steps}, ScalarType::Float);
    Tensor drawn = torch::stable::new_zeros(rows[0], Sizes{entries});
    for (const Tensor &one : rows) require(one.is_contiguous(), "contiguous rows");
    Tokens tokens{integers(rows[0]), integers(rows[1]), integers(rows[2]), integers(rows[3]), integers(rows[4]), doubles(rows[5]),
                  (long)rows[5].size(1), integers(rows[6]), (long)rows[6].size(0), (float)temperature, until_one_ends, entries, steps,
                  at_once, integers(token), floats(logp), integers(drawn)};
    ::decode_tokens(type, blocks.data(), &last_ones, &model, &tokens, threads());
    return {token, logp, drawn};
}

// ---------------------------------------------------------------- which processor this is

static bool has_tiles_() { return has_tiles(); }
static bool has_gemm_() { return has_gemm(); }

STABLE_TORCH_LIBRARY(groupwise, m) {
    m.def("has_tiles() -> bool");
    m.def("has_gemm() -> bool");
    m.def("attention(Tensor query, Tensor key, Tensor value, Tensor first, Tensor stretch, int end, float scale) -> (Tensor, Tensor)");
    m.def("attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor first, Tensor stretch, "
          "int end, float scale) -> (Tensor, Tensor, Tensor)");
    m.def("add_rms_norm(Tensor(a!) x, Tensor? add, Tensor weight, float eps, ScalarType dtype) -> Tensor");
    m.def("add_layer_norm(Tensor(a!) x, Tensor? add, Tensor weight, float eps, Tensor bias, ScalarType dtype) -> Tensor");
    m.def("rms_norm(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)");
    m.def("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)");
    m.def("head_norm(Tensor(a!) x, Tensor weight, float eps) -> ()");
    m.def("rotary(Tensor x, Tensor cosine, Tensor sine, float sign=1.0) -> Tensor");
    m.def("gated(Tensor gate, Tensor up) -> Tensor");
    m.def("gated_backward(Tensor(a!) grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
    m.def("gelu(Tensor x) -> Tensor");
    m.def("gelu_backward(Tensor(a!) grad, Tensor x) -> Tensor");
    m.def("read_logits(Tensor raw, Tensor scale, Tensor target, Tensor(a!) lse, Tensor(b!) logp, Tensor(c!)? entropy) -> ()");
    m.def("logits_gradient(Tensor(a!) raw, Tensor scale, Tensor target, Tensor lse, Tensor entropy, Tensor in_logp, "
          "Tensor? in_entropy) -> ()");
    m.def("draw_tokens(Tensor logits, Tensor uniform, float temperature) -> (Tensor, Tensor)");
    m.def("gemm(Tensor a, Tensor b, Tensor(a!) out, Tensor? bias=None, bool add=False) -> ()");
    m.def("pack_weight(Tensor weight, ScalarType dtype) -> Tensor");
    m.def("linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
    m.def("keep_entries(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, int first) -> ()");
    m.def("decode_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) own_key, Tensor(b!) own_value, Tensor prompt_key, "
          "Tensor prompt_value, Tensor part, Tensor prompt_length, Tensor order, Tensor length, float scale, int window=0) -> Tensor");
    m.def("decode_tokens(Tensor[] weights, Tensor numbers, Tensor[] ends, float eps, Tensor(a!)[] slabs, Tensor(b!)[] rows, int heads, "
          "int shared, int inner, bool gates, int vocabulary, int steps, float temperature, bool until_one_ends, int at_once) "
          "-> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(groupwise, CPU, m) {
    m.impl("attention", TORCH_BOX(&attention));
    m.impl("attention_backward", TORCH_BOX(&attention_backward_));
    m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm_));
    m.impl("add_layer_norm", TORCH_BOX(&add_layer_norm_));
    m.impl("rms_norm", TORCH_BOX(&rms_norm));
    m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward_));
    m.impl("head_norm", TORCH_BOX(&head_norm_));
    m.impl("rotary", TORCH_BOX(&rotary));
    m.impl("gated", TORCH_BOX(&gated_));
    m.impl("gated_backward", TORCH_BOX(&gated_backward_));
    m.impl("gelu", TORCH_BOX(&gelu_));
    m.impl("gelu_backward", TORCH_BOX(&gelu_backward_));
    m.impl("read_logits", TORCH_BOX(&read_logits_));
    m.impl("logits_gradient", TORCH_BOX(&logits_gradient_));
    m.impl("draw_tokens", TORCH_BOX(&draw_tokens_));
    m.impl("gemm", TORCH_BOX(&gemm_));
    m.impl("pack_weight", TORCH_BOX(&pack_weight_));
    m.impl("linear", TORCH_BOX(&linear_));
    m.impl("keep_entries", TORCH_BOX(&keep_entries_));
    m.impl("decode_attention", TORCH_BOX(&decode_attention_));
    m.impl("decode_tokens", TORCH_BOX(&decode_tokens_));
}

STABLE_TORCH_LIBRARY_IMPL(groupwise, CompositeExplicitAutograd, m) {
    m.impl("has_tiles", TORCH_BOX(&has_tiles_));
    m.impl("has_gemm", TORCH_BOX(&has_gemm_));
}
