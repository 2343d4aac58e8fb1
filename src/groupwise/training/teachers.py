"""Teachers: another model, here or on servers, or the policy itself with a hint or as a moving
average.

A teacher reads the policy's own packed stream, so a prompt is computed once for it too.  With a
hint its prompts are longer: the same completions are then packed again behind them, and its rows
are put into the order of the policy's.

M trained positions of a batch   E the teacher's width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.algorithms.parts import called, checked_loss, fact, name_of
from groupwise.algorithms.table import Algorithm
from groupwise.data.packing import pack, unpack
from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.models.fused import fused_modules
from groupwise.models.passes import forward
from groupwise.models.policy import Policy
from groupwise.models.recurrence import PLACE
from groupwise.ops.distillation import head_divergence
from groupwise.protocols import TokenScorer
from groupwise.records import Batch, Demonstration, Prompt, Rollout, RolloutGroup, Sample, stretches
from groupwise.training.passes import score
from groupwise.training.samples import POLICY, WEIGHT

UNBOUNDED = 1 << 60
"""Positions: everything in one batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demonstrations:
    """Rows that are mixed into every optimizer step."""

    rows: Sequence[Demonstration]
    count: int
    """Of a step."""
    lm: float
    """Weight of their language-model loss, a mean over their tokens."""
    divergence: float
    """Weight of the distance from the teacher on them, a mean over their tokens."""
    seed: int = 0

    def of(self, update: int) -> list[Sample]:
        """Those of an optimizer step, by its number: a seeded order, another one in each pass over
        the rows.
        """
        places = range(update * self.count, (update + 1) * self.count)
        chosen = [
            self.rows[self._order(place // len(self.rows))[place % len(self.rows)]]
            for place in places
        ]
        weight = 1.0 / sum(row.completion.size for row in chosen)
        samples = []
        for i, row in enumerate(chosen):
            ones = weight * np.ones(row.completion.size)
            samples.append(
                Sample(
                    group=f"shown/{update}/{i}",
                    index=-1,
                    prompt=row.prompt,
                    completion=row.completion,
                    weight=ones,
                    extra={
                        f"{WEIGHT}demonstration_loss": self.lm * ones,
                        f"{WEIGHT}teacher_divergence": self.divergence * ones,
                    },
                )
            )
        return samples

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Teacher:
    """A teacher: its model or servers, its hint, and how it follows the policy."""

    policy: Policy
    hint: Callable[[Prompt], np.ndarray] | None = None
    """Token ids that only the teacher reads, before a prompt."""
    ema: float = 0.0
    """Share of the policy that moves into the teacher after every step."""
    demonstrations: Demonstrations | None = None
    servers: TokenScorer | None = None
    """Servers that give the teacher's log-probs of the drawn tokens; `policy` is then the one that
    learns.
    """
    hints: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The hint's ids by group, which it reads before the policy's prompts."""

    def with_hints(self, groups: Sequence[RolloutGroup]) -> Teacher:
        """The teacher as it reads these groups.  Raises ConfigError if a hint leaves no room for a
        completion.
        """
        if self.hint is None:
            return self
        hints = {}
        for group in groups:
            prompt = group.prompt
            hints[prompt.id] = self.hint(prompt)
            longest = hints[prompt.id].size + max(map(_longest, group.rollouts))
            if longest > self.policy.context:
                raise ConfigError(
                    f"teacher.hint: with it {prompt.place} and its longest completion have"
                    f" {longest} tokens, more than the teacher's context of {self.policy.context}:"
                    " shorten it, or lower rollout.max_new_tokens"
                )
        return replace(self, hints=hints)

    def read(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the prompts that the teacher reads."""
        return [
            _behind(self.hints[sample.group], sample) if sample.group in self.hints else sample
            for sample in samples
        ]

    def logp(self, samples: Sequence[Sample], max_tokens_per_microbatch: int) -> list[np.ndarray]:
        """Per sample (n,): what it gives to the tokens that were drawn."""
        if self.servers is not None:
            return scored_by_servers(self.servers, self.read(samples))
        return score(
            self.policy, self.read(samples), max_tokens_per_microbatch=max_tokens_per_microbatch
        ).logp

    @torch.no_grad()
    def states(self, batch: Batch, samples: Sequence[Sample]) -> Tensor:
        """Its hidden states (M, E) at the trained rows of a batch, which was packed from `samples`."""
        policy, own = (
            self.policy,
            list(dict.fromkeys(index for index in batch.samples if index >= 0)),
        )
        # Frequencies that depend on the length are the policy's own affair: it may share prompts
        # where the teacher may not.
        if not own or not (
            policy.switches or any(samples[index].group in self.hints for index in own)
        ):
            with self._fused():
                return forward(policy, batch).hidden_PD[batch.trained_M]
        hinted = self.read([samples[index] for index in own])
        (other,) = pack(
            hinted,
            UNBOUNDED,
            share=policy.attention == "shared",
            alike=policy.alike,
            device=policy.device,
            dtype=batch.weight_P.dtype,
        )
        with self._fused():
            hidden_PE = forward(policy, other).hidden_PD
        here, there = (torch.arange(one.layout.total) for one in (batch, other))
        places = dict(unpack(other, there, hinted))
        row_P = np.zeros(batch.layout.total, np.int64)
        for place, (index, position_n) in enumerate(unpack(batch, here, samples)):
            trained_n = samples[index].weight != 0
            row_P[position_n[trained_n]] = places[place][trained_n]
        return hidden_PE[torch.from_numpy(row_P).to(policy.device)[batch.trained_M]]

    def _fused(self) -> Any:
        model = self.policy.model
        # Then it is the policy, which is being trained; recurrent layers always have a `forward` of
        # their own.
        busy = any(
            "forward" in vars(module) and not hasattr(module, PLACE) for module in model.modules()
        )
        return nullcontext() if busy else fused_modules(model, keep=not self.policy.sharded)

    def divergence(
        self,
        policy: Policy,
        batch: Batch,
        samples: Sequence[Sample],
        hidden_MD: Tensor,
        function: Callable[..., Tensor],
    ) -> Tensor:
        """How far the policy's next token is from the teacher's at a batch's trained rows (M,),
        differentiable with respect to the policy's hidden states and head.   samples: that the
        batch was packed from."""

        def checked(log_q_CV: Tensor, log_p_CV: Tensor) -> Tensor:
            return checked_loss(
                "divergence",
                function,
                called("divergence", function, log_q_CV, log_p_CV),
                log_q_CV[:, 0],
            )

        with policy.precision():
            return head_divergence(
                hidden_MD,
                policy.head,
                self.states(batch, samples),
                self.policy.head,
                batch.temperature_P[batch.trained_M],
                checked,
            )


def _longest(rollout: Rollout) -> int:
    """Tokens of the longest text that a part of a completion ends."""
    branches = () if rollout.episode is None else rollout.episode.branches
    return max(
        context.size + end - begin
        for begin, end, context in stretches(len(rollout), rollout.prompt.tokens, branches)
    )


def _behind(hint: np.ndarray, sample: Sample) -> Sample:
    """The sample with a hint before its prompt, and before the context of each branch."""
    branches = tuple(
        replace(branch, context=np.concatenate([hint, branch.context]))
        for branch in sample.branches
    )
    return replace(sample, prompt=np.concatenate([hint, sample.prompt]), branches=branches)


def scored_by_servers(servers: TokenScorer, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Per sample (n,): what servers give to its completion's tokens.  Of several processes each
    asks for its share.

    Raises PeerError, EngineError.
    """
    assert all(sample.temperature == 1.0 and sample.support is None for sample in samples), (
        "servers score raw logits alone"
    )

    texts = [
        (context, sample.completion[begin:end])
        for sample in samples
        for begin, end, context in stretches(sample.completion.size, sample.prompt, sample.branches)
    ]

    def own() -> list[tuple[int, np.ndarray]]:
        mine = comm.share(list(enumerate(texts)))
        logp = servers.logp([text for _, text in mine])
        return [(place, values) for (place, _), values in zip(mine, logp, strict=True)]

    by_place = dict(comm.together(own))
    logp = np.concatenate([by_place[place] for place in range(len(texts))])
    return np.split(logp, np.cumsum([sample.completion.size for sample in samples])[:-1])


def with_demonstrations(
    algorithm: Algorithm, samples: Sequence[Sample], shown: Sequence[Sample]
) -> list[Sample]:
    """Samples of rollouts and of demonstrations, with a column of weights for each term of the
    loss.
    """
    if not shown:
        return list(samples)
    terms = {
        WEIGHT + name_of(term): not fact(term, "of_demonstrations") for term in algorithm.extra
    }
    terms[WEIGHT + POLICY] = True
    drawn = [
        replace(
            sample,
            extra={name: sample.weight * of_rollouts for name, of_rollouts in terms.items()}
            | dict(sample.extra),
        )
        for sample in samples
    ]
    names = {*terms, *(name for sample in samples for name in sample.extra)}
    # What a critic should have said of a demonstration is not known.
    nothing = {name: np.nan if name == "return" else 0.0 for name in names}
    return [*drawn, *(_with_columns(sample, nothing) for sample in shown)]


def _with_columns(sample: Sample, numbers: Mapping[str, float]) -> Sample:
    """The sample with these columns and no others: its own numbers, or one for all tokens."""
    return replace(
        sample,
        extra={
            name: sample.extra.get(name, np.full(sample.weight.size, n))
            for name, n in numbers.items()
        },
    )
