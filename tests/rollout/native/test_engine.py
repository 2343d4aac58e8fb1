"""The native engine against transformers' generate, against an independent scorer, and against itself."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from groupwise.config.settings import ModelSettings
from groupwise.errors import Diverged, EngineError
from groupwise.records import Finish, Sampling
from groupwise.rollout.native import decode, scheduler
from groupwise.rollout.native import engine as native
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.native.scheduler import Scheduler
from groupwise.rollout.transformers import TransformersEngine

FAMILIES = ["gpt2", "llama", "qwen2", "qwen3", "gemma2", "mixtral"]
DTYPE = dict.fromkeys(FAMILIES, torch.float64) | {"mixtral": torch.float32}  # transformers' experts know no float64
ATOL = dict.fromkeys(FAMILIES, 1e-9) | {"gemma2": 2e-6, "mixtral": 1e-4}  # transformers' Gemma norms in float32 always


def run(policy, prompts, sampling, *, group_size=3, seed=5, max_rows=64, engine=NativeEngine, **options):
    """Groups by prompt id."""
    made = engine(policy, max_rows=max_rows, **options)
    return {group[0].prompt.id: group for group in made.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)}


def same(left, right, atol=1e-9):
    assert left.keys() == right.keys()
    for name in left:
        for a, b in zip(left[name], right[name], strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.finish is b.finish
            np.testing.assert_allclose(a.behavior_logp, b.behavior_logp, rtol=0, atol=atol)


@pytest.mark.parametrize("family", FAMILIES)
def test_p07_greedy_tokens_and_logps_equal_generate(family, policy_of, prompts_of):
    policy = policy_of(family, dtype=torch.float32)
    prompts = prompts_of(5, 9, 1, 5, 13)
    sampling = Sampling(temperature=0.0, max_new_tokens=24)
    free = run(policy, prompts, sampling, group_size=2)
    same(free, run(policy, prompts, sampling, group_size=2, engine=TransformersEngine), atol=1e-5)
    # Greedy completions of random weights seldom end: what stands in the middle of two of them is made an EOS id.
    ending = replace(policy, eos_ids=tuple(sorted({1, int(free["p0"][0].tokens[6]), int(free["p1"][0].tokens[9])})))
    found = run(ending, prompts, sampling, group_size=2)
    same(found, run(ending, prompts, sampling, group_size=2, engine=TransformersEngine), atol=1e-5)
    assert found["p0"][0].finish is Finish.EOS
    assert len(found["p0"][0]) <= 7


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_how_many_rows_have_logits_at_a_time_changes_nothing(family, policy_of, prompts_of, monkeypatch):
    """Seven rows, at once, four and two at a time."""
    policy, sampling, found = policy_of(family, dtype=torch.float64), Sampling(top_k=5, max_new_tokens=6), []
    for rows in (100, 4, 2):
        monkeypatch.setattr(decode, "chunk_rows", lambda *_, rows=rows: rows)
        found.append(run(policy, prompts_of(3), sampling, group_size=7))
    same(found[0], found[1])
    same(found[0], found[2])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, max_new_tokens=16),
        Sampling(temperature=1.3, max_new_tokens=16),
        Sampling(temperature=1.2, top_k=2, max_new_tokens=16),
        Sampling(temperature=1.2, top_p=0.8, min_p=0.05, max_new_tokens=16),
    ],
    ids=str,
)
def test_p07_p11_p13_what_was_sampled_is_what_is_scored(family, sampling, policy_of, prompts_of, scored):
    policy = policy_of(family, dtype=DTYPE[family])
    for group in run(policy, prompts_of(4, 7, 1), sampling, max_rows=5).values():
        for rollout in group:
            np.testing.assert_allclose(rollout.behavior_logp, scored(policy, rollout), rtol=0, atol=ATOL[family])
            if sampling.top_k:
                assert all(len(ids) == 2 for ids in rollout.support)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_windows_shorter_than_the_sequence(family, policy_of, prompts_of, scored):
    policy = policy_of(family, sliding_window=6)
    for group in run(policy, prompts_of(4, 11, 1), Sampling(max_new_tokens=20), max_rows=5).values():
        for rollout in group:
            np.testing.assert_allclose(rollout.behavior_logp, scored(policy, rollout), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_precisions(family, precision, policy_of, prompts_of, scored):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    policy = policy_of(family, dtype=dtype, sharpness=3.0, setting=ModelSettings(device="cpu", dtype=precision))
    differences = []
    for group in run(policy, prompts_of(4, 9), Sampling(max_new_tokens=16)).values():
        for rollout in group:
            assert rollout.behavior_logp.dtype == np.float32
            with policy.precision():
                differences.append(rollout.behavior_logp - scored(policy, rollout))
    differences = np.concatenate(differences)
    # A router's near-ties flip with the last bit of bfloat16: compare the mean there.
    assert np.abs(differences).mean() < (1e-5 if precision == "float32" else 0.05)
    if precision == "float32":
        assert np.abs(differences).max() < 1e-4


@pytest.mark.parametrize(
    "sampling", [Sampling(max_new_tokens=20), Sampling(temperature=1.4, top_k=6, top_p=0.95, max_new_tokens=20)], ids=str
)
def test_completions_do_not_depend_on_what_runs_beside_them(sampling, policy_of, prompts_of):
    policy = policy_of(eos_ids=tuple(range(1, 40, 6)))
    prompts = prompts_of(6, 3, 9, 6, 1, 12)
    expected = run(policy, prompts, sampling, group_size=4)
    assert len({len(rollout) for group in expected.values() for rollout in group}) > 4, "rows must leave at different times"
    for max_rows in (1, 3, 7):
        same(run(policy, prompts, sampling, group_size=4, max_rows=max_rows), expected)
    same(run(policy, prompts[::-1], sampling, group_size=4, max_rows=9), expected)
    one_by_one = {}
    for prompt in prompts:
        one_by_one |= run(policy, [prompt], sampling, group_size=4)
    same(one_by_one, expected)
    larger = run(policy, prompts, sampling, group_size=6)
    same({name: group[:4] for name, group in larger.items()}, expected)
    other = run(policy, prompts, sampling, group_size=4, seed=6)
    assert any(a.tokens.tolist() != b.tokens.tolist() for name in other for a, b in zip(other[name], expected[name], strict=True))


def test_p35_finished_rows_make_room_for_waiting_ones(policy_of, prompts_of, monkeypatch):
    policy = policy_of()
    prompts, sampling = prompts_of(*[4] * 6), Sampling(max_new_tokens=20)
    rows = []
    hidden = native.hidden

    def counted(policy, tokens_T, position_T, attend, images):
        rows.append((type(attend).__name__, tokens_T.shape[0]))
        return hidden(policy, tokens_T, position_T, attend, images)

    monkeypatch.setattr(native, "hidden", counted)
    groups = run(policy, prompts, sampling, group_size=4, max_rows=8)
    tokens = sum(len(rollout) for group in groups.values() for rollout in group)
    decoded = [n for kind, n in rows if kind == "Decode"]
    assert max(decoded) <= 8
    assert sum(decoded) == tokens - 24, "every live row is decoded once per token, no ended row ever is"
    assert sum(n for kind, n in rows if kind == "Prefill") == 24, "every prompt is computed once"
    assert decoded[: len(decoded) // 2] == [8] * (len(decoded) // 2), "rows stay full while completions wait"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_row_is_free_while_completions_wait_though_many_end_at_once(dtype, policy_of, prompts_of, monkeypatch):
    class Short(NativeEngine):
        def limit(self, prompt, index, sampling):
            return 1 if index % 4 else 24

    live, step = [], Scheduler._step
    monkeypatch.setattr(Scheduler, "_step", lambda self: live.append((len(self.rows.live), len(self.waiting))) or step(self))
    policy = policy_of("llama", dtype=dtype, head_dim=32)
    groups = run(policy, prompts_of(*[4] * 9), Sampling(max_new_tokens=24), group_size=5, max_rows=6, engine=Short)
    assert len(groups) == 9
    assert live
    assert all(rows == 6 for rows, waiting in live if waiting)


@pytest.mark.slow
@pytest.mark.parametrize("unseen", [2, 8, 64])
@pytest.mark.parametrize(
    ("family", "max_rows", "sampling"),
    [
        ("llama", 64, Sampling(max_new_tokens=48)),
        ("gpt2", 3, Sampling(max_new_tokens=24, temperature=1.3)),
        ("gemma2", 4, Sampling(max_new_tokens=12, temperature=0.0)),
        ("qwen2", 5, Sampling(max_new_tokens=30, stop=("0", "3"))),
        ("llama", 4, Sampling(max_new_tokens=9, top_k=3)),
    ],
    ids=str,
)
def test_tokens_drawn_unseen_are_those_drawn_one_by_one(unseen, family, max_rows, sampling, policy_of, prompts_of, monkeypatch):
    """As on a GPU, where the host looks at several tokens at a time."""
    policy, prompts = policy_of(family, sharpness=2.0), prompts_of(5, 9, 1, 5, 12)
    seen = run(policy, prompts, sampling, max_rows=max_rows)
    looks, look = [], scheduler._to_host
    monkeypatch.setattr(scheduler, "_to_host", lambda drawn: looks.append(len(drawn)) or look(drawn))
    monkeypatch.setitem(scheduler.TOKENS_PER_SYNC, "cpu", unseen)
    same(run(policy, prompts, sampling, max_rows=max_rows), seen, atol=1e-12)
    assert (max(looks) > 1) is not sampling.restricts
    finishes = {rollout.finish for group in seen.values() for rollout in group}
    assert len(finishes) > 1 or sampling.greedy or sampling.restricts


def test_groups_come_as_soon_as_they_are_complete(policy_of, prompts_of):
    policy = policy_of()
    engine = NativeEngine(policy, max_rows=2)
    stream = engine.generate(prompts_of(3, 3, 3), group_size=2, sampling=Sampling(max_new_tokens=12), seed=0)
    engine.send_weights(4)
    first = next(stream)
    engine.send_weights(5)
    rest = list(stream)
    assert [rollout.index for rollout in first] == [0, 1]
    assert set(first[0].version) == {4}
    assert set(rest[-1][0].version) == {5}, "later tokens carry the later version"


def test_p16_every_eos_id_ends_a_row(policy_of, prompts_of):
    policy = policy_of("gpt2", eos_ids=(1, 2, 9), sharpness=1.0)
    rollouts = [r for group in run(policy, prompts_of(3), Sampling(max_new_tokens=30), group_size=60).values() for r in group]
    last = {int(r.tokens[-1]) for r in rollouts if r.finish is Finish.EOS}
    assert last == {1, 2, 9}
    for rollout in rollouts:
        assert not np.isin(rollout.tokens[:-1], (1, 2, 9)).any()
        assert rollout.truncated == (len(rollout) == 30 and rollout.tokens[-1] not in (1, 2, 9))


def test_p17_a_pad_id_that_ends_rows_is_an_ordinary_token(policy_of, prompts_of):
    policy = policy_of("gpt2", sharpness=1.0)
    padded = replace(policy, pad_id=1)
    sampling = Sampling(max_new_tokens=30)
    same(run(policy, prompts_of(3, 5), sampling), run(padded, prompts_of(3, 5), sampling))


def test_stop_strings_end_a_row_at_the_token_that_completes_them(policy_of, prompts_of):
    policy = policy_of("gpt2", sharpness=1.0)
    free = run(policy, prompts_of(3, 6), Sampling(max_new_tokens=60), group_size=20)
    stop = ("12", "A")
    stopped = run(policy, prompts_of(3, 6), Sampling(max_new_tokens=60, stop=stop), group_size=20)
    reasons = set()
    for name, group in free.items():
        for rollout, other in zip(group, stopped[name], strict=True):
            ends = [n for n in range(1, len(rollout) + 1) if any(s in policy.decode(rollout.tokens[:n].tolist()) for s in stop)]
            length = ends[0] if ends else len(rollout)
            assert other.tokens.tolist() == rollout.tokens[:length].tolist()
            assert other.text == policy.decode(rollout.tokens[:length].tolist())
            assert other.finish is (Finish.STOP if ends else rollout.finish)
            reasons.add(other.finish)
    assert {Finish.STOP, Finish.EOS} <= reasons


def test_the_context_ends_a_row(policy_of, prompts_of):
    policy = policy_of("gpt2", context=20, sharpness=1.0, eos_ids=(1,))
    for group in run(policy, prompts_of(5, 19), Sampling(max_new_tokens=50), group_size=8).values():
        for rollout in group:
            room = 20 - rollout.prompt.tokens.size
            assert len(rollout) <= room
            assert (rollout.finish is Finish.LENGTH) == (rollout.tokens[-1] != 1)
    with pytest.raises(EngineError, match="20 tokens, but the policy's context is 20"):
        run(policy, prompts_of(20), Sampling())


def test_one_new_token(policy_of, prompts_of, scored):
    policy = policy_of()
    for group in run(policy, prompts_of(1, 4), Sampling(max_new_tokens=1)).values():
        for rollout in group:
            assert len(rollout) == 1
            np.testing.assert_allclose(rollout.behavior_logp, scored(policy, rollout), rtol=0, atol=1e-9)


def test_rows_of_a_padded_embedding_are_never_sampled(policy_of, prompts_of, scored):
    policy = policy_of("gpt2", vocabulary=12, rows=64, sharpness=1.0)
    for group in run(policy, prompts_of(3, vocabulary=12), Sampling(max_new_tokens=20), group_size=50).values():
        for rollout in group:
            assert rollout.tokens.max() < 12
            np.testing.assert_allclose(rollout.behavior_logp, scored(policy, rollout), rtol=0, atol=1e-9)


@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_first_tokens_follow_the_model(temperature, policy_of, prompts_of, scored):
    policy = policy_of("gpt2", vocabulary=12, sharpness=3.0)
    sampling = Sampling(temperature=temperature, max_new_tokens=1)
    (group,) = run(policy, prompts_of(4, vocabulary=12), sampling, group_size=4000, max_rows=4000).values()
    counts = np.bincount([int(r.tokens[0]) for r in group], minlength=12)
    p = np.zeros(12)
    for rollout in group:
        p[rollout.tokens[0]] = np.exp(rollout.behavior_logp[0])
    likely = p * 4000 > 5
    assert p[likely].sum() > 0.99
    assert abs(p.sum() - 1.0) < 0.01
    assert chisquare(counts[likely] / counts[likely].sum() * 4000, p[likely] / p[likely].sum() * 4000).pvalue > 1e-3


def test_near_greedy_sampling_is_greedy(policy_of, prompts_of):
    policy = policy_of()
    greedy = run(policy, prompts_of(3, 6), Sampling(temperature=0.0, max_new_tokens=16))
    cold = run(policy, prompts_of(3, 6), Sampling(temperature=1e-5, max_new_tokens=16))
    for name, group in greedy.items():
        for a, b in zip(group, cold[name], strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert np.abs(b.behavior_logp).max() < 1e-6


def test_p08_dropout_is_off_while_sampling_and_modes_are_restored(policy_of, prompts_of, scored):
    policy = policy_of("gpt2", dropout=0.5)
    expected = run(policy, prompts_of(3, 6), Sampling(max_new_tokens=12))
    policy.model.train()
    policy.model.transformer.h[1].eval()
    modes = [module.training for module in policy.model.modules()]
    for engine in (NativeEngine, TransformersEngine):
        stream = engine(policy, max_rows=64).generate(prompts_of(3, 6), group_size=3, sampling=Sampling(max_new_tokens=12), seed=5)
        groups = {}
        for group in stream:
            assert [module.training for module in policy.model.modules()] == modes, "the caller never sees eval mode"
            assert not torch.is_inference_mode_enabled()
            groups[group[0].prompt.id] = group
        if engine is NativeEngine:
            same(groups, expected)
    policy.model.eval()
    for group in groups.values():
        for rollout in group:
            np.testing.assert_allclose(rollout.behavior_logp, scored(policy, rollout), rtol=0, atol=1e-5)


def test_p15_the_checkpoints_generation_config_is_ignored(policy_of, prompts_of):
    policy = policy_of(dtype=torch.float32)
    sampling = Sampling(max_new_tokens=12)
    plain = [run(policy, prompts_of(3, 6), sampling, engine=engine) for engine in (NativeEngine, TransformersEngine)]
    policy.model.generation_config.update(
        do_sample=True, temperature=1e-6, top_k=1, top_p=0.1, repetition_penalty=5.0, max_length=3, num_beams=4, min_new_tokens=9
    )
    before = policy.model.generation_config
    for expected, engine in zip(plain, (NativeEngine, TransformersEngine), strict=True):
        same(run(policy, prompts_of(3, 6), sampling, engine=engine), expected)
    assert policy.model.generation_config is before


def test_texts_have_no_special_tokens(policy_of, prompts_of):
    policy = policy_of("gpt2", sharpness=1.0)
    rollouts = run(policy, prompts_of(3), Sampling(max_new_tokens=60), group_size=10)["p0"]
    ended = [rollout for rollout in rollouts if rollout.finish is Finish.EOS]
    assert ended
    for rollout in ended:
        with_special_tokens = policy.tokenizer.decode(rollout.tokens)
        assert with_special_tokens.endswith("<eos>")
        assert rollout.text == re.sub("<eos>|<pad>|<bos>", "", with_special_tokens)


def test_weights_that_are_not_finite_are_reported(policy_of, prompts_of):
    policy = policy_of("gpt2")
    with torch.no_grad():
        policy.model.transformer.ln_f.weight[0] = torch.nan
    with pytest.raises(Diverged, match="p0"):
        run(policy, prompts_of(3), Sampling(max_new_tokens=4))


def test_training_goes_on_after_sampling(policy_of, prompts_of):
    policy = policy_of("llama")
    run(policy, prompts_of(3), Sampling(max_new_tokens=4))
    from groupwise.models.attention import plain_attention

    with plain_attention(policy.model):
        policy.model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False).logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in policy.model.parameters())


def test_an_engine_refuses_what_it_cannot_do(policy_of):
    policy = policy_of()
    with pytest.raises(EngineError, match="'single'"):
        NativeEngine(replace(policy, attention="single"), max_rows=4)
    for engine in (NativeEngine, TransformersEngine):
        with pytest.raises(EngineError, match="max_rows must be at least 1, got 0"):
            engine(policy, max_rows=0)


def test_nothing_to_do(policy_of):
    assert list(NativeEngine(policy_of(), max_rows=4).generate([], group_size=2, sampling=Sampling(), seed=0)) == []
