"""Completions that a teacher helps to write: every token is drawn from `mix p + (1 - mix) q` (MiniLLM, 2306.08543, section 2.2).

p is the teacher's distribution and q the policy's, both at the sampling temperature, after the same text.  The log-prob that a
rollout carries is the mixture's, so that importance ratios correct for it.  Both models run transformers' own forward, padded, with
its key-value caches: slower than the native engine, and twice.

R rows of a batch   V vocabulary
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from groupwise.environments.conversation import EpisodeWorld
from groupwise.errors import EngineError
from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.records import Finish, Prompt, Rollout, Sampling
from groupwise.rollout.engine import InProcess, check_request, completion_limit, fitting, make_rollout
from groupwise.rollout.sampling import draw, stream_keys, uniforms
from groupwise.rollout.stopping import Stopping


class MixedEngine(InProcess):
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
        """mix: share of the teacher, above 0 and below 1.   Raises EngineError for another, and for a world."""
        if world is not None:
            raise EngineError(
                "completions that a teacher helps to write are of one turn: set group.mix to 0 to train in environments"
            )
        if not 0.0 < mix < 1.0:
            raise EngineError(f"mix must be above 0 and below 1, got {mix}")
        self.policy, self.teacher, self.mix = policy, teacher, mix
        self.max_rows, self.keep_special_tokens = max_rows, keep_special_tokens

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        """Sample from the mixture of policy and teacher, in the order of the prompts.

        Raises EngineError for truncated or greedy sampling.
        """
        check_request(self.policy, prompts, group_size, sampling)
        check_request(self.teacher, prompts, group_size, sampling)
        if sampling.truncates or sampling.greedy:
            raise EngineError("a mixture is drawn from as it is: leave top_k, top_p and min_p out, and the temperature above 0")
        rows = [(prompt, index) for prompt in prompts for index in range(group_size)]
        group: list[Rollout] = []
        for begin in range(0, len(rows), self.max_rows):
            with fitting(self.max_rows):
                batch = self._batch(rows[begin : begin + self.max_rows], sampling, seed)
            for rollout in batch:
                group.append(rollout)
                if len(group) == group_size:
                    yield tuple(group)
                    group = []

    @torch.no_grad()
    def _batch(self, rows: Sequence[tuple[Prompt, int]], sampling: Sampling, seed: int) -> list[Rollout]:
        policy, size = self.policy, max(prompt.tokens.size for prompt, _ in rows)
        ids, mask = np.full((len(rows), size), policy.pad_id), np.zeros((len(rows), size), dtype=np.int64)
        for r, (prompt, _) in enumerate(rows):
            ids[r, size - prompt.tokens.size :], mask[r, size - prompt.tokens.size :] = prompt.tokens, 1
        limits = [min(completion_limit(one, prompt, sampling) for one in (policy, self.teacher)) for prompt, _ in rows]
        keys = np.concatenate([stream_keys(seed, prompt.id, [index]) for prompt, index in rows])
        uniform_RT = torch.from_numpy(uniforms(keys, max(limits))).to(policy.device)
        stopping = Stopping(policy.eos_ids, sampling.stop, policy.tokenizer)
        tokens: list[list[int]] = [[] for _ in rows]
        logp: list[list[float]] = [[] for _ in rows]
        ended: dict[int, Finish] = {}
        readers = [_Reader(one, torch.from_numpy(mask).to(one.device)) for one in (policy, self.teacher)]
        step_RT, plain = torch.from_numpy(ids).to(policy.device), replace(sampling, temperature=1.0)
        with ExitStack() as stack:
            for one in (policy, self.teacher):
                stack.enter_context(plain_attention(one.model))
                stack.enter_context(one.precision())
            for t in range(max(limits)):
                log_q_RV, log_p_RV = (reader.next(step_RT, sampling.temperature, policy.vocabulary) for reader in readers)
                mixture_RV = torch.logaddexp(log_q_RV + math.log1p(-self.mix), log_p_RV + math.log(self.mix))
                token_R, logp_R, _ = draw(mixture_RV, uniform_RT[:, t], plain)
                for r, (token, value) in enumerate(zip(token_R.tolist(), logp_R.tolist(), strict=True)):
                    if r not in ended:
                        tokens[r].append(token)
                        logp[r].append(value)
                        if (finish := stopping.finish(tokens[r], limits[r])) is not None:
                            ended[r] = finish
                if len(ended) == len(rows):
                    break
                step_RT = token_R[:, None]
        ended_as = partial(make_rollout, sampling=sampling, version=self.version, keep_special_tokens=self.keep_special_tokens)
        return [ended_as(policy, prompt, index, tokens[r], logp[r], ended[r]) for r, (prompt, index) in enumerate(rows)]


@dataclass(slots=True)
class _Reader:
    """A model that reads rows token by token."""

    policy: Policy
    mask_RT: Tensor
    """1 for tokens, 0 for the padding before them."""
    cache: Any = field(default=None)
    last: dict[str, int] = field(init=False)
    """Asks the model for the logits of the last position alone: of all prompts together they would not fit into memory."""

    def __post_init__(self) -> None:
        known = "logits_to_keep" in inspect.signature(self.policy.model.forward).parameters
        self.last = {"logits_to_keep": 1} if known else {}

    def next(self, ids_RT: Tensor, temperature: float, vocabulary: int) -> Tensor:
        """Log-probs (R, V) of what follows these further tokens, at least float32."""
        new, old = ids_RT.shape[1], 0 if self.cache is None else self.mask_RT.shape[1]
        if old:
            self.mask_RT = torch.cat([self.mask_RT, torch.ones_like(self.mask_RT[:, :new])], 1)
        position_RT = (self.mask_RT.cumsum(1) - 1).clamp(min=0)[:, -new:]
        model = cast(Any, self.policy.model)
        found = model(
            input_ids=ids_RT,
            attention_mask=self.mask_RT,
            position_ids=position_RT,
            past_key_values=self.cache,
            use_cache=True,
            **self.last,
        )
        self.cache = found.past_key_values
        logits_RV = found.logits[:, -1, :vocabulary]
        return torch.log_softmax(logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)) / temperature, -1)
