"""The reference engine: transformers' own `generate`, with its own attention and its own random numbers.

Slow and independent: it shares no line of the native engine's prefill, attention, cache or sampling.  Only prompts of one length
are in a batch, so nothing is padded: not every family gives a padded row the numbers that it has alone.  Completions come from a
seeded generator of torch, so they depend on what else is in the batch: there are no random streams per completion.

R rows of a batch   V vocabulary   T new tokens
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from groupwise.errors import EngineError
from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.records import Finish, Prompt, Rollout, Sampling
from groupwise.rollout.engine import InProcess, check_request, completion_limit, make_rollout
from groupwise.rollout.stopping import Stopping


class TransformersEngine(InProcess):
    """Implements `engine.Engine`, without random streams per completion: the same seed, prompts, order and `max_rows` give the
    same completions."""

    def __init__(self, policy: Policy, *, max_rows: int = 256, keep_special_tokens: bool = False) -> None:
        if max_rows < 1:
            raise EngineError(f"max_rows must be at least 1, got {max_rows}")
        self.policy = policy
        self.max_rows = max_rows
        self.keep_special_tokens = keep_special_tokens

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        """See `engine.Engine`."""
        check_request(self.policy, prompts, group_size, sampling)
        rows = [(prompt, index) for prompt in sorted(prompts, key=lambda prompt: prompt.tokens.size) for index in range(group_size)]
        group: list[Rollout] = []
        while rows:
            batch = rows[: self._fitting(rows, sampling)]
            for rollout in self._batch(batch, sampling, f"{seed}/{len(rows)}"):
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

    @torch.no_grad()
    def _batch(self, rows: list[tuple[Prompt, int]], sampling: Sampling, seed: str) -> list[Rollout]:
        policy, model = self.policy, cast(Any, self.policy.model)
        longest = rows[0][0].tokens.size
        ids = torch.from_numpy(np.stack([prompt.tokens for prompt, _ in rows])).to(policy.device)
        limits = [completion_limit(policy, prompt, sampling) for prompt, _ in rows]
        stopping = Stopping(policy.eos_ids, sampling.stop, policy.tokenizer)
        ends = _Ends(stopping, limits, longest)
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
                    generation_config=_explicit(sampling, max(limits), policy.pad_id),
                    logits_processor=LogitsProcessorList([_Vocabulary(policy.vocabulary)]),
                    stopping_criteria=StoppingCriteriaList([ends]),
                )
        finally:
            model.generation_config = own_config
            for module in training:
                module.training = True
        tokens = out.sequences[:, longest:].cpu().tolist()
        # Greedy scores are unprocessed but for the vocabulary, so this is the log-probability at temperature 1.
        logp = [score.to(torch.promote_types(score.dtype, torch.float32)).log_softmax(-1) for score in out.scores]
        rollouts = []
        for r, (prompt, index) in enumerate(rows):
            length, finish = ends.ended[r]
            support = None
            if sampling.truncates:
                support = tuple(logp[t][r].isfinite().nonzero()[:, 0].cpu().numpy() for t in range(length))
            rollouts.append(
                make_rollout(
                    policy,
                    prompt,
                    index,
                    tokens[r][:length],
                    [float(logp[t][r, tokens[r][t]]) for t in range(length)],
                    finish,
                    sampling,
                    version=self.version,
                    support=support,
                    keep_special_tokens=self.keep_special_tokens,
                )
            )
        return rollouts


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
    """Notes where and why each row ended; the batch goes on until all have."""

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
