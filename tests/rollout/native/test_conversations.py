"""Episodes in the native engine: what is sampled behind an answer is what a forward pass over the same ids gives."""

from __future__ import annotations

import gc
import itertools
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import joint

from groupwise.environments.conversation import Reply
from groupwise.errors import EngineError
from groupwise.models.attention import plain_attention
from groupwise.ops import operations as ops
from groupwise.ops.query import Query, Reach
from groupwise.records import Episode, Finish, Prompt, Sampling
from groupwise.rollout import episodes
from groupwise.rollout.native import scheduler
from groupwise.rollout.native.decode_attention import Extend, Prefill
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.native.kv_cache import KVCache

DEEPSEEK = {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
DEEPSEEK |= {"v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
DEEPSEEK |= {"n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
FAMILIES = {
    "gpt2": {},
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 7},
    "gpt_oss": {"dtype": torch.float32, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v3": {"dtype": torch.float32} | DEEPSEEK,
}
EOS = (1, 2, 3)


def drawn(policy, environment, prompts, *, rows=3, group_size=3, seed=5, **sampling):
    engine = NativeEngine(policy, max_rows=rows, environment=environment)
    sampling = Sampling(**{"max_new_tokens": 40, **sampling})
    groups = list(engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed))
    assert sorted(group[0].prompt.id for group in groups) == sorted(prompt.id for prompt in prompts)
    assert all([rollout.index for rollout in group] == list(range(group_size)) for group in groups)
    return {(rollout.prompt.id, rollout.index): rollout for group in groups for rollout in group}


def context_spans(rollout):
    """What each token was drawn behind: (begin, end, the ids before token `begin`)."""
    branches = rollout.episode.branches
    begins = [0, *(branch.begin for branch in branches), len(rollout)]
    contexts = [rollout.prompt.tokens, *(branch.context for branch in branches)]
    return [(a, b, context) for a, b, context in zip(begins[:-1], begins[1:], contexts, strict=True) if b > a]


def fresh(policy, rollout):
    """Log-probs of all tokens, each stretch by an ordinary forward pass over its context and its tokens."""
    found = []
    for begin, end, context in context_spans(rollout):
        tokens = rollout.tokens[begin:end]
        own = None if rollout.support is None else rollout.support[begin:end]
        with plain_attention(policy.model), torch.no_grad():
            ids = torch.from_numpy(np.concatenate([context, tokens]))
            z = policy.model(input_ids=ids[None], use_cache=False).logits[0, context.size - 1 : -1, : policy.vocabulary]
        z = z.to(torch.promote_types(z.dtype, torch.float32)) / rollout.sampling.temperature
        for row, token in enumerate(tokens.tolist()):
            among = z[row] if own is None or not own[row].size else z[row][torch.from_numpy(own[row])]
            found.append(float(z[row, token] - among.logsumexp(0)))
    return np.array(found)


def check(policy, environment, rollouts, tolerance):
    """Sampled = scored, and everything that an environment is told is what was recorded."""
    for name, rollout in rollouts.items():
        talk = environment.begun[name]
        assert len(talk.closed) == 1
        assert rollout.finish is talk.closed[0]
        assert rollout.finish in (Finish.TURNS, Finish.LENGTH)
        written = np.zeros(len(rollout), bool)
        for turn, (tokens, finish, logp, version) in zip(talk.turns, talk.heard, strict=True):
            assert rollout.tokens[turn.begin : turn.end].tolist() == tokens
            assert rollout.behavior_logp[turn.begin : turn.end].tolist() == pytest.approx(logp)
            assert (rollout.version[turn.begin : turn.end] == version).all()
            assert (finish is Finish.EOS) == (tokens[-1] in EOS)
            written[turn.begin : turn.end] = True
        assert (rollout.trained == written).all()
        assert (rollout.behavior_logp[~written] == 0.0).all()
        if rollout.finish is Finish.TURNS:
            assert rollout.tokens.tolist() == talk.stream
            expected = [(branch.begin, branch.context.tolist()) for branch in talk.branches]
            assert [(branch.begin, branch.context.tolist()) for branch in rollout.episode.branches] == expected
        else:
            assert rollout.tokens.tolist() == talk.stream[: len(rollout)]
        difference = np.abs(fresh(policy, rollout) - rollout.behavior_logp)[written]
        assert difference.max(initial=0.0) < tolerance, name


@pytest.mark.slow
@pytest.mark.parametrize(  # what is cut chooses no code of a family's: each meets none and one, and each kind of cut two families
    ("family", "cut_to"),
    [
        (family, cut_to)
        for family, kind in zip(FAMILIES, itertools.cycle(["same", "longer", "other"]), strict=False)
        for cut_to in ("none", kind)
    ],
)
def test_what_was_sampled_is_what_a_forward_pass_gives(family, cut_to, policy_of, prompts_of, scripted_environment):
    policy = policy_of(family, context=128, eos_ids=EOS, sharpness=2.0, **FAMILIES[family])
    environment = scripted_environment(cut=0.0 if cut_to == "none" else 0.5, cut_to=cut_to, delays=0)
    rollouts = drawn(policy, environment, prompts_of(5, 9, 2, 16))
    check(policy, environment, rollouts, 2e-4)  # transformers normalises in float32 whatever the weights are
    assert any((~rollout.trained).any() or cut_to != "none" for rollout in rollouts.values())
    assert max(len(rollout.episode.turns) for rollout in rollouts.values()) > 2


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("cut_to", ["none", "other"])
def test_to_ten_digits_in_float64(family, cut_to, tiny_policy, scripted_environment):
    policy = tiny_policy(family, dtype=torch.float64, scale=3.0, context=128)
    rng = np.random.default_rng(2)
    prompts = [Prompt(id=str(n), tokens=rng.integers(4, policy.vocabulary, size=n), text="") for n in (3, 8, 12)]
    environment = scripted_environment(cut=0.0 if cut_to == "none" else 0.5, cut_to=cut_to, delays=1, vocabulary=policy.vocabulary)
    rollouts = drawn(policy, environment, prompts, temperature=0.8)
    for name, rollout in rollouts.items():
        difference = np.abs(fresh(policy, rollout) - rollout.behavior_logp)[rollout.trained]
        assert difference.max(initial=0.0) < 1e-10, name
    assert any((~rollout.trained).any() for rollout in rollouts.values())


@pytest.mark.slow
@pytest.mark.parametrize(  # what is cut chooses no code: each way meets one, and every two settings of the ways meet both
    ("family", "kernel", "dtype", "cut_to"),
    [
        (*way, "none" if number.bit_count() % 2 else "other")
        for number, way in enumerate(
            itertools.product(["gpt2", "llama", "mistral", "qwen3"], ["kernels", "torch"], [torch.float32, torch.bfloat16])
        )
    ],
)
def test_the_short_ways_through_a_model(family, kernel, dtype, cut_to, policy_of, prompts_of, scripted_environment, monkeypatch):
    """Heads as wide as a vector, so that the compiled kernels take them, and what takes their place."""
    if kernel == "torch":
        monkeypatch.setattr(ops, "_chosen", ops.Operations())
    options = {"n_embd": 64} if family == "gpt2" else {"hidden_size": 64, "head_dim": 16}
    options |= {"sliding_window": 6} if family == "mistral" else {}
    policy = policy_of(family, dtype=dtype, context=256, eos_ids=EOS, sharpness=1.0, **options)
    assert NativeEngine(policy, max_rows=1).path == "specialised"
    environment = scripted_environment(turns=6, longest=40, cut=0.0 if cut_to == "none" else 0.3, cut_to=cut_to, delays=3)
    rollouts = drawn(policy, environment, prompts_of(5, 9, 2, 40), rows=4, max_new_tokens=150)
    check(policy, environment, rollouts, 2e-4 if dtype is torch.float32 else 0.3)
    assert max(len(rollout) for rollout in rollouts.values()) > 64


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_several_tokens_before_anybody_looks_as_on_a_gpu(family, policy_of, prompts_of, scripted_environment, monkeypatch):
    """Rows draw behind their ends."""
    monkeypatch.setattr(ops, "_chosen", ops.Operations())
    monkeypatch.setitem(scheduler.TOKENS_PER_SYNC, "cpu", scheduler.TOKENS_PER_SYNC["cuda"])
    options = {"sliding_window": 6} if family == "mistral" else {}
    policy = policy_of(family, dtype=torch.float32, context=128, eos_ids=EOS, sharpness=2.0, **options)
    environment = scripted_environment(cut=0.3, cut_to="other", delays=3)
    check(policy, environment, drawn(policy, environment, prompts_of(5, 9, 2, 16), rows=5), 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(  # with every setting most turns follow no cut; without any at all, once
    ("sampling", "cut"),
    [({}, 0.0), ({}, 0.4), ({"stop": ("A", "7B")}, 0.4), ({"top_k": 5}, 0.4), ({"temperature": 0.0}, 0.4)],
    ids=str,
)
def test_no_interleaving_changes_a_transcript(cut, sampling, policy_of, prompts_of, scripted_environment):
    policy, prompts = policy_of("llama", context=128, eos_ids=EOS, sharpness=1.0), prompts_of(5, 9, 5)
    expected = None
    for rows, delays in ((1, None), (2, 0), (5, 2), (64, 3), (64, None)):
        environment = scripted_environment(cut=cut, cut_to="other", delays=delays)
        found = drawn(policy, environment, prompts, rows=rows, **sampling)
        told = {
            name: (rollout.tokens.tolist(), rollout.finish, rollout.trained.tolist(), environment.begun[name].closed)
            for name, rollout in found.items()
        }
        assert expected is None or told == expected, (rows, delays)
        expected = told
        if sampling.get("temperature", 1.0) != 0.0:
            for rollout in found.values():
                np.testing.assert_allclose(
                    fresh(policy, rollout)[rollout.trained], rollout.behavior_logp[rollout.trained], atol=2e-5
                )
    finishes = {turn[1] for talk in environment.begun.values() for turn in talk.heard}
    assert finishes >= ({Finish.STOP} if "stop" in sampling else set()) | {Finish.LENGTH}


@pytest.mark.parametrize("cut", [0.0, 0.4])
def test_how_many_turns_are_drawn_at_a_time_changes_none(cut, policy_of, prompts_of, scripted_environment, monkeypatch):
    """Where a model is compiled as a whole, a thread draws a few turns at a time."""
    shape = {"hidden_size": 64, "head_dim": 32}
    policy = policy_of("llama", dtype=torch.float32, context=128, eos_ids=EOS, sharpness=1.0, **shape)
    assert NativeEngine(policy, max_rows=1).prepared(8).decoder is not None or ops.absence() is not None
    told = []
    for turns, delays in ((1, None), (2, 0), (3, 1), (16, 2)):
        monkeypatch.setattr(scheduler, "TURNS", turns)
        environment = scripted_environment(cut=cut, cut_to="other", delays=delays)
        found = drawn(policy, environment, prompts_of(5, 9, 5), rows=9)
        check(policy, environment, found, 2e-4)
        told.append({name: (rollout.tokens.tolist(), rollout.finish, rollout.trained.tolist()) for name, rollout in found.items()})
        assert told[-1] == told[0], (turns, delays)


def test_rows_are_given_away_while_a_world_answers(policy_of, prompts_of, scripted_environment):
    """One reply never comes: with a single row all other completions end, and the group that waits is not told of."""
    policy, prompts = policy_of("llama", context=128, eos_ids=EOS, sharpness=1.0), prompts_of(5, 9, 5)
    environment = scripted_environment(never=[("p1", 1)], delays=0)
    engine = NativeEngine(policy, max_rows=1, environment=environment)
    groups = engine.generate(prompts, group_size=3, sampling=Sampling(max_new_tokens=30), seed=5)
    assert {next(groups)[0].prompt.id, next(groups)[0].prompt.id} == {"p0", "p2"}
    groups.close()
    assert len(environment.begun) == 9
    assert all(len(talk.closed) == 1 for talk in environment.begun.values())
    assert environment.begun["p1", 1].closed == [Finish.ERROR]


class Clocked:
    """An environment whose answers come after so much decoding, measured in tokens, and a clock of what was decoded.

    length: of a turn, by its number.   seconds: that an answer takes.
    """

    def __init__(self, turns, length, seconds):
        self.turns, self.length, self.seconds = turns, length, seconds
        self.now = self.idle = self.longest = 0
        self.coming = []

    def begin(self, stream, *, seed):
        return Timed(self, stream)

    def later(self, reply, due):
        said = Future()
        self.coming.append((due, said, reply))
        self.tell()
        return said

    def tell(self):
        for one in [one for one in self.coming if one[0] <= self.now]:
            self.coming.remove(one)
            one[1].set_result(one[2])

    def decoded(self, tokens):
        self.now += tokens
        self.tell()

    def wait(self, waiting):
        if any(row.reply.done() for row in waiting):
            return
        due = min(one[0] for one in self.coming)
        self.idle += due - self.now
        self.now = due
        self.tell()


class Timed:
    """One of its episodes: turns of given lengths."""

    def __init__(self, environment, stream):
        self.environment, self.stream = environment, stream

    def reply(self):
        self.began, turns = self.environment.now, len(self.stream.turns)
        return Reply(np.full(3 if turns else 0, 5), limit=self.environment.length(self.stream.index, turns))

    def open(self):
        return self.environment.later(self.reply(), 0)

    def answer(self):
        assert self.stream.turns[-1].finish is Finish.LENGTH
        self.environment.longest = max(self.environment.longest, self.environment.now - self.began)
        if len(self.stream.turns) == self.environment.turns:
            return self.environment.later(Reply(np.zeros(0, np.int64), finish=Finish.TURNS), 0)
        return self.environment.later(self.reply(), self.environment.now + self.environment.seconds)

    def close(self, finish):
        return Episode(turns=tuple(self.stream.turns))


def clocked(environment, policy_of, monkeypatch):
    """An engine of 32 rows, four of them decoded at a time, whose tokens move the environment's clock."""
    if ops.absence() is not None:
        pytest.skip("a step of many rows takes as long as one of few")
    monkeypatch.setattr(scheduler, "TURNS", 4)
    commit = scheduler.Scheduler._commit

    def committed(run, first, read, **options):
        environment.decoded(sum(map(len, read.tokens)))
        return commit(run, first, read, **options)

    monkeypatch.setattr(scheduler.Scheduler, "_commit", committed)
    monkeypatch.setattr(episodes, "await_one", environment.wait)
    policy = replace(policy_of("llama", dtype=torch.float32, context=512, hidden_size=64, head_dim=32), eos_ids=())
    return NativeEngine(policy, max_rows=32, environment=environment)


def test_no_conversation_waits_while_others_begin(policy_of, prompts_of, monkeypatch):
    """512 episodes, answered at once: none waits longer for its turn than all that are open at a time take for theirs."""
    environment = Clocked(4, lambda index, turn: 12, 0)
    engine = clocked(environment, policy_of, monkeypatch)
    for group in engine.generate(prompts_of(*(5,) * 16), group_size=32, sampling=Sampling(max_new_tokens=400), seed=1):
        assert all(rollout.finish is Finish.TURNS for rollout in group)
    assert environment.now == 512 * 4 * 12
    assert environment.longest <= episodes.CONVERSATIONS_PER_ROW * 32 * 12, environment.longest


@pytest.mark.parametrize("lengths", ["equal", "unequal"])
@pytest.mark.parametrize("share", [0.3, 0.6, 4.0])
def test_some_are_decoded_while_others_wait(lengths, share, policy_of, prompts_of, monkeypatch):
    """32 episodes with 8 answers: the rollout takes little longer than the larger of decoding and waiting, with turns of one length
    too, which would otherwise all end and all wait at the same time.   share: of waiting in decoding."""
    rng = np.random.default_rng(0)
    drawn_lengths = rng.integers(4, 21, size=(32, 9))
    length = (lambda index, turn: 12) if lengths == "equal" else (lambda index, turn: int(drawn_lengths[index, turn]))
    decoding_alone = sum(length(index, turn) for index in range(32) for turn in range(9))
    environment = Clocked(9, length, int(share * decoding_alone / 8))
    engine = clocked(environment, policy_of, monkeypatch)
    (group,) = engine.generate(prompts_of(5), group_size=32, sampling=Sampling(max_new_tokens=400), seed=1)
    assert all(rollout.finish is Finish.TURNS for rollout in group)
    assert environment.now == decoding_alone + environment.idle
    bound = max(decoding_alone, 8 * environment.seconds)
    assert environment.now <= 1.1 * bound, (environment.now, environment.idle, bound)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "forgotten", "failing"])
def test_every_conversation_is_closed_once(how, policy_of, prompts_of, scripted_environment):
    policy, prompts = policy_of("llama", context=128, eos_ids=EOS, sharpness=1.0), prompts_of(5, 9, 5)
    environment = scripted_environment(delays=0)
    if how == "failing":
        answers = iter(range(9))
        later = environment.later

        def fails(who, reply):
            said = Future()
            if who.turns and next(answers, 9) == 8:
                said.set_exception(ZeroDivisionError("the environment's own"))
                return said
            return later(who, reply)

        environment.later = fails
    groups = NativeEngine(policy, max_rows=4, environment=environment).generate(
        prompts, group_size=3, sampling=Sampling(max_new_tokens=30), seed=5
    )
    if how == "failing":
        with pytest.raises(ZeroDivisionError, match="the environment's own"):
            list(groups)
    else:
        next(groups)
        assert any(not talk.closed for talk in environment.begun.values())
        if how == "closed":
            groups.close()
        del groups
        gc.collect()
    assert all(len(talk.closed) == 1 for talk in environment.begun.values())


def test_a_limit_of_a_turn_ends_the_turn_and_not_the_episode(policy_of, prompts_of, scripted_environment):
    policy, environment = policy_of("llama", context=128, sharpness=0.1), scripted_environment(turns=5)
    rollouts = drawn(policy, environment, prompts_of(5, 9), max_new_tokens=100)
    cut = [turn for rollout in rollouts.values() for turn in rollout.episode.turns[:-1] if turn.finish is Finish.LENGTH]
    assert cut
    assert all(turn.end - turn.begin <= 5 for turn in cut)
    assert {rollout.finish for rollout in rollouts.values()} == {Finish.TURNS, Finish.LENGTH}


@pytest.mark.parametrize(("reply", "says"), [
    (Reply(tokens=np.array([4, 40])), "vocabulary of 40 tokens"),
    (Reply(tokens=np.array([-1])), "encoded with another tokenizer"),
    (Reply(tokens=np.array([4]), context=np.array([4])), "belongs into the context"),
    (Reply(tokens=np.zeros(0, np.int64), context=np.zeros(0, np.int64)), "belongs into the context"),
    (Reply(tokens=np.zeros(0, np.int64), limit=0), "at least 1"),
])  # fmt: skip
def test_a_reply_that_nothing_can_be_drawn_behind(reply, says, policy_of, prompts_of, scripted_environment):
    policy, environment = policy_of("llama"), scripted_environment()
    said: Future[Reply] = Future()
    said.set_result(reply)
    environment.later = lambda who, _: said
    with pytest.raises(EngineError, match=says):
        drawn(policy, environment, prompts_of(5))
    assert all(talk.closed == [Finish.ERROR] for talk in environment.begun.values())


def test_no_room_for_a_reply_ends_the_episode_as_it_is(policy_of, prompts_of, scripted_environment):
    """Also where the reply would leave no room for a token of the policy's, and where a context is as long as may be."""
    policy, environment = policy_of("llama", context=32, sharpness=0.1, eos_ids=EOS), scripted_environment(turns=50, longest=12)
    rollouts = drawn(policy, environment, prompts_of(5, 20), max_new_tokens=30)
    for rollout in rollouts.values():
        assert rollout.finish is Finish.LENGTH
        assert rollout.trained[-1]
        assert len(rollout) <= 32 - rollout.prompt.tokens.size
    environment = scripted_environment(turns=50, longest=12, cut=1.0, cut_to="longer")
    assert all(r.finish is Finish.LENGTH for r in drawn(policy, environment, prompts_of(5, 20), max_new_tokens=30).values())


def test_an_episode_may_be_over_before_it_begins(policy_of, prompts_of, scripted_environment):
    policy, environment = policy_of("llama"), scripted_environment()
    over: Future[Reply] = Future()
    over.set_result(Reply(tokens=np.zeros(0, np.int64), finish=Finish.DONE))
    environment.later = lambda *_: over
    for rollout in drawn(policy, environment, prompts_of(5)).values():
        assert len(rollout) == 0
        assert rollout.finish is Finish.DONE


def test_completions_go_on_by_newer_weights_and_say_so(policy_of, prompts_of, scripted_environment):
    policy, environment = policy_of("llama", context=128, sharpness=1.0, eos_ids=EOS), scripted_environment(delays=0, turns=6)
    engine = NativeEngine(policy, max_rows=4, environment=environment)  # of several groups: those that end together come together
    groups = engine.generate(prompts_of(5, 9, 5, 7, 3, 8), group_size=3, sampling=Sampling(max_new_tokens=40), seed=5)
    found = list(next(groups))
    engine.send_weights(7)
    found += [rollout for group in groups for rollout in group]
    assert {0, 7} == set(np.concatenate([rollout.version for rollout in found]).tolist())
    for rollout in found:
        assert (np.diff(rollout.version) >= 0).all()
        for turn, heard in zip(rollout.episode.turns, environment.begun[rollout.prompt.id, rollout.index].heard, strict=True):
            assert rollout.version[turn.end - 1] == heard[3]


ATTENTION = {
    "softcap": st.sampled_from([None, 2.0]),
    "window": st.sampled_from([None, 1, 3, 8, 100]),
    "chunk": st.sampled_from([None, 4]),
    "sinks": st.booleans(),
    "value": st.sampled_from([8, 5]),
}


@given(
    rows=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 7), st.integers(1, 9)), min_size=1, max_size=4),
    lengths=st.tuples(st.integers(1, 11), st.integers(1, 11)),
    **ATTENTION,
)
@settings(max_examples=60)
def test_several_tokens_at_once_see_what_they_would_one_by_one(rows, lengths, softcap, window, chunk, sinks, value):
    """Against a joint softmax, in float64, for every kind of attention."""
    rows = sorted(rows, key=lambda row: -row[2])
    torch.manual_seed(0)
    prompts, own = KVCache(2, 11, most_tokens=11), KVCache(1, 1, most_tokens=16)

    def stream(count):
        return [torch.randn(count, n, width, dtype=torch.float64) for n, width in ((4, 8), (2, 8), (2, value))]

    reach, sinks_H = Reach(window, None if window else chunk), torch.randn(4, dtype=torch.float64) if sinks else None

    def asked(heads):
        return Query(0, *heads, 0.3, softcap, reach, sinks_H)

    prompt = stream(sum(lengths))
    Prefill(prompts, lengths)(asked(prompt))
    prompts.live = 2
    ends = [[x[: lengths[0]] for x in prompt], [x[lengths[0] :] for x in prompt]]
    kept = [stream(row[1]) for row in rows]
    slab = own.layer(0, prompt[1], None, prompt[2])
    own.reserve(1 + len(rows), 16)
    for place, (_, key, values) in enumerate(kept, 1):
        slab.extend(place, 0, key, values)
    new = stream(sum(row[2] for row in rows))
    extend = Extend(prompts, own, 1, lengths, *([row[i] for row in rows] for i in range(3)))
    found, start = extend(asked(new)), 0
    for (entry, _, count), (_, key, values) in zip(rows, kept, strict=True):
        fresh = [x[start : start + count] for x in new]
        pairs = zip(ends[entry][1:], (key, values), fresh[1:], strict=True)
        whole = [torch.cat(parts).repeat_interleave(2, 1).transpose(0, 1) for parts in pairs]
        expected = joint(fresh[0].transpose(0, 1), *whole, asked(new))
        torch.testing.assert_close(found[start : start + count], expected, rtol=0, atol=1e-12)
        start += count
