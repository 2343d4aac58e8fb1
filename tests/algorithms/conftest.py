"""Small groups with given rewards and lengths, and random terms, for the tests of the mathematics."""

import numpy as np
import pytest
import torch

from groupwise.algorithms.losses import Terms
from groupwise.records import Finish, Prompt, Rollout, RolloutGroup, Sampling


@pytest.fixture(scope="session")
def scored():
    """Make a `RolloutGroup` group: rewards (G,) or (G, K), None or NaN = not applicable; the rest per completion."""

    def make(rewards, *, lengths=None, behavior=None, reference=None, process=None, trained=None, weights=None, name="p"):
        reward_GK = np.array(rewards, dtype=np.float64)
        reward_GK = reward_GK[:, None] if reward_GK.ndim == 1 else reward_GK
        size, functions = reward_GK.shape
        if lengths is None:
            columns = behavior or process
            lengths = [2] * size if columns is None else [len(column) for column in columns]
        weights = (1.0,) * functions if weights is None else tuple(weights)
        prompt = Prompt(id=name, tokens=np.array([3]), text="")
        rollouts = tuple(
            Rollout(
                prompt=prompt,
                index=i,
                tokens=np.full(n, 5),
                behavior_logp=np.zeros(n) if behavior is None else np.array(behavior[i], dtype=np.float64),
                finish=Finish.LENGTH,
                eos_ids=(1,),
                sampling=Sampling(),
                text="",
                trained=None if trained is None else np.array(trained[i], dtype=bool),
            )
            for i, n in enumerate(lengths)
        )
        unscorable = np.isnan(reward_GK).all(axis=1)
        signals = {"reference_logp": reference, "process": process}
        return RolloutGroup(
            rollouts=rollouts,
            names=tuple(f"r{k}" for k in range(functions)),
            rewards=reward_GK,
            reward=np.where(unscorable, np.nan, np.nansum(reward_GK * np.array(weights), axis=1)),
            weights=weights,
            signals={
                key: tuple(np.array(column, dtype=np.float64) for column in columns)
                for key, columns in signals.items()
                if columns is not None
            },
        )

    return make


@pytest.fixture(scope="session")
def random_terms():
    """Make random `Terms` of completions of given lengths; `spread` is the size of the log-ratios in nats."""

    def make(lengths=(3, 1, 4), *, seed=0, dtype=torch.float64, spread=0.4, per_token=False, **columns):
        generator = torch.Generator().manual_seed(seed)
        total, segments = sum(lengths), len(lengths)
        draw = lambda n: torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
        segment_M = torch.repeat_interleave(torch.arange(segments), torch.tensor(lengths))
        old_M = -draw(total).abs()
        logp_M = (old_M + spread * draw(total)).detach().requires_grad_()
        advantage_M = draw(total) if per_token else draw(segments)[segment_M]
        return Terms(
            logp_M=logp_M,
            old_logp_M=old_M,
            advantage_M=advantage_M,
            segment_M=segment_M,
            segments=segments,
            **columns,
        )

    return make
