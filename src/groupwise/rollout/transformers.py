"""The reference engine: transformers' own `generate`, with its own attention and its own random numbers.

Slow and independent: it shares no line of the native engine's prefill, attention, cache or sampling.  Only prompts of one length
are in a batch, so nothing is padded: not every family gives a padded row the numbers that it has alone.  Completions come from a
seeded generator of torch, so they depend on what else is in the batch: there are no random streams per completion.  A batch's seed
names its first completion, whose prompt has another id at every visit.

With a world turns are drawn one after another, each by a generator of its own, so that no interleaving changes an episode.  Keys
and values are kept from turn to turn where all layers keep all of them; where a layer forgets (sliding windows) or keeps something
else, every turn begins with a pass over all that stands before it.

R rows of a batch   V vocabulary   T new tokens
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer

from groupwise.environments.conversation import World
from groupwise.errors import EngineError
from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.records import Finish, Prompt, Rollout, Sampling
from groupwise.rollout.engine import InProcess, check_request, completion_limit, make_rollout
from groupwise.rollout.episodes import CONVERSATIONS_PER_ROW, Completion, Conversations, await_one
from groupwise.rollout.stopping import Stopping


class TransformersEngine(InProcess):
    """Implements `engine.Engine`, without random streams per completion: the same seed, prompts, order and `max_rows` give the
    same completions."""

    def __init__(
        self, policy: Policy, *, max_rows: int = 256, keep_special_tokens: bool = False, world: World | None = None
    ) -> None:
        """world: that answers the turns of completions; the caller closes it."""
        if max_rows < 1:
            raise EngineError(f"max_rows must be at least 1, got {max_rows}")
        self.policy = policy
        self.max_rows = max_rows
        self.keep_special_tokens = keep_special_tokens
        self.world = world

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        """Sample by transformers' `generate`, shortest prompts first; a batch holds prompts of one length, so none is padded."""
        check_request(self.policy, prompts, group_size, sampling)
        if self.world is not None:
            yield from self._episodes(prompts, group_size, sampling, seed)
            return
        rows = [(prompt, index) for prompt in sorted(prompts, key=lambda prompt: prompt.tokens.size) for index in range(group_size)]
        group: list[Rollout] = []
        while rows:
            batch = rows[: self._fitting(rows, sampling)]
            first, index = batch[0]
            for rollout in self._batch(batch, sampling, f"{seed}/{first.id}/{index}"):
                group.append(rollout)
                if len(group) == group_size:
                    yield tuple(group)
                    group = []
            rows = rows[len(batch) :]

    def _fitting(self, rows: list[tuple[Prompt, int]], sampling: Sampling) -> int:
        """How many of the first rows make a batch: those whose prompts are as long as the first."""
        length = rows[0][0].tokens.size
        alike = itertools.takewhile(lambda row: row[0].tokens.size == length, rows[: self.max_rows])
        return sum(1 for _ in alike)

    def _batch(self, rows: list[tuple[Prompt, int]], sampling: Sampling, seed: str) -> list[Rollout]:
        policy = self.policy
        ids = torch.from_numpy(np.stack([prompt.tokens for prompt, _ in rows])).to(policy.device)
        limits = [completion_limit(policy, prompt, sampling) for prompt, _ in rows]
        drawn = self._draw(ids, limits, sampling, seed)
        return [
            make_rollout(
                policy,
                prompt,
                index,
                drawn.tokens(r),
                drawn.logp(r),
                drawn.ended[r][1],
                sampling,
                version=self.version,
                support=drawn.support(r) if sampling.truncates else None,
                keep_special_tokens=self.keep_special_tokens,
            )
            for r, (prompt, index) in enumerate(rows)
        ]

    def _episodes(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> Iterator[tuple[Rollout, ...]]:
        """Turn by turn: whichever conversation has been answered is next."""
        unbegun = deque(
            Completion(prompt, index, completion_limit(self.policy, prompt, sampling))
            for prompt in prompts
            for index in range(group_size)
        )
        listening: list[Completion] = []
        groups: dict[str, dict[int, Rollout]] = {prompt.id: {} for prompt in prompts}
        caches: dict[Completion, tuple[np.ndarray | None, Any]] = {}
        with Conversations(self.policy, self.world, sampling, seed, keep_special_tokens=self.keep_special_tokens) as conversations:
            while unbegun or listening:
                while unbegun and conversations.open < CONVERSATIONS_PER_ROW * self.max_rows:
                    conversations.begin(one := unbegun.popleft())
                    listening.append(one)
                await_one(listening)
                one = next(one for one in listening if one.reply is not None and one.reply.done())
                listening.remove(one)
                rollout = conversations.hear(one, self.version)
                if rollout is None:
                    context, cache = caches.pop(one, (one.context, None))
                    drawn = self._turn(one, cache if context is one.context else None, sampling, seed)
                    if (kept := _kept(drawn.cache)) is not None:
                        caches[one] = one.context, kept
                    conversations.turn(one, drawn.ended[0][1])
                    listening.append(one)
                    continue
                caches.pop(one, None)
                group = groups[one.prompt.id]
                group[one.index] = rollout
                if len(group) == group_size:
                    yield tuple(group[index] for index in range(group_size))

    def _turn(self, one: Completion, cache: Any, sampling: Sampling, seed: int) -> _Drawn:
        """Draw the next turn of a conversation.   cache: keys and values of what stands before it, all or the first of them."""
        ids = torch.from_numpy(one.ids())[None].to(self.policy.device)
        drawn = self._draw(ids, [one.left], sampling, f"{seed}/{one.prompt.id}/{one.index}/{one.turn}", cache)
        one.add(drawn.tokens(0), drawn.logp(0), self.version)
        if sampling.truncates:
            one.support += drawn.support(0)
        return drawn

    @torch.no_grad()
    def _draw(self, ids: Tensor, limits: list[int], sampling: Sampling, seed: str, cache: Any = None) -> _Drawn:
        """What is drawn behind rows of ids (R, T), up to a limit for each.   cache: keys and values of their first tokens."""
        policy, model = self.policy, cast(Any, self.policy.model)
        stopping = Stopping(policy.eos_ids, sampling.stop, policy.tokenizer)
        ends = _Ends(stopping, limits, ids.shape[1])
        training = [module for module in model.modules() if module.training]
        model.eval()
        # The model's generation_config must not leak in: generate() fills what a config of ours leaves unset from it.
        own_config, model.generation_config = model.generation_config, GenerationConfig()
        device = policy.device
        try:
            with plain_attention(model), policy.precision(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
                out: Any = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    **({"output_router_logits": False} if policy.router_coefficient else {}),
                    **({} if cache is None else {"past_key_values": cache}),
                    generation_config=_explicit(sampling, max(limits), policy.pad_id),
                    logits_processor=LogitsProcessorList([_Vocabulary(policy.vocabulary)]),
                    stopping_criteria=StoppingCriteriaList([ends]),
                )
        finally:
            model.generation_config = own_config
            for module in training:
                module.training = True
        # Greedy scores are unprocessed but for the vocabulary, so this is the log-probability at temperature 1.
        logp = [score.to(torch.promote_types(score.dtype, torch.float32)).log_softmax(-1) for score in out.scores]
        return _Drawn(out.sequences[:, ids.shape[1] :].cpu().tolist(), logp, ends.ended, out.past_key_values)


class _Drawn:
    """What a call of `generate` has drawn."""

    def __init__(self, rows: list[list[int]], logp: list[Tensor], ended: dict[int, tuple[int, Finish]], cache: Any) -> None:
        """logp: (R, V) of each token.   ended: where and why each row ended; what it holds behind is nobody's."""
        self._rows, self._logp, self.ended, self.cache = rows, logp, ended, cache

    def tokens(self, r: int) -> list[int]:
        """Those of a row."""
        return self._rows[r][: self.ended[r][0]]

    def logp(self, r: int) -> list[float]:
        """Of each of its tokens."""
        return [float(self._logp[t][r, token]) for t, token in enumerate(self.tokens(r))]

    def support(self, r: int) -> tuple[np.ndarray, ...]:
        """The ids that each of its tokens could have been."""
        return tuple(self._logp[t][r].isfinite().nonzero()[:, 0].cpu().numpy() for t in range(self.ended[r][0]))


def _kept(cache: Any) -> Any:
    """A cache that the next turn can go on with: one that forgets nothing."""
    plain = type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)
    return cache if plain else None


