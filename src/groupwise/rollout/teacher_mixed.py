"""Completions that a teacher helps to write: every token is drawn from `mix p + (1 - mix) q`
(MiniLLM, 2306.08543, section 2.2).

p is the teacher's distribution and q the policy's, both at the sampling temperature, after the same
text.  The log-prob that a rollout carries is the mixture's, so that importance ratios correct for
it.  The policy runs transformers' own `generate`, and the teacher a forward pass with a cache of
its own beside each step: slower than the native engine, and twice.

R rows of a batch   V vocabulary   T tokens of a completion
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from groupwise.environments.conversation import EpisodeWorld
from groupwise.errors import EngineError
from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.records import Prompt, Rollout, Sampling
from groupwise.rollout.engine import check_request, completion_limit
from groupwise.rollout.sampling import draw, stream_keys, uniforms
from groupwise.rollout.transformers import ScoreWatch, TransformersEngine


class MixedEngine(TransformersEngine):
    """Implements `engine.Engine`, with random streams per completion."""

    def __init__(
        self,
        policy: Policy,
        teacher: Policy,
        mix: float,
        *,
        max_rows: int = 256,
        keep_special_tokens: bool = False,
        world: EpisodeWorld | None = None,
    ) -> None:
        """mix: share of the teacher, above 0 and below 1.   Raises EngineError for another, and for
        a world.
        """
        if world is not None:
            raise EngineError(
                "completions that a teacher helps to write are of one turn: set group.mix to 0 to"
                " train in environments"
            )
        if not 0.0 < mix < 1.0:
            raise EngineError(f"mix must be above 0 and below 1, got {mix}")
        super().__init__(policy, max_rows=max_rows, keep_special_tokens=keep_special_tokens)
        self.teacher, self.mix = teacher, mix

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        """Sample from the mixture of policy and teacher.  Raises EngineError for truncated or
        greedy sampling.
        """
        check_request(self.teacher, prompts, group_size, sampling)
        if sampling.truncates or sampling.greedy:
            raise EngineError(
                "a mixture is drawn from as it is: leave top_k, top_p and min_p out, and the"
                " temperature above 0"
            )
        yield from super().generate(prompts, group_size=group_size, sampling=sampling, seed=seed)

    def _limit(self, prompt: Prompt, sampling: Sampling) -> int:
        return min(completion_limit(one, prompt, sampling) for one in (self.policy, self.teacher))

    def _batch(
        self, rows: list[tuple[Prompt, int]], sampling: Sampling, seed: int
    ) -> list[Rollout]:
        with plain_attention(self.teacher.model):
            return super()._batch(rows, sampling, seed)

    def _watch(self, rows: list[tuple[Prompt, int]], sampling: Sampling, seed: int) -> ScoreWatch:
        keys_R = np.concatenate([stream_keys(seed, prompt.id, [index]) for prompt, index in rows])
        uniform_RT = uniforms(keys_R, max(self._limit(prompt, sampling) for prompt, _ in rows))
        policy = self.policy
        return _Mixture(
            self.teacher,
            self.mix,
            sampling.temperature,
            policy.vocabulary,
            torch.from_numpy(uniform_RT).to(policy.device),
        )


class _Mixture(ScoreWatch):
    """Draws each row's next token from the mixture, by the completion's own uniform numbers, and
    leaves no other to be drawn.
    """

    def __init__(
        self, teacher: Policy, mix: float, temperature: float, vocabulary: int, uniform_RT: Tensor
    ) -> None:
        self.teacher, self.mix, self.temperature, self.vocabulary = (
            teacher,
            mix,
            temperature,
            vocabulary,
        )
        self.uniform_RT = uniform_RT
        self.cache: Any = None
        self.drawn = 0
        known = "logits_to_keep" in inspect.signature(teacher.model.forward).parameters
        # The logits of the last position alone: of all prompts together they would not fit into
        # memory.
        self.last = {"logits_to_keep": 1} if known else {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """0 for the token that is drawn, -inf for all others.   scores: the policy's logits at the
        sampling temperature (R, V).
        """
        model, ids_RT = (
            cast(Any, self.teacher.model),
            (input_ids if self.cache is None else input_ids[:, -1:]),
        )
        with self.teacher.precision():
            out = model(input_ids=ids_RT, past_key_values=self.cache, use_cache=True, **self.last)
        self.cache = out.past_key_values
        theirs_RV = out.logits[:, -1, : self.vocabulary]
        log_p_RV = torch.log_softmax(
            theirs_RV.to(torch.promote_types(theirs_RV.dtype, torch.float32)) / self.temperature, -1
        )
        log_q_RV = torch.log_softmax(scores[:, : self.vocabulary], -1)
        self.scores_RV = torch.logaddexp(
            log_q_RV + math.log1p(-self.mix), log_p_RV + math.log(self.mix)
        )
        token_R, _, _ = draw(self.scores_RV, self.uniform_RT[:, self.drawn], Sampling())
        self.drawn += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, token_R[:, None], 0.0)
