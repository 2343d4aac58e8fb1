"""Attention of one new token for each row, over its prompt and its own tokens, in two kernels.

The first splits the keys: each of its programs attends to some tokens of a prompt with all rows
behind it, or of a row's own, with the query heads that share a key (as Flash-Decoding does).  The
second merges the parts by their log-sum-exps, which is exact.  A prompt's keys are read once for
several rows.  The new key and value are appended by the first kernel, which takes them from
registers: no program waits for another.

R rows   P prompts   N most rows of a prompt   K key-value heads   Q query heads of each   H = K Q
D head width   E width of values   S splits   X queries of a program, or all N Q of a prompt
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.ops.operations import DecodedRows
from groupwise.ops.query import Query
from groupwise.ops.triton.launch import power_of_two, quotient

KEY_NUMBERS = 4096
"""Numbers of the keys of a program's step: with more, wide heads do not fit into registers."""
LEAST_KEYS, MOST_KEYS = 16, 64
"""Keys of a step."""
LEAST_QUERIES, MOST_QUERIES = 16, 32
"""Queries of a program: a matrix instruction has at least 16."""
PROGRAMS = 512
"""Programs that keep a GPU busy: keys are split until there are as many."""
LEAST_SPLIT, MOST_SPLIT = 128, 2048
"""Tokens of a split."""
NOTHING = tl.constexpr(-1e30)
"""Stands for the -inf of a part without keys, whose exponentials would be NaN."""


