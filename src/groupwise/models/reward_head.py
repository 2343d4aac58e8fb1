"""Score heads: a backbone with one number per token, which is what reward models and process reward
models are.

Such a model is an ordinary `transformers` sequence-classification model with one label, wrapped in
a `Policy` like any other: its backbone runs packed streams with shared prompts, and `score_tokens`
reads the head after every completion token.  The score of a completion is a weighted sum of those
numbers: the one at the completion's last token (`last`, what transformers itself computes), their
mean (`mean`), or their sum (`sum`); the parts of the latter two are rewards of single steps.
`steps` marks a process reward
model: its numbers mean something only where a step ends.

With `mean` the words that decide count for less the longer the answer is; with `sum` as much
everywhere, as in a linear model on counts, and length pays where the head's number is above 0 on
average.  The sum is divided by a constant (as Dr. GRPO, 2503.20783, divides a loss), `SUM_UNIT`, so
that a new head's scores begin near 0 and grow as the pairs ask for it.

Reading after a token is one row later than predicting it.  `readout` therefore adds one target that
nothing is asked of: the completion's n tokens are then all inputs, and row j + 1 of the sample is
the state after token j.

n tokens of a completion   M read positions of a packed batch   D width
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from groupwise.config.settings import ModelSettings
from groupwise.errors import ConfigError
from groupwise.models.attention import plain_attention
from groupwise.models.loading import (
    Blueprint,
    embedding_rows,
    is_scorer,
    make_policy,
    read_blueprint,
)
from groupwise.models.passes import BatchPass, packed_for, packed_pass
from groupwise.models.policy import Policy
from groupwise.records import Sample

Pooling = Literal["last", "mean", "sum", "steps"]

SUM_UNIT = 32.0
"""Tokens: a score with `sum` is what a completion of this length has with `mean`."""

PAD = "<|pad|>"
"""Added to a tokenizer whose pad token is missing or ends completions: transformers finds the last
token by looking for what is not padding, so an EOS that is also the pad would hide itself."""


def add_head(
    causal: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
    pooling: Pooling,
    seed: int,
) -> PreTrainedModel:
    """A scoring model on the backbone of a causal one, which it takes over; the head is drawn from
    `seed`, deviation 1/sqrt(D + 1).

    `tokenizer` may gain a pad token, and the embedding a row for it.  Raises ConfigError for a
    model without such a class."""
    config = copy.deepcopy(causal.config)
    config.num_labels, config.pooling = 1, pooling
    config.eos_token_id = list(eos_ids) if len(eos_ids) > 1 else eos_ids[0]
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in eos_ids:
        tokenizer.add_special_tokens({"pad_token": PAD})
        if len(tokenizer) > embedding_rows(causal):
            causal.resize_token_embeddings(len(tokenizer), mean_resizing=False)
            config.get_text_config().vocab_size = len(tokenizer)
    config.pad_token_id = tokenizer.pad_token_id
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise ConfigError(
            f"transformers has no sequence-classification model for {config.model_type!r}: {error}"
        ) from error
    setattr(model, model.base_model_prefix, causal.base_model)
    width = model.score.weight.shape[1]
    drawn_1D = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) / math.sqrt(
        width + 1
    )
    model.score = nn.Linear(width, 1, bias=False, device=causal.device, dtype=causal.dtype)
    model.score.weight.data.copy_(drawn_1D)
    return model


def make_scorer(
    blueprint: Blueprint, settings: ModelSettings, *, pooling: Pooling, seed: int = 0
) -> Policy:
    """A scoring model to train: a checkpoint that is one already continues with its own head, a
    causal one gets a new one.

    Raises ConfigError if the checkpoint pools otherwise than asked, or cannot score.
    """
    tokenizer = copy.deepcopy(blueprint.tokenizer)
    if is_scorer(blueprint.config):
        check_scorer(blueprint.config, settings.path or "the model")
        if (saved := blueprint.config.get("pooling", "last")) != pooling:
            raise ConfigError(
                f"the reward model to go on from pools {saved!r}: set reward_model.pooling: {saved}"
                f" (it is {pooling!r})"
            )
        model = blueprint.load()
    else:
        model = add_head(blueprint.load(), tokenizer, blueprint.eos_ids, pooling, seed)
    return wrap_scorer(model, tokenizer, settings)


def load_scorer(settings: ModelSettings, blueprint: Blueprint | None = None) -> Policy:
    """A trained scoring model from a folder or the hub, ours or anybody's.  Raises ConfigError,
    DataError or Diverged.
    """
    blueprint = blueprint or read_blueprint(settings)
    check_scorer(blueprint.config, str(settings.path))
    return wrap_scorer(blueprint.load(), blueprint.tokenizer, settings)


def check_scorer(config: dict[str, Any], path: str) -> None:
    """Raises ConfigError unless a checkpoint, by its config as a dictionary, gives one number per
    sequence.
    """
    if not is_scorer(config):
        raise ConfigError(
            f"{path} is not a reward model: its config names {config.get('architectures')}, not a"
            " sequence classifier"
        )
    labels = len(config.get("id2label") or {}) or int(config.get("num_labels") or 2)
    if labels != 1:
        raise ConfigError(f"{path} is a classifier with {labels} labels; a reward model has one")


def wrap_scorer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: ModelSettings | None = None,
) -> Policy:
    """A scoring model as a `Policy`.

    Models without a per-token head (encoders) are kept for `whole_scores`, one completion at a
    time.  Raises ConfigError."""
    settings = settings or ModelSettings()
    if not isinstance(getattr(model, "score", None), nn.Module):
        settings = replace(settings, attention="single")
    return make_policy(model, tokenizer, settings, scores=True)


def pool_weights(pooling: Pooling, n: int) -> np.ndarray:
    """float64 (n,): the weight of each token's number in the score of a completion of n tokens.

    >>> [pool_weights(pooling, 2).tolist() for pooling in ("mean", "last", "sum")]
    [[0.5, 0.5], [0.0, 1.0], [0.03125, 0.03125]]
    """
    if pooling in ("mean", "sum"):
        return np.full(n, 1.0 / (max(n, 1) if pooling == "mean" else SUM_UNIT))
    weights = np.zeros(n)
    weights[-1:] = 1.0
    return weights


def readout(
    group: str, prompt: np.ndarray, completion: np.ndarray, weight: np.ndarray, **extra: np.ndarray
) -> Sample:
    """A completion whose states are read: `weight` and `extra` are columns (n + 1,), row j + 1
    after token j.

    Row 0 is the state after the prompt.  Row j < n also predicts token j; row n predicts nothing
    (its target is a filler)."""
    filler = completion[-1:] if completion.size else prompt[-1:]
    return Sample(
        group=group,
        prompt=prompt,
        completion=np.concatenate([completion, filler]),
        weight=weight,
        extra=extra,
    )


def head_scores(policy: Policy, hidden_MD: Tensor) -> Tensor:
    """The head's number for each state (M,), at least float32, differentiable."""
    with policy.precision():
        head: Any = policy.model.score
        score_M = head(hidden_MD)[:, 0]
    return score_M.to(torch.promote_types(score_M.dtype, torch.float32))


