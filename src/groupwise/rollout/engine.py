"""What a rollout engine is, and what every engine checks before it starts.

R completions decoded at the same time   T tokens of a completion
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from groupwise.errors import Diverged, EngineError, MemoryExceeded, out_of_memory
from groupwise.models import rope
from groupwise.models.policy import Policy
from groupwise.records import Episode, Finish, Prompt, Rollout, Sampling, place_of


class Engine(Protocol):
    """Draws completions from the policy's current weights.

    A completion is a function of (weights, seed, prompt, index in its group, sampling) alone in
    engines that keep random streams per completion; an engine that cannot says so.
    """

    version: int
    """Optimizer steps that the policy had taken when `send_weights` was last called; every token
    drawn carries it.
    """

    @property
    def where(self) -> str | None:
        """Where completions come from, for the plan; None: from this process."""
        ...

    @property
    def tolerance(self) -> float:
        """Mean difference of sampled and scored log-probs (nats) that this engine's rounding
        explains; infinity: nothing is watched, because the trainer's own weights sample in its own
        process."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        """Draw `group_size` completions of every prompt.

        Yields a prompt's whole group, ordered by index, as soon as the last of its completions has
        ended; prompts come in any order.  Raises EngineError for what cannot be sampled, Diverged
        if the weights give numbers that are not finite."""
        ...

    def send_weights(self, version: int) -> None:
        """Sample with the policy's newest weights from here on.

        An engine outside of this process gets them sent; one in it samples on them anyway.
        version: optimizer steps that the policy has taken.
        """
        ...

    def close(self) -> None:
        """End what the engine has started beside this process; harmless if called again."""
        ...


class InProcess:
    """What engines that sample on the trainer's own weights, in its own process, have in common."""

    version = 0
    where: str | None = None
    tolerance = math.inf
    """Nothing is watched in a step: the sampler and the trainer compute with the same weights, and
    the proof at the start compares their log-probs."""

    def send_weights(self, version: int) -> None:
        """Note the version; the weights are the trainer's own, so nothing is sent."""
        self.version = version

    def close(self) -> None:
        """Nothing was started."""


@contextmanager
def fitting(rows: int) -> Iterator[None]:
    """Sample inside.   rows: completions decoded at the same time.   Raises MemoryExceeded where
    memory runs out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise MemoryExceeded(
            f"memory does not suffice to sample {rows} completions at a time"
            f" ({(str(error).splitlines() or ['MemoryError'])[0]}); lower rollout.max_rows, or"
            " rollout.max_new_tokens"
        ) from error


def check_request(
    policy: Policy, prompts: Sequence[Prompt], group_size: int, sampling: Sampling
) -> None:
    """Raise EngineError for a request that no engine can carry out, before anything is computed."""
    if group_size < 1:
        raise EngineError(f"group_size must be at least 1, got {group_size}")
    if sampling.max_new_tokens < 1:
        raise EngineError(f"max_new_tokens must be at least 1, got {sampling.max_new_tokens}")
    if not 0.0 <= sampling.temperature < float("inf"):
        raise EngineError(
            f"temperature must be a number from 0 (greedy), got {sampling.temperature}"
        )
    if sampling.top_k < 0 or not 0.0 < sampling.top_p <= 1.0 or not 0.0 <= sampling.min_p <= 1.0:
        raise EngineError(
            "top_k must be at least 0, top_p in (0, 1] and min_p in [0, 1], "
            f"got {sampling.top_k}, {sampling.top_p}, {sampling.min_p}"
        )
    if "" in sampling.stop:
        raise EngineError("an empty stop string would end every completion at once: remove it")
    names: set[str] = set()
    for prompt in prompts:
        if prompt.tokens.size >= policy.context:
            raise EngineError(
                f"{prompt.place} has {prompt.tokens.size} tokens, but the policy's context is"
                f" {policy.context}: no room for a completion; filter or shorten the prompts"
            )
        if prompt.tokens.min() < 0 or prompt.tokens.max() >= policy.vocabulary:
            raise EngineError(
                f"{prompt.place} holds an id outside the vocabulary of {policy.vocabulary} tokens:"
                f" {prompt.tokens.min()} .. {prompt.tokens.max()}; it was encoded with another"
                " tokenizer"
            )
        if prompt.id in names:
            raise EngineError(
                f"two prompts have the id {prompt.id!r}: their random streams would be the same;"
                " ids must differ"
            )
        names.add(prompt.id)


def completion_limit(policy: Policy, prompt: Prompt, sampling: Sampling) -> int:
    """Longest completion of a prompt in tokens: `max_new_tokens`, or what the context leaves, or
    the frequencies of rotary embeddings that change with the length of a sequence
    (`rope.remaining`)."""
    return min(sampling.max_new_tokens, sequence_room(policy, prompt.tokens.size))


def sequence_room(policy: Policy, tokens: int) -> int:
    """Most tokens that can be drawn behind so many; below 1 where there is no room."""
    most, room = policy.context - tokens, rope.remaining(policy.switches, tokens)
    return most if room is None else min(most, room)


def make_rollout(
    policy: Policy,
    prompt: Prompt,
    index: int,
    tokens: Sequence[int],
    logp: Sequence[float] | np.ndarray,
    finish: Finish,
    sampling: Sampling,
    *,
    version: int | np.ndarray,
    support: tuple[np.ndarray, ...] | None = None,
    trained: np.ndarray | None = None,
    episode: Episode | None = None,
) -> Rollout:
    """The record of an ended completion.  version: of all its tokens, or of each.   trained: see
    `Rollout`.

    Raises Diverged if a log-probability is not finite.
    """
    behavior_logp = np.asarray(
        logp, dtype=np.float64 if "float64" in str(policy.dtype) else np.float32
    )
    if not np.isfinite(behavior_logp).all():
        raise Diverged(
            f"the policy's logits for completion {place_of(prompt.id, index)} are not finite (token"
            f" {int(np.argmin(np.isfinite(behavior_logp)))}): its weights have diverged; go back to"
            " an earlier checkpoint"
        )
    ids = np.array(tokens, dtype=np.int64)
    return Rollout(
        prompt=prompt,
        index=index,
        tokens=ids,
        behavior_logp=behavior_logp,
        finish=finish,
        eos_ids=policy.eos_ids,
        sampling=sampling,
        text=str(policy.tokenizer.decode(ids, skip_special_tokens=True)),
        version=np.full(ids.size, version, dtype=np.int64),
        support=support,
        trained=trained,  # type: ignore[arg-type]
        episode=episode,
    )
