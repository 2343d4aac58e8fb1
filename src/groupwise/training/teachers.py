"""Teachers: another model, here or on servers, or the policy before its first step with a hint.

A teacher reads the policy's own packed stream, so a prompt is computed once for it too.  With a
hint its prompts are longer: the same completions are then packed again behind them, and its rows
are put into the order of the policy's.

P positions of a batch   M trained ones   E the teacher's width   n tokens of a completion
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.data.packing import unpack
from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.models.passes import BatchPass, packed_for
from groupwise.models.policy import Policy
from groupwise.models.recurrence import PLACE
from groupwise.ops.distillation import head_divergence
from groupwise.ops.operations import operations
from groupwise.protocols import TokenScorer
from groupwise.records import Batch, Prompt, Rollout, RolloutGroup, Sample, context_spans
from groupwise.training.passes import score

UNBOUNDED = 1 << 60
"""Positions: everything in one batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Teacher:
    """A teacher: its model or servers, and its hint."""

    policy: Policy
    hint: Callable[[Prompt], np.ndarray] | None = None
    """Token ids that only the teacher reads, before a prompt."""
    servers: TokenScorer | None = None
    """Servers that give the teacher's log-probs of the drawn tokens; `policy` is then the one that
    learns.
    """
    hints: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The hint's ids by group, which the teacher reads before the policy's prompts."""

    def with_hints(self, groups: Sequence[RolloutGroup]) -> Teacher:
        """Return the teacher as it reads these groups.

        Raises ConfigError if a hint leaves no room for a completion.
        """
        if self.hint is None:
            return self
        hints = {}
        for group in groups:
            prompt = group.prompt
            hints[prompt.id] = self.hint(prompt)
            longest = hints[prompt.id].size + max(map(_longest_sequence, group.rollouts))
            if longest > self.policy.context:
                raise ConfigError(
                    f"teacher.hint: with it {prompt.place} and its longest completion have"
                    f" {longest} tokens, more than the teacher's context of {self.policy.context}:"
                    " shorten it, or lower rollout.max_new_tokens"
                )
        return replace(self, hints=hints)

    def read(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the prompts that the teacher reads."""
        hinted = []
        for sample in samples:
            if sample.group in self.hints:
                hinted.append(_behind(self.hints[sample.group], sample))
            else:
                hinted.append(sample)
        return hinted

    def logp(self, samples: Sequence[Sample], max_tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the teacher's log-probs of the tokens that were drawn: per sample (n,), nats."""
        hinted = self.read(samples)
        if self.servers is not None:
            return scored_by_servers(self.servers, hinted)
        scores = score(self.policy, hinted, max_tokens_per_microbatch=max_tokens_per_microbatch)
        return scores.logp

    @torch.no_grad()
    def states(self, batch: Batch, samples: Sequence[Sample]) -> Tensor:
        """Return the teacher's hidden states (M, E) at the trained rows of a batch, which was
        packed from `samples`.
        """
        indices = list(dict.fromkeys(index for index in batch.samples if index >= 0))
        hinted = any(samples[index].group in self.hints for index in indices)
        # Frequencies that depend on the length are the policy's own affair: it may share prompts
        # where the teacher may not.
        if not indices or not (hinted or self.policy.switches):
            with self._fused():
                return BatchPass(self.policy, batch).hidden_MD
        read = self.read([samples[index] for index in indices])
        (hinted_batch,) = packed_for(self.policy, read, UNBOUNDED)
        teacher_rows = predicting_rows(hinted_batch, read)
        row_P = np.zeros(batch.layout.total, np.int64)
        for index, row_n in predicting_rows(batch, samples).items():
            trained_n = samples[index].weight != 0
            row_P[row_n[trained_n]] = teacher_rows[indices.index(index)][trained_n]
        row_M = torch.from_numpy(row_P).to(self.policy.device)[batch.trained_M]
        with self._fused():
            return BatchPass(self.policy, hinted_batch).outputs.hidden_PD[row_M]

    def _fused(self) -> Any:
        """Return the region in which the teacher's modules compute fused."""
        model = self.policy.model
        for module in model.modules():
            # A module with a `forward` of its own is that of the policy, which is being trained;
            # recurrent layers always have one.
            if "forward" in vars(module) and not hasattr(module, PLACE):
                return nullcontext()
        return operations().fused_modules(model, keep=not self.policy.sharded)

    def divergence(
        self,
        policy: Policy,
        batch: Batch,
        samples: Sequence[Sample],
        hidden_MD: Tensor,
        function: Callable[..., Tensor],
    ) -> Tensor:
        """Return how far the policy's next token is from the teacher's at a batch's trained rows
        (M,), differentiable with respect to the policy's hidden states and head.

        samples: those that the batch was packed from.
        function: (log q (C, V), log p (C, V)) -> divergence of each row (C,), nats.
        """
        with policy.precision():
            return head_divergence(
                hidden_MD,
                policy.head,
                self.states(batch, samples),
                self.policy.head,
                batch.temperature_P[batch.trained_M],
                function,
            )


def predicting_rows(batch: Batch, samples: Sequence[Sample]) -> dict[int, np.ndarray]:
    """Return for each sample of a batch the rows (n,) that predict the tokens of its completion."""
    return dict(unpack(batch, torch.arange(batch.layout.total), samples))


def _longest_sequence(rollout: Rollout) -> int:
    """Return the tokens of the longest text that a part of a completion ends."""
    branches = () if rollout.episode is None else rollout.episode.branches
    spans = context_spans(len(rollout), rollout.prompt.tokens, branches)
    return max(context.size + end - begin for begin, end, context in spans)


def _behind(hint: np.ndarray, sample: Sample) -> Sample:
    """Return the sample with a hint before its prompt, and before the context of each branch."""
    branches = []
    for branch in sample.branches:
        branches.append(replace(branch, context=np.concatenate([hint, branch.context])))
    prompt = np.concatenate([hint, sample.prompt])
    return replace(sample, prompt=prompt, branches=tuple(branches))


def scored_by_servers(servers: TokenScorer, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Return what servers give to each completion's tokens: per sample (n,), nats.

    Of several processes each asks for its share.  Raises PeerError, EngineError.
    """
    assert all(sample.temperature == 1.0 and sample.support is None for sample in samples), (
        "servers score raw logits alone"
    )
    texts = []
    for sample in samples:
        spans = context_spans(sample.completion.size, sample.prompt, sample.branches)
        for begin, end, context in spans:
            texts.append((context, sample.completion[begin:end]))

    def scored() -> list[tuple[int, np.ndarray]]:
        places = comm.share(range(len(texts)))
        logp = servers.logp([texts[place] for place in places])
        return list(zip(places, logp, strict=True))

    by_place = dict(comm.together(scored))
    logp = np.concatenate([by_place[place] for place in range(len(texts))])
    return np.split(logp, np.cumsum([sample.completion.size for sample in samples])[:-1])
