"""The reference engine: transformers' own `generate`, with its own attention and its own random
numbers.

Slow and independent: it shares no line of the native engine's prefill, attention, cache or
    sampling.  Only prompts of one length are in a batch, so nothing is padded: not every family
    gives a padded row the numbers that it has alone.  Completions come from a seeded generator of
    torch, so they depend on what else is in the batch: there are no random streams per completion.
    A batch's seed names its first completion, whose prompt has another id at every visit.

With an environment turns are drawn one after another, each by a generator of its own, so that no
interleaving changes an episode.  Every turn begins with a pass over all that stands before it.

R rows of a batch   V vocabulary   T new tokens
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from groupwise.environments.conversation import Environment, Stream
from groupwise.errors import EngineError
from groupwise.models.attention import plain_attention
from groupwise.models.moe import router_coefficient
from groupwise.models.policy import Policy
from groupwise.records import Finish, Prompt, Rollout, Sampling
from groupwise.rollout.engine import (
    InProcess,
    check_request,
    completion_limit,
    fitting,
    make_rollout,
)
from groupwise.rollout.episodes import Conversations, Groups
from groupwise.rollout.stopping import Stopping

NO_IMAGES: Mapping[str, Tensor] = {}


def _kind(prompt: Prompt) -> tuple[int, bool]:
    """What prompts of a batch share: their length, and whether they have images."""
    return prompt.tokens.size, prompt.images is not None


class TransformersEngine(InProcess):
    """Implements `engine.Engine`, without random streams per completion: the same seed, prompts,
    order and `max_rows` give the same completions."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int = 256,
        environment: Environment | None = None,
    ) -> None:
        """environment: that answers the turns of completions; the caller closes it."""
        if max_rows < 1:
            raise EngineError(f"max_rows must be at least 1, got {max_rows}")
        self.policy = policy
        self.max_rows = max_rows
        self.environment = environment

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        """Sample by transformers' `generate`, shortest prompts first; a batch holds prompts of one
        length, so none is padded.
        """
        check_request(self.policy, prompts, group_size, sampling)
        if self.environment is not None:
            yield from self._episodes(prompts, group_size, sampling, seed)
            return
        rows = [
            (prompt, index) for prompt in sorted(prompts, key=_kind) for index in range(group_size)
        ]
        groups = Groups(group_size)
        for _, of_one_kind in itertools.groupby(rows, lambda row: _kind(row[0])):
            alike = list(of_one_kind)
            for first in range(0, len(alike), self.max_rows):
                for rollout in self._batch(alike[first : first + self.max_rows], sampling, seed):
                    yield from groups.add(rollout)

    def _limit(self, prompt: Prompt, sampling: Sampling) -> int:
        """Most tokens of a prompt's completions."""
        return completion_limit(self.policy, prompt, sampling)

    def _watch(self, rows: list[tuple[Prompt, int]], sampling: Sampling, seed: int) -> ScoreWatch:
        """The last of a batch's logits processors."""
        return ScoreWatch()

    def _batch(
        self, rows: list[tuple[Prompt, int]], sampling: Sampling, seed: int
    ) -> list[Rollout]:
        policy, (first, place) = self.policy, rows[0]
        ids = torch.from_numpy(np.stack([prompt.tokens for prompt, _ in rows])).to(policy.device)
        limits, watch = (
            [self._limit(prompt, sampling) for prompt, _ in rows],
            self._watch(rows, sampling, seed),
        )
        images = {}
        if first.images is not None:
            prompts = [prompt.images for prompt, _ in rows]
            images = policy.vision.arguments(policy, ids, prompts)
        seeded = f"{seed}/{first.id}/{place}"
        drawn = self._draw(ids, limits, sampling, seeded, watch=watch, images=images)
        return [
            make_rollout(
                policy,
                prompt,
                index,
                drawn.tokens[r],
                drawn.logp[r],
                drawn.finish[r],
                sampling,
                version=self.version,
                support=drawn.support[r] if sampling.restricts else None,
            )
            for r, (prompt, index) in enumerate(rows)
        ]

    def _episodes(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        """Turn by turn: whichever conversation has been answered is next."""
        policy, groups = self.policy, Groups(group_size)
        streams = [
            Stream(prompt, index, completion_limit(policy, prompt, sampling))
            for prompt in prompts
            for index in range(group_size)
        ]
        with Conversations(
            policy, self.environment, sampling, seed, streams, rows=self.max_rows
        ) as conversations:
            while conversations.unfinished:
                conversations.begin()
                for stream, rollout in conversations.heard(self.version, wait=True):
                    if rollout is not None:
                        yield from groups.add(rollout)
                        continue
                    ids = torch.from_numpy(stream.ids())[None].to(policy.device)
                    drawn = self._draw(
                        ids,
                        [stream.left],
                        sampling,
                        f"{seed}/{stream.prompt.id}/{stream.index}/{stream.turn}",
                    )
                    stream.add(drawn.tokens[0], drawn.logp[0], self.version)
                    stream.support += drawn.support[0] if sampling.restricts else ()
                    conversations.turn(stream, drawn.finish[0])

    @torch.no_grad()
    def _draw(
        self,
        ids: Tensor,
        limits: list[int],
        sampling: Sampling,
        seed: str,
        watch: ScoreWatch | None = None,
        images: Mapping[str, Tensor] = NO_IMAGES,
    ) -> _Drawn:
        """What is drawn behind rows of ids (R, T), up to a limit for each.

        images: what the model takes for those of the rows' prompts.
        """
        policy, model = self.policy, cast(Any, self.policy.model)
        stopping = Stopping(policy.eos_ids, sampling.stop, policy.tokenizer)
        drawn = _Drawn(stopping, limits, watch or ScoreWatch(), truncates=sampling.restricts)
        training = [module for module in model.modules() if module.training]
        model.eval()
        # The model's generation_config must not leak in: generate() fills what a config of ours
        # leaves unset from it.
        own_config, model.generation_config = model.generation_config, GenerationConfig()
        device = policy.device
        try:
            with (
                fitting(self.max_rows),
                plain_attention(model),
                policy.precision(),
                torch.random.fork_rng([device] if device.type == "cuda" else []),
            ):
                torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    **images,
                    **({"output_router_logits": False} if router_coefficient(policy) else {}),
                    generation_config=_explicit(sampling, max(limits), policy.pad_id),
                    logits_processor=LogitsProcessorList(
                        [_KnownTokens(policy.vocabulary), *_warpers(sampling), drawn.watch]
                    ),
                    stopping_criteria=StoppingCriteriaList([drawn]),
                )
        finally:
            model.generation_config = own_config
            for module in training:
                module.training = True
        return drawn


