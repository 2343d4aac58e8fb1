"""The reference engine: its own records hold, and it shares the native engine's rules."""

import itertools
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.errors import MemoryExceeded
from groupwise.models.attention import plain_attention
from groupwise.records import Finish, Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.transformers import TransformersEngine
from groupwise.training.branches import unbranched


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7, max_new_tokens=14), Sampling(top_k=4, top_p=0.9, min_p=0.02, max_new_tokens=14)], ids=str
)
def test_p06_p07_batches_score_like_single_sequences(family, sampling, policy_of, prompts_of, scored):
    policy = policy_of(family, dtype=torch.float32, eos_ids=(1, 2), sharpness=2.0)
    engine = TransformersEngine(policy, max_rows=7)
    engine.send_weights(3)
    groups = list(engine.generate(prompts_of(1, 9, 4), group_size=3, sampling=sampling, seed=0))
    assert sorted(group[0].prompt.id for group in groups) == ["p0", "p1", "p2"]
    for group in groups:
        assert [rollout.index for rollout in group] == [0, 1, 2]
        for rollout in group:
            assert set(rollout.version) == {3}
            assert (rollout.finish is Finish.EOS) == (rollout.tokens[-1] in (1, 2))
            np.testing.assert_allclose(rollout.behavior_logp, scored(policy, rollout), rtol=0, atol=1e-5)


def test_the_same_call_draws_the_same_and_leaves_the_global_generator_alone(policy_of, prompts_of):
    policy = policy_of(dtype=torch.float32)

    def tokens(seed):
        engine = TransformersEngine(policy)
        groups = engine.generate(prompts_of(4), group_size=4, sampling=Sampling(max_new_tokens=10), seed=seed)
        return [rollout.tokens.tolist() for group in groups for rollout in group]

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = tokens(0)
    torch.testing.assert_close(torch.rand(3), expected)
    assert tokens(0) == first
    assert tokens(1) != first


def test_every_visit_of_a_prompt_and_every_prompt_has_noise_of_its_own(policy_of, prompts_of):
    """Under one seed, as a run draws step after step: else nothing new would be sampled before the weights have moved."""
    engine = TransformersEngine(policy_of(dtype=torch.float32))

    def drawn(prompt, id):
        (group,) = engine.generate([replace(prompt, id=id)], group_size=8, sampling=Sampling(max_new_tokens=6), seed=0)
        return [rollout.tokens.tolist() for rollout in group]

    (prompt,) = prompts_of(4)
    epochs = [drawn(prompt, f"{epoch}/0") for epoch in range(4)]
    assert all(one != other for one, other in itertools.combinations(epochs, 2))
    assert drawn(prompt, "2/0") == epochs[2]
    near = replace(prompt, tokens=prompt.tokens[::-1].copy())
    firsts = zip(drawn(near, "0/1"), epochs[0], strict=True)
    assert sum(one[0] == other[0] for one, other in firsts) < 6, "of 8: the distributions are almost even"


def test_stop_strings_and_the_context(policy_of, prompts_of):
    policy = policy_of("gpt2", dtype=torch.float32, context=24, sharpness=1.0)
    sampling = Sampling(max_new_tokens=60, stop=("1", "A"))
    rollouts = [
        r
        for group in TransformersEngine(policy).generate(prompts_of(3, 20), group_size=16, sampling=sampling, seed=0)
        for r in group
    ]
    assert {Finish.STOP, Finish.LENGTH} <= {rollout.finish for rollout in rollouts}
    for rollout in rollouts:
        room = 24 - rollout.prompt.tokens.size
        assert len(rollout) <= room
        assert (rollout.finish is Finish.STOP) == (rollout.text[-1:] in ("1", "A"))
        assert not set(rollout.text[:-1]) & {"1", "A"}


def _fresh(policy, rollout):
    """Log-probs of all tokens, each stretch by a forward pass of its own."""
    found = []
    for part in unbranched(rollout):
        ids = torch.from_numpy(np.concatenate([part.prompt.tokens, part.tokens]))[None]
        with plain_attention(policy.model), torch.no_grad():
            z = policy.model(input_ids=ids, use_cache=False).logits[0, part.prompt.tokens.size - 1 : -1, : policy.vocabulary]
        z = (z / rollout.sampling.temperature).log_softmax(-1)
        found.append(z.gather(1, torch.from_numpy(part.tokens)[:, None])[:, 0].numpy())
    return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0.0, 0.4])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2"])
def test_episodes_are_what_a_forward_pass_gives(family, cut, policy_of, prompts_of, scripted_environment):
    options = {"sliding_window": 6} if family in ("mistral", "gemma2") else {}
    policy = policy_of(family, context=128, eos_ids=(1, 2, 3), sharpness=1.0, **options)
    sampling, told = Sampling(max_new_tokens=40), None
    for rows, delays in ((3, 0), (1, None), (16, 1)):
        environment = scripted_environment(cut=cut, cut_to="other", delays=delays)
        engine = TransformersEngine(policy, max_rows=rows, environment=environment)
        groups = list(engine.generate(prompts_of(9, 30), group_size=3, sampling=sampling, seed=2))
        found = {(rollout.prompt.id, rollout.index): rollout for group in groups for rollout in group}
        for name, rollout in found.items():
            talk = environment.begun[name]
            assert talk.closed == [rollout.finish]
            spans = [rollout.tokens[turn.begin : turn.end].tolist() for turn in rollout.episode.turns]
            assert spans == [tokens for tokens, *_ in talk.heard]
            difference = np.abs(_fresh(policy, rollout) - rollout.behavior_logp)[rollout.trained]
            assert difference.max(initial=0.0) < 2e-5
        transcripts = {name: rollout.tokens.tolist() for name, rollout in found.items()}
        assert told is None or transcripts == told
        told = transcripts


class _Held(TorchDispatchMode):
    """The most tensors of a size that are held at one time."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.live, self.most = numbers, weakref.WeakSet(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, torch.Tensor) and one.numel() >= self.numbers and one._base is None:
                self.live.add(one)
        self.most = max(self.most, len({one.data_ptr() for one in self.live}))
        return out


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7, max_new_tokens=40), Sampling(top_k=3, max_new_tokens=40)], ids=str)
def test_the_scores_of_one_token_are_held_at_a_time(sampling, policy_of, prompts_of):
    """Not those of all: rows x tokens x vocabulary is more than the memory of any machine."""
    engine, size = TransformersEngine(policy_of(dtype=torch.float32, vocabulary=400, context=128)), 8
    with _Held(size * 400) as held:
        (group,) = engine.generate(prompts_of(4), group_size=size, sampling=sampling, seed=0)
    assert max(map(len, group)) == 40
    assert held.most < 12


@pytest.mark.parametrize("raised", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("can't allocate memory: 9 bytes")])
@pytest.mark.parametrize("kind", [TransformersEngine, NativeEngine])
def test_memory_that_runs_out_while_sampling_is_said_with_the_remedy(kind, raised, policy_of, prompts_of):
    policy = policy_of(dtype=torch.float32)

    def full(*_):
        raise raised

    policy.model.model.layers[1].register_forward_pre_hook(full)
    with pytest.raises(MemoryExceeded, match=r"sample 7 completions at a time \(.*memory.*\); lower rollout.max_rows"):
        list(kind(policy, max_rows=7).generate(prompts_of(4), group_size=2, sampling=Sampling(max_new_tokens=4), seed=0))