def read_scores(passed: BatchPass) -> tuple[Tensor, Tensor]:
    """Return no loss, and the head's number at each trained position (M,)."""
    score_M = head_scores(passed.policy, passed.hidden_MD)
    return score_M.new_zeros(()), score_M


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A completion to score."""

    group: str
    """Answers of one group have the same prompt: it is computed once."""
    prompt: np.ndarray
    completion: np.ndarray


def score_tokens(
    policy: Policy, answers: Sequence[Answer], *, max_tokens_per_microbatch: int
) -> list[np.ndarray]:
    """The head's number after every completion token, float64 (n,) each.

    At most `max_tokens_per_microbatch` packed positions are computed at a time.
    """
    samples = [
        readout(
            answer.group,
            answer.prompt,
            answer.completion,
            np.append(0.0, np.ones(answer.completion.size)),
        )
        for answer in answers
    ]
    scores = [np.zeros(answer.completion.size) for answer in answers]
    batches = packed_for(policy, samples, max_tokens_per_microbatch)
    _, columns = packed_pass(policy, read_scores, batches).read(samples)
    for index, score_n in columns:
        scores[index] = score_n[1:].astype(np.float64)
    return scores


@torch.no_grad()
def whole_scores(policy: Policy, answers: Sequence[Answer]) -> list[float]:
    """One score per answer by the model's own forward pass, one at a time: for models that have no
    per-token head.
    """
    ids = (np.concatenate([answer.prompt, answer.completion]) for answer in answers)
    with policy.precision():
        return [
            float(policy.model(torch.from_numpy(row).to(policy.device)[None]).logits[0, 0])
            for row in ids
        ]


def reads_tokens(policy: Policy) -> bool:
    """True if the model has a head that is applied to every token's state (transformers' causal
    classification models).
    """
    return isinstance(getattr(policy.model, "score", None), nn.Module)


SCORES = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest difference of a score from transformers' own, relative to the largest score; of other
types `LOWER`.
"""
LOWER = 0.15
REMEDY = "set model.attention (for a reward: args: {attention: single}) to 'single'"


@torch.no_grad()
def check_scores(policy: Policy, answers: Sequence[Answer]) -> None:
    """Hold the scores of the shortest and the longest answer against transformers' own, where the
    model is and in its type.

    What is compared is the score at the last token that is no padding, where transformers reads it,
    whatever the model pools.
    Raises ConfigError for scores that differ, or that are others each time they are asked.
    """
    pad, kind = policy.model.config.pad_token_id, type(policy.model).__name__
    ends = [np.flatnonzero(answer.completion != pad) for answer in answers]
    checked = [
        replace(answer, completion=answer.completion[: end[-1] + 1])
        for answer, end in zip(answers, ends, strict=True)
        if end.size
    ]
    checked = sorted(checked, key=lambda answer: answer.prompt.size + answer.completion.size)
    if not checked:
        return
    checked = [checked[0], checked[-1]]
    with plain_attention(policy.model):
        expected, again = whole_scores(policy, checked), whole_scores(policy, checked)
    bound = SCORES.get(torch.bfloat16 if policy.autocast else policy.dtype, LOWER) * (
        max(map(abs, expected)) + 1e-3
    )
    if not max(abs(a - b) for a, b in zip(again, expected, strict=True)) <= bound:
        raise ConfigError(
            f"{kind} gives other scores each time it is asked: set the dropout in its config.json"
            " to 0"
        )
    if not reads_tokens(policy):
        return
    tokens = sum(answer.prompt.size + answer.completion.size + 1 for answer in checked)
    ours = [
        float(scores[-1])
        for scores in score_tokens(policy, checked, max_tokens_per_microbatch=tokens)
    ]
    worst = max(abs(a - b) for a, b in zip(ours, expected, strict=True))
    if not worst <= bound:
        remedy = "use another reward model" if policy.attention == "single" else REMEDY
        raise ConfigError(
            f"{kind} cannot score: a score differs by {worst:.2g} from transformers' own; {remedy}"
        )
