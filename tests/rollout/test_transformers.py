"""The reference engine: its own records hold, and it shares the native engine's rules."""

import numpy as np
import pytest
import torch

from groupwise.records import Finish, Sampling
from groupwise.rollout.transformers import TransformersEngine


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7, max_new_tokens=14), Sampling(top_k=4, top_p=0.9, min_p=0.02, max_new_tokens=14)], ids=str
)
def test_p06_p07_batches_score_like_single_sequences(family, sampling, policy_of, prompts_of, scored):
    policy = policy_of(family, dtype=torch.float32, eos_ids=(1, 2), sharpness=2.0)
    engine = TransformersEngine(policy, max_rows=7)
    engine.set_version(3)
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
