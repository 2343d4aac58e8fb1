"""Completions and log-probs of weights that do not change, by the trainer's native engine.

m tokens of a prompt
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from groupwise.models.policy import Policy
from groupwise.records import Finish, Prompt, Rollout, Sample, Sampling
from groupwise.rollout.engine import sequence_room
from groupwise.rollout.native.engine import NativeEngine
from groupwise.tinker.batches import check_tokens
from groupwise.tinker.bodies import SampleBody
from groupwise.tinker.promises import Promise
from groupwise.tinker.wire import DrawnCompletion, sample_output
from groupwise.training.passes import score
from groupwise.utils.http import Refused


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawSettings:
    """How completions are drawn; requests that agree in it are drawn together."""

    number: int
    """Completions of each prompt."""
    sampling: Sampling
    eos_ids: tuple[int, ...]
    """Ids that end a completion."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleRequest:
    """One request for completions of a prompt."""

    body: SampleBody
    prompt_m: np.ndarray
    """int64 (m,)."""
    promise: Promise

    @property
    def sampler_id(self) -> str:
        """The sampler that is asked."""
        return self.body.sampling_session_id

    @property
    def name(self) -> str:
        """The key of its random streams: with a seed the same for the same prompt."""
        seed = self.body.sampling_params.seed
        if seed is None:
            return f"{self.sampler_id}:{self.body.seq_id}"
        return f"seed {seed} {hashlib.sha256(self.prompt_m.tobytes()).hexdigest()}"

    def draws(self, policy: Policy) -> DrawSettings:
        """Return how its completions are drawn.  Raises Refused for what the policy cannot do."""
        params = self.body.sampling_params
        check_tokens("the prompt", self.prompt_m, policy)
        room = sequence_room(policy, self.prompt_m.size)
        if room < 1:
            raise Refused(
                f"the prompt has {self.prompt_m.size} tokens, but the model's context is"
                f" {policy.context}: no room for a completion"
            )
        texts, ids = _stops(params.stop)
        if params.stop == []:
            eos_ids: tuple[int, ...] = ()  # it stops at nothing
        else:
            eos_ids = tuple(sorted({*policy.eos_ids, *ids}))
        sampling = Sampling(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            max_new_tokens=params.max_tokens or policy.context,
            stop=texts,
        )
        return DrawSettings(number=self.body.num_samples, sampling=sampling, eos_ids=eos_ids)


def _stops(stop: str | list[int] | list[str] | None) -> tuple[tuple[str, ...], list[int]]:
    """Return the texts and the ids at which a completion ends."""
    if stop is None:
        return (), []
    if isinstance(stop, str):
        return (stop,), []
    texts = tuple(entry for entry in stop if isinstance(entry, str))
    ids = [entry for entry in stop if isinstance(entry, int)]
    return texts, ids


class WeightsSampler:
    """A policy whose weights do not change."""

    def __init__(self, policy: Policy, *, rows: int, positions: int) -> None:
        """rows: completions at the same time.   positions: packed positions scored at a time."""
        self.policy, self.rows, self.positions = policy, rows, positions

    def draw(self, requests: Sequence[SampleRequest], draws: DrawSettings) -> list[bytes]:
        """Return the results of requests that agree in how they are drawn."""
        policy = replace(self.policy, eos_ids=draws.eos_ids)
        prompts = []
        for request in requests:
            prompts.append(Prompt(id=request.name, tokens=request.prompt_m, text=""))
        engine = NativeEngine(policy, max_rows=self.rows)
        groups = {}
        try:
            for group in engine.generate(
                prompts, group_size=draws.number, sampling=draws.sampling, seed=0
            ):
                groups[group[0].prompt.id] = group
        finally:
            engine.close()
        results = []
        for request in requests:
            drawn = [_drawn(rollout) for rollout in groups[request.name]]
            results.append(sample_output(drawn, self._prompt_logp(request)))
        return results

    def _prompt_logp(self, request: SampleRequest) -> np.ndarray | None:
        """Return the log-probs of a prompt's tokens (m,), NaN where none is asked for; None if the
        request asks for none at all.
        """
        if not request.body.prompt_logprobs:
            return None
        prompt_m = request.prompt_m
        logp_m = np.full(prompt_m.size, np.nan)
        last = request.body.prompt_logprobs_last_n or prompt_m.size - 1
        last = min(last, prompt_m.size - 1)
        if last < 1:
            return logp_m
        weight = np.zeros(prompt_m.size - 1)
        weight[-last:] = 1.0
        sample = Sample(group="0", prompt=prompt_m[:1], completion=prompt_m[1:], weight=weight)
        scores = score(self.policy, [sample], max_tokens_per_microbatch=self.positions)
        logp_m[-last:] = scores.logp[0][-last:]
        return logp_m


def _drawn(rollout: Rollout) -> DrawnCompletion:
    truncated = rollout.finish is Finish.LENGTH
    return DrawnCompletion(tokens=rollout.tokens, logp=rollout.behavior_logp, truncated=truncated)