@triton.jit
def _attend(
    query_XD,
    key,
    value,
    key_token,
    value_token,
    begin,
    end,
    first_X,
    scale,
    cap,
    top_X,
    total_X,
    out_XE,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Attend to tokens `begin` .. of one entry, up to `SPLIT` and before `end`, behind others.

    first_X: the first token that each query sees.   top_X, total_X, out_XE: the largest score so
    far, and sums of exponentials relative to it, of numbers and of values.
    """
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    for step in range(0, SPLIT, KEYS):
        token = begin + step + tl.arange(0, KEYS)
        there = token < end
        key_place = key + token[:, None] * key_token + d[None, :]
        key_JD = tl.load(key_place, mask=there[:, None] & (d < D)[None, :], other=0.0)
        value_place = value + token[:, None] * value_token + e[None, :]
        value_JE = tl.load(value_place, mask=there[:, None] & (e < E)[None, :], other=0.0)
        z_XJ = tl.dot(query_XD, tl.trans(key_JD), input_precision="ieee") * scale
        if CAPPED:
            z_XJ = cap * (2.0 * tl.sigmoid(2.0 * z_XJ / cap) - 1.0)
        seen = there[None, :] & (token[None, :] >= first_X[:, None])
        z_XJ = tl.where(seen, z_XJ, NOTHING)
        highest_X = tl.maximum(top_X, tl.max(z_XJ, 1))
        p_XJ = tl.where(seen, tl.exp(z_XJ - highest_X[:, None]), 0.0)
        shrink_X = tl.exp(top_X - highest_X)
        total_X = total_X * shrink_X + tl.sum(p_XJ, 1)
        added_XE = tl.dot(p_XJ.to(value_JE.dtype), value_JE, input_precision="ieee")
        out_XE = out_XE * shrink_X[:, None] + added_XE
        top_X = highest_X
    return top_X, total_X, out_XE


@triton.jit
def _keep(
    part, lse, place_X, inside_X, top_X, total_X, out_XE, E: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Write a part and its log-sum-exps at some queries' places."""
    e = tl.arange(0, BLOCK_E)
    any_X = total_X > 0.0
    safe_X = tl.where(any_X, total_X, 1.0)
    inside = inside_X[:, None] & (e < E)[None, :]
    tl.store(part + place_X[:, None] * E + e[None, :], out_XE / safe_X[:, None], mask=inside)
    tl.store(lse + place_X, tl.where(any_X, top_X + tl.log(safe_X), NOTHING), mask=inside_X)


@triton.jit(do_not_specialize=["rows", "members", "own_programs", "own_splits", "prompt_splits"])
def parts_kernel(
    query,
    new_key,
    new_value,
    own_key,
    own_value,
    prompt_key,
    prompt_value,
    length_R,
    end_P,
    member_PN,
    first_R,
    position_R,
    own_part,
    own_lse,
    prompt_part,
    prompt_lse,
    query_row,
    query_head,
    new_key_row,
    new_key_head,
    new_value_row,
    new_value_head,
    own_key_entry,
    own_key_head,
    own_value_entry,
    own_value_head,
    prompt_key_entry,
    prompt_key_head,
    prompt_value_entry,
    prompt_value_head,
    rows,
    members,
    own_programs,
    own_splits,
    prompt_splits,
    scale,
    cap,
    K: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OWN_QUERIES: tl.constexpr,
    PROMPT_QUERIES: tl.constexpr,
    OWN_SPLIT: tl.constexpr,
    PROMPT_SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    REACH: tl.constexpr,
):
    """Attend to one split of a row's own tokens, or of a prompt's with some of its queries.

    Tokens of an entry and head lie in a row, `D` (`E`) numbers each.   REACH: queries see tokens
    from `first_R` on only.   Programs 0 .. own_programs - 1 are of own tokens.
    """
    program = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    if program < own_programs:
        split = program % own_splits
        row = (program // own_splits).to(tl.int64)
        kept = tl.load(length_R + row) - 1
        begin = split * OWN_SPLIT
        if (split == 0) | (begin < kept):
            x = tl.arange(0, OWN_QUERIES)
            inside_X = x < Q
            query_place = query + row * query_row + (head * Q + x)[:, None] * query_head
            inside = inside_X[:, None] & (d < D)[None, :]
            query_XD = tl.load(query_place + d[None, :], mask=inside, other=0.0)
            key = own_key + row * own_key_entry + head * own_key_head
            value = own_value + row * own_value_entry + head * own_value_head
            top_X = tl.full([OWN_QUERIES], NOTHING, tl.float32)
            total_X = tl.zeros([OWN_QUERIES], tl.float32)
            out_XE = tl.zeros([OWN_QUERIES, BLOCK_E], tl.float32)
            if split == 0:
                key_place = new_key + row * new_key_row + head * new_key_head + d
                key_D = tl.load(key_place, mask=d < D, other=0.0)
                value_place = new_value + row * new_value_row + head * new_value_head + e
                value_E = tl.load(value_place, mask=e < E, other=0.0)
                tl.store(key + kept * D + d, key_D, mask=d < D)
                tl.store(value + kept * E + e, value_E, mask=e < E)
                wide_XD = query_XD.to(tl.float32)
                top_X = tl.sum(wide_XD * key_D.to(tl.float32)[None, :], 1) * scale
                if CAPPED:
                    top_X = cap * (2.0 * tl.sigmoid(2.0 * top_X / cap) - 1.0)
                total_X = total_X + 1.0
                out_XE = out_XE + value_E.to(tl.float32)[None, :]
            first_X = tl.zeros([OWN_QUERIES], tl.int64)
            if REACH:
                before = tl.load(position_R + row) - kept
                first_X = first_X + tl.load(first_R + row) - before
            top_X, total_X, out_XE = _attend(
                query_XD, key, value, D, E, begin, kept, first_X, scale, cap,
                top_X, total_X, out_XE, D, E, BLOCK_D, BLOCK_E, OWN_SPLIT, KEYS, CAPPED,
            )  # fmt: skip
            place_X = (split * rows + row) * K * Q + head * Q + x
            _keep(own_part, own_lse, place_X, inside_X, top_X, total_X, out_XE, E, BLOCK_E)
    else:
        queries = members * Q
        blocks = tl.cdiv(queries, PROMPT_QUERIES)
        place = program - own_programs
        split = place % prompt_splits
        block = (place // prompt_splits) % blocks
        entry = (place // prompt_splits // blocks).to(tl.int64)
        end = tl.load(end_P + entry)
        begin = split * PROMPT_SPLIT
        if begin < end:
            x = block * PROMPT_QUERIES + tl.arange(0, PROMPT_QUERIES)
            inside_X = x < queries
            row_X = tl.load(member_PN + entry * members + x // Q, mask=inside_X, other=0)
            query_head_X = head * Q + x % Q
            query_place = query + row_X[:, None] * query_row + query_head_X[:, None] * query_head
            inside = inside_X[:, None] & (d < D)[None, :]
            query_XD = tl.load(query_place + d[None, :], mask=inside, other=0.0)
            key = prompt_key + entry * prompt_key_entry + head * prompt_key_head
            value = prompt_value + entry * prompt_value_entry + head * prompt_value_head
            top_X = tl.full([PROMPT_QUERIES], NOTHING, tl.float32)
            total_X = tl.zeros([PROMPT_QUERIES], tl.float32)
            out_XE = tl.zeros([PROMPT_QUERIES, BLOCK_E], tl.float32)
            first_X = tl.zeros([PROMPT_QUERIES], tl.int64)
            if REACH:
                first_X = first_X + tl.load(first_R + row_X, mask=inside_X, other=0)
            top_X, total_X, out_XE = _attend(
                query_XD, key, value, D, E, begin, end, first_X, scale, cap,
                top_X, total_X, out_XE, D, E, BLOCK_D, BLOCK_E, PROMPT_SPLIT, KEYS, CAPPED,
            )  # fmt: skip
            prompts = (tl.num_programs(0) - own_programs) // prompt_splits // blocks
            place_X = ((split * prompts + entry) * K + head) * queries + x
            _keep(prompt_part, prompt_lse, place_X, inside_X, top_X, total_X, out_XE, E, BLOCK_E)


@triton.jit(do_not_specialize=["rows", "prompts", "members", "own_splits", "prompt_splits"])
def merge_kernel(
    own_part,
    own_lse,
    prompt_part,
    prompt_lse,
    length_R,
    end_P,
    entry_R,
    place_R,
    sinks_H,
    out,
    rows,
    prompts,
    members,
    own_splits,
    prompt_splits,
    K: tl.constexpr,
    Q: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OWN_SPLITS: tl.constexpr,
    PROMPT_SPLITS: tl.constexpr,
    OWN_SPLIT: tl.constexpr,
    PROMPT_SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the parts of one query head of one row: each weighs in with its sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    query_head = tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    kept = tl.load(length_R + row) - 1
    entry = tl.load(entry_R + row)
    end = tl.load(end_P + entry)
    s = tl.arange(0, OWN_SPLITS)
    own_there = (s < own_splits) & ((s == 0) | (s * OWN_SPLIT < kept))
    own_place = (s * rows + row) * K * Q + query_head
    own_S = tl.load(own_lse + own_place, mask=own_there, other=NOTHING)
    m = tl.arange(0, PROMPT_SPLITS)
    prompt_there = (m < prompt_splits) & (m * PROMPT_SPLIT < end)
    x = tl.load(place_R + row) * Q + query_head % Q
    head_place = (m * prompts + entry) * K + query_head // Q
    prompt_place = head_place * members * Q + x
    prompt_S = tl.load(prompt_lse + prompt_place, mask=prompt_there, other=NOTHING)
    top = tl.maximum(tl.max(own_S, 0), tl.max(prompt_S, 0))
    if SINKS:
        sink = tl.load(sinks_H + query_head).to(tl.float32)
        top = tl.maximum(top, sink)
    own_weight_S = tl.exp(own_S - top)
    prompt_weight_S = tl.exp(prompt_S - top)
    total = tl.sum(own_weight_S, 0) + tl.sum(prompt_weight_S, 0)
    if SINKS:
        total += tl.exp(sink - top)
    own_mask = own_there[:, None] & (e < E)[None, :]
    own_SE = tl.load(own_part + own_place[:, None] * E + e[None, :], mask=own_mask, other=0.0)
    prompt_mask = prompt_there[:, None] & (e < E)[None, :]
    prompt_at = prompt_part + prompt_place[:, None] * E + e[None, :]
    prompt_SE = tl.load(prompt_at, mask=prompt_mask, other=0.0)
    own_E = tl.sum(own_SE * own_weight_S[:, None], 0)
    prompt_E = tl.sum(prompt_SE * prompt_weight_S[:, None], 0)
    result_E = ((own_E + prompt_E) / total).to(out.dtype.element_ty)
    tl.store(out + (row * K * Q + query_head) * E + e, result_E, mask=e < E)


def split_of(tokens: int, sequences: int) -> int:
    """Return the tokens of a split, a power of two: enough splits to keep a GPU busy.

    sequences: programs that there are without splits.

    >>> split_of(2048, 128), split_of(2048, 8), split_of(100, 4000)
    (512, 128, 128)
    """
    splits = max(1, quotient(PROGRAMS, sequences))
    split = power_of_two(quotient(tokens, splits))
    return max(LEAST_SPLIT, min(MOST_SPLIT, split))


def keys_of_a_step(width: int) -> int:
    """Return the keys that a program reads at once, of heads of `width` numbers.

    >>> [keys_of_a_step(width) for width in (16, 64, 128, 256)]
    [64, 64, 32, 16]
    """
    return max(LEAST_KEYS, min(MOST_KEYS, KEY_NUMBERS // width))


def decode_attention(
    query: Query, own: tuple[Tensor, Tensor], prompt: tuple[Tensor, Tensor], rows: DecodedRows
) -> Tensor:
    """Attend with one new token for each row -> (R, H, E).  Its key and value are appended to
    `own`.

    own, prompt: keys and values (entries, K, tokens, D), tokens in a row.
    """
    query_RHD, key_RKD, value_RKE = query.query_THD, query.key_TKD, query.value_TKE
    (count, heads, width), (_, shared, value_width) = query_RHD.shape, value_RKE.shape
    prompts, members = rows.member_PN.shape
    queries = heads // shared
    own_split = split_of(rows.most_own, count * shared)
    prompt_split = split_of(rows.most_prompt, prompts * shared)
    own_splits = quotient(rows.most_own, own_split)
    prompt_splits = quotient(rows.most_prompt, prompt_split)
    parts = {"dtype": torch.float32, "device": query_RHD.device}
    own_shape = (own_splits, count, heads)
    own_part, own_lse = (
        torch.empty(*own_shape, value_width, **parts),
        torch.empty(own_shape, **parts),
    )
    prompt_shape = (prompt_splits, prompts, shared, members * queries)
    prompt_part = torch.empty(*prompt_shape, value_width, **parts)
    prompt_lse = torch.empty(prompt_shape, **parts)
    own_queries = max(LEAST_QUERIES, power_of_two(queries))
    most_queries = max(LEAST_QUERIES, power_of_two(members * queries))
    prompt_queries = min(MOST_QUERIES, most_queries)
    own_programs = count * own_splits
    prompt_programs = prompts * quotient(members * queries, prompt_queries) * prompt_splits
    strides: list[int] = []
    for tensor in (query_RHD, key_RKD, value_RKE, *own, *prompt):
        strides += tensor.stride()[:2]
    block_d = max(LEAST_QUERIES, power_of_two(width))
    block_e = max(LEAST_QUERIES, power_of_two(value_width))
    parts_kernel[(own_programs + prompt_programs, shared)](
        query_RHD,
        key_RKD,
        value_RKE,
        *own,
        *prompt,
        rows.length_R,
        rows.end_P,
        rows.member_PN,
        rows.first_R,
        rows.position_R,
        own_part,
        own_lse,
        prompt_part,
        prompt_lse,
        *strides,
        count,
        members,
        own_programs,
        own_splits,
        prompt_splits,
        query.scale,
        query.cap or 1.0,
        K=shared,
        Q=queries,
        D=width,
        E=value_width,
        BLOCK_D=block_d,
        BLOCK_E=block_e,
        OWN_QUERIES=own_queries,
        PROMPT_QUERIES=prompt_queries,
        OWN_SPLIT=own_split,
        PROMPT_SPLIT=prompt_split,
        KEYS=keys_of_a_step(max(block_d, block_e)),
        CAPPED=query.cap is not None,
        REACH=rows.first_R is not None,
    )
    out_RHE = query_RHD.new_empty(count, heads, value_width)
    merge_kernel[(count, heads)](
        own_part,
        own_lse,
        prompt_part,
        prompt_lse,
        rows.length_R,
        rows.end_P,
        rows.entry_R,
        rows.place_R,
        query.sinks_H,
        out_RHE,
        count,
        prompts,
        members,
        own_splits,
        prompt_splits,
        K=shared,
        Q=queries,
        E=value_width,
        BLOCK_E=block_e,
        OWN_SPLITS=power_of_two(own_splits),
        PROMPT_SPLITS=power_of_two(prompt_splits),
        OWN_SPLIT=own_split,
        PROMPT_SPLIT=prompt_split,
        SINKS=query.sinks_H is not None,
    )
    return out_RHE