def _explicit(sampling: Sampling, most: int, pad_id: int) -> GenerationConfig:
    """Every setting that changes what is drawn, said in full."""
    warpers: dict[str, Any] = {"do_sample": not sampling.greedy}
    if not sampling.greedy:
        warpers |= {"temperature": float(sampling.temperature), "top_k": sampling.top_k, "top_p": float(sampling.top_p)}
        warpers["min_p"] = sampling.min_p or None
    return GenerationConfig(
        **warpers,
        max_new_tokens=most,
        num_beams=1,
        num_return_sequences=1,
        repetition_penalty=1.0,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=pad_id,
        return_dict_in_generate=True,
        output_scores=True,
    )


class _Vocabulary(LogitsProcessor):
    """Rules out ids that belong to no token."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores with -inf from `size` on."""
        return torch.cat([scores[:, : self.size], torch.full_like(scores[:, self.size :], -torch.inf)], 1)


class _Ends(StoppingCriteria):
    """Notes where and why each row ended; the batch continues until all have."""

    def __init__(self, stopping: Stopping, limits: list[int], prompt: int) -> None:
        self.stopping, self.limits, self.prompt = stopping, limits, prompt
        self.ended: dict[int, tuple[int, Finish]] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """True for rows that have ended."""
        for r, tokens in enumerate(input_ids[:, self.prompt :].tolist()):
            if r not in self.ended:
                finish = self.stopping.finish(tokens, self.limits[r])
                if finish is not None:
                    self.ended[r] = (len(tokens), finish)
        return torch.tensor([r in self.ended for r in range(input_ids.shape[0])], device=input_ids.device)
