"""A trained model as a reward: token ids in, scores out, on the very ids that it was trained on.

Where the policy's tokenizer and the reward model's agree, the policy's ids are scored as they are,
EOS included: nothing is decoded and encoded again.  Where they differ, the reward model reads the
messages that the policy read (or the text, where that was none) through its own chat template;
without one it reads their texts, one a line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.step_rewards import ProcessReward, Steps, segment_steps
from groupwise.utils.built_in import built_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.data.vocabulary import Vocabulary
    from groupwise.models.loading import Blueprint
    from groupwise.models.policy import Policy
    from groupwise.models.reward_head import Answer

By = Literal["newline", "regex", "tokens"]

POSITIONS = 16384
"""Packed positions that are scored at a time, unless a recipe says how many: nothing is kept of
them for a backward pass.
"""


@built_in("model")
def model_reward(
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    path: str,
    steps: By | None = None,
    pattern: str | None = None,
    ends: Sequence[int] = (),
    tokens_per_microbatch: int = POSITIONS,
    dtype: str = "float32",
    device: str = "auto",
    attention: str = "shared",
    trust_remote_code: bool = False,
) -> Callable[..., Any]:
    """The score of a sequence-classification model with one label, from a folder or the hub.

    tokenizer: the policy's; None where there is no policy, and only texts are scored.
    steps: cut completions into steps (`segment_steps`, with `pattern` or `ends`) and reward each:
        with a model that pools `mean` or `sum` a step is worth its tokens' part, so that the steps
        of a completion add up to its score; with a process reward model, the probability that it is
        right.  It then feeds `group.credit: process`; other credits see the sum.
    tokens_per_microbatch: packed positions scored at a time.   The others as in `model`.

    Everything but the weights is checked here; they are loaded at the first call.
    Raises ConfigError for a model that cannot score, or steps that it cannot reward.
    """
    from groupwise.config.settings import ModelSettings
    from groupwise.models.loading import read_blueprint

    if tokens_per_microbatch < 1:
        raise ConfigError(
            f"the reward 'model' needs tokens_per_microbatch >= 1, got {tokens_per_microbatch}"
        )
    settings = ModelSettings(
        path=path,
        dtype=dtype,  # type: ignore[arg-type]
        device=device,  # type: ignore[arg-type]
        attention=attention,  # type: ignore[arg-type]
        trust_remote_code=trust_remote_code,
    )
    scorer = _Scorer(tokenizer, read_blueprint(settings), settings, tokens_per_microbatch)
    pooling = scorer.pooling
    if steps is None:
        if pooling == "steps":
            raise ConfigError(
                f"{path} is a process reward model: say how completions are cut, e.g. args:"
                " {steps: newline}"
            )
        return scorer.by_ids if scorer.same_ids else scorer.by_text
    if pooling == "last":
        raise ConfigError(
            f"{path} reads one score at the last token, which has no parts: steps need"
            " reward_model.pooling: mean or sum, or a prm"
        )
    if not scorer.same_ids:
        raise ConfigError(
            f"{path} has another tokenizer than the policy: steps are rewarded at the policy's own"
            " tokens"
        )
    cut = partial(segment_steps, by=steps, pattern=pattern, ends=ends)
    cut([], lambda ids: ())  # refuses bad arguments now

    def by_steps(
        prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
    ) -> list[Steps]:
        rewarded = []
        scores = scorer.tokens(prompt_ids, completion_ids)
        for score_n, ids in zip(scores, completion_ids, strict=True):
            rewarded.append(step_rewards(pooling, score_n, cut(ids, scorer.vocabulary.texts)))
        return rewarded

    return ProcessReward(by_steps)


def step_rewards(pooling: str, scores: np.ndarray, ends: Sequence[int]) -> Steps:
    """(end, reward) of each step from the numbers (n,) of a completion's tokens.

    `mean`, `sum`: its tokens' part of the score, so that the steps add up to it.  `steps`: the
    logistic function of the number at its end.

    >>> step_rewards("mean", np.array([1.0, 3.0, 0.0, 4.0]), [1, 3])
    [(1, 1.0), (3, 1.0)]
    """
    if len(ends) == 0:
        return []
    rewards = []
    if pooling == "steps":
        for end in ends:
            rewards.append(1.0 / (1.0 + np.exp(-np.clip(scores[end], -50.0, 50.0))))
    else:
        from groupwise.models.reward_head import pool_weights

        parts = pool_weights(pooling, scores.size) * scores  # type: ignore[arg-type]
        begins = np.array([-1, *ends[:-1]]) + 1
        rewards += list(np.add.reduceat(parts, begins))
    return list(zip(ends, map(float, rewards), strict=True))


class _Scorer:
    """A scoring model that is loaded when it is first asked."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        blueprint: Blueprint,
        settings: Any,
        max_tokens_per_microbatch: int,
    ) -> None:
        from groupwise.models.reward_head import check_scorer

        check_scorer(blueprint.config, settings.path)
        self.blueprint, self.settings = blueprint, settings
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.pooling = str(blueprint.config.get("pooling") or "last")
        vocabulary = blueprint.tokenizer.get_vocab()
        self.checked = False
        self.same_ids = tokenizer is not None and (
            tokenizer.get_vocab().items() <= vocabulary.items()
        )

    @cached_property
    def policy(self) -> Policy:
        """The model itself, in eval mode."""
        from groupwise.models.reward_head import load_scorer

        policy = load_scorer(self.settings, self.blueprint)
        policy.model.requires_grad_(False)
        return policy

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The text of each of its tokens."""
        from groupwise.data import vocabulary

        return vocabulary.of(self.blueprint.tokenizer)

    def by_ids(
        self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
    ) -> list[float | None]:
        """Scores of the policy's own ids; None for a completion without tokens."""
        return self._scores(self._answers(prompt_ids, completion_ids))

    def by_text(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        finish_reasons: Sequence[str] | None = None,
    ) -> list[float | None]:
        """Scores of texts through this model's tokenizer, with a prompt as the user's message; a
        truncated one gets no end.
        """
        from groupwise.data.templates import Template

        tokenizer = self.blueprint.tokenizer
        prompt_ids, completion_ids = [], []
        template = Template(tokenizer=tokenizer, chat=bool(tokenizer.chat_template))
        reasons = finish_reasons or ["eos"] * len(completions)
        for prompt, completion, reason in zip(prompts, completions, reasons, strict=True):
            if not template.chat and not isinstance(prompt, str):
                prompt = "\n".join(str(message["content"]) for message in prompt)
            question = template.ask([template.read({"prompt": prompt}, "a prompt")])[0]
            (answer,) = template.complete([question], [completion], self.blueprint.eos_ids)
            ids = answer.tokens.tolist()
            if reason == "length":
                del ids[-1:]
            prompt_ids.append(question.tokens.tolist())
            completion_ids.append(ids)
        return self._scores(self._answers(prompt_ids, completion_ids))

    def tokens(
        self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """The head's number after every completion token."""
        from groupwise.models.reward_head import reads_tokens, score_tokens

        if not reads_tokens(self.policy):
            raise RewardError(
                f"{self.settings.path} has no head for single tokens: leave steps out"
            )
        answers = self._answers(prompt_ids, completion_ids)
        self._check(answers)
        return score_tokens(
            self.policy, answers, max_tokens_per_microbatch=self.max_tokens_per_microbatch
        )

    def _check(self, answers: Sequence[Answer]) -> None:
        """Hold the scores of the first answers that it is asked for against transformers' own."""
        from groupwise.models.reward_head import check_scores

        if not self.checked:
            check_scores(self.policy, answers)
            self.checked = True

    def _answers(
        self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
    ) -> list[Answer]:
        from groupwise.models.reward_head import Answer

        answers = []
        for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
            if len(prompt) + len(completion) > self.blueprint.context:
                raise RewardError(
                    f"the reward model {self.settings.path} reads {self.blueprint.context} tokens,"
                    f" but a prompt and its completion have {len(prompt)} + {len(completion)}:"
                    " lower rollout.max_new_tokens or data.max_prompt_tokens"
                )
            prompt_m = np.asarray(prompt, dtype=np.int64)
            completion_n = np.asarray(completion, dtype=np.int64)
            answers.append(Answer(prompt_m.tobytes().hex(), prompt_m, completion_n))
        return answers

    def _scores(self, answers: Sequence[Answer]) -> list[float | None]:
        from groupwise.models.reward_head import (
            pool_weights,
            reads_tokens,
            score_tokens,
            whole_scores,
        )

        scored = [answer for answer in answers if answer.completion.size]
        if not scored:
            return [None] * len(answers)
        self._check(scored)
        if reads_tokens(self.policy):
            token_scores = score_tokens(
                self.policy, scored, max_tokens_per_microbatch=self.max_tokens_per_microbatch
            )
            scores = []
            for score_n in token_scores:
                weight_n = pool_weights(self.pooling, score_n.size)  # type: ignore[arg-type]
                scores.append(float(weight_n @ score_n))
        else:
            scores = whole_scores(self.policy, scored)
        known = iter(scores)
        return [next(known) if answer.completion.size else None for answer in answers]
