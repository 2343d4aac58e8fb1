"""Log-probs in bfloat16 are as near to float32's as those of the model's own forward pass, which TRL takes."""

import numpy as np
import pytest
import torch

from groupwise.config.settings import ModelSettings
from groupwise.records import Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.training.passes import score
from groupwise.training.samples import sample_of


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"head_dim": 32}), ("qwen2", {}), ("qwen3", {"head_dim": 32}), ("gpt2", {"n_head": 2}), ("gemma2", {})],
)
def test_bfloat16_log_probs_are_as_near_to_float32_as_trls(family, options, policy_of, prompts_of, scored):
    lower = policy_of(family, dtype=torch.float32, sharpness=3.0, setting=ModelSettings(device="cpu", dtype="autocast"), **options)
    exact = policy_of(family, dtype=torch.float32, sharpness=3.0, **options)
    exact.model.load_state_dict(lower.model.state_dict())
    sampling = Sampling(temperature=0.7, max_new_tokens=24)
    groups = NativeEngine(lower, max_rows=64).generate(prompts_of(5, 9, 1, 14, 3, 7), group_size=6, sampling=sampling, seed=3)
    rollouts = [rollout for group in groups for rollout in group]
    wanted = np.concatenate([scored(exact, rollout) for rollout in rollouts])
    with torch.autocast("cpu", torch.bfloat16):
        theirs = np.concatenate([scored(lower, rollout) for rollout in rollouts])
    found = {
        "scored": np.concatenate(score(lower, [sample_of(rollout) for rollout in rollouts], max_tokens_per_microbatch=256).logp),
        "sampled": np.concatenate([rollout.behavior_logp for rollout in rollouts]),
    }
    assert np.abs(theirs - wanted).mean() > 1e-4, "it is rounded"
    for name, ours in found.items():
        assert np.abs(ours - wanted).mean() < 1.15 * np.abs(theirs - wanted).mean(), name
        assert np.abs(ours - wanted).max() < 1.5 * np.abs(theirs - wanted).max(), name