class ScoreWatch(LogitsProcessor):
    """The last of the logits processors: it notes what is drawn from."""

    scores_RV: Tensor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores as they are."""
        self.scores_RV = scores
        return scores


class _Drawn(StoppingCriteria):
    """What a call of `generate` draws, noted token by token: of a step's scores (R, V) only what
    was drawn is kept.
    """

    def __init__(
        self, stopping: Stopping, limits: list[int], watch: ScoreWatch, *, truncates: bool
    ) -> None:
        """limits: most tokens of each row.   truncates: note which ids could have been drawn."""
        self._stopping, self._limits, self._truncates = stopping, limits, truncates
        self.tokens: list[list[int]] = [[] for _ in limits]
        self.logp: list[list[float]] = [[] for _ in limits]
        """The log-prob of each token, nats."""
        self.support: list[tuple[np.ndarray, ...]] = [() for _ in limits]
        """For each token the ids that it could have been, where sampling truncates."""
        self.finish: dict[int, Finish] = {}
        """Why each row ended; it draws no further token."""
        self.watch = watch

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """True for rows that have ended.  The batch continues until all have."""
        scores_RV, token_R = self.watch.scores_RV, input_ids[:, -1]
        # Greedy scores are unprocessed but for the vocabulary, so this is the log-probability at
        # temperature 1.
        chosen_R = scores_RV.gather(1, token_R[:, None])[:, 0]
        logp_R = (chosen_R - scores_RV.logsumexp(1)).tolist()
        for r, token in enumerate(token_R.tolist()):
            if r in self.finish:
                continue
            self.tokens[r].append(token)
            self.logp[r].append(logp_R[r])
            if self._truncates:
                self.support[r] += (scores_RV[r].isfinite().nonzero()[:, 0].cpu().numpy(),)
            finish = self._stopping.finish(self.tokens[r], self._limits[r])
            if finish is not None:
                self.finish[r] = finish
        return torch.tensor(
            [r in self.finish for r in range(len(self._limits))], device=input_ids.device
        )


def _warpers(sampling: Sampling) -> list[LogitsProcessor]:
    """transformers' own, in its order: what comes behind them sees the distribution that is drawn
    from.
    """
    if sampling.greedy:
        return []
    return [
        *(
            [TemperatureLogitsWarper(float(sampling.temperature))]
            if sampling.temperature != 1.0
            else []
        ),
        *([TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
        *([TopPLogitsWarper(float(sampling.top_p))] if sampling.top_p < 1.0 else []),
        *([MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []),
    ]


def _explicit(sampling: Sampling, most: int, pad_id: int) -> GenerationConfig:
    """Every setting that changes what is drawn, said in full; the warpers are ours to give."""
    return GenerationConfig(
        do_sample=not sampling.greedy,
        **({} if sampling.greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        max_new_tokens=most,
        num_beams=1,
        num_return_sequences=1,
        repetition_penalty=1.0,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=pad_id,
    )


class _KnownTokens(LogitsProcessor):
    """Rules out ids that belong to no token."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores with -inf from `size` on."""
        if scores.shape[1] == self.size:
            return scores
        return torch.cat(
            [scores[:, : self.size], torch.full_like(scores[:, self.size :], -torch.inf)], 1
        )
