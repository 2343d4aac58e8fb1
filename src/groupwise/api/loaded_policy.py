"""A trained policy in Python: load it, sample completions from it, and get their log-probs.

    policy = gw.load_policy("runs/mine")
    policy.generate("2+2=")             # 'the completion'
    policy.score("2+2=", "4")           # array([-0.02]): one log-prob a token, in nats

A policy of a run knows how the run asked: with a chat template or without, with which system
message and template, and how long a completion may be.
"""

from __future__ import annotations

import dataclasses
import math
import os
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.config.settings import DataSettings, ModelSettings
from groupwise.config.validation import wrong_model
from groupwise.data.sources import kind_of
from groupwise.data.templates import Template
from groupwise.data.wording import ReadRow
from groupwise.errors import ConfigError, DataError, EngineError, RunError
from groupwise.models import loading
from groupwise.models.fp8_blocks import in_fp8
from groupwise.models.gguf import checkpoint_folder
from groupwise.models.policy import Policy
from groupwise.models.saving import save
from groupwise.models.sharded import frozen_copy
from groupwise.proof.prove import UNSAID, prove
from groupwise.proof.texts import NATIVE
from groupwise.records import Prompt, Sample, Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.checkpoint import policy_folder
from groupwise.runs.compiling import with_blocks
from groupwise.runs.origin import Origin, origin_of
from groupwise.runs.trust import demand_trust
from groupwise.training.passes import score
from groupwise.utils.files import expanded
from groupwise.utils.secrets import REDACTED
from groupwise.utils.terminal import logger

log = logger(__name__)

Conversation = Sequence[Mapping[str, Any]]
"""Chat messages: `[{"role": "user", "content": "2+2="}]`."""
Row = Mapping[str, Any]
"""A data row: `{"question": "2+2="}`."""

ROWS = 256
"""Completions decoded at the same time."""
POSITIONS = 8192
"""Packed positions of one forward pass of `score`."""
LENGTH = 256
"""Longest completion in tokens, where no run says one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class LoadedPolicy(Policy):
    """A `Policy` with `generate` and `score` for texts, rows and chat messages."""

    data: DataSettings = DataSettings()  # noqa: RUF009 - frozen
    """How a text or a row becomes a prompt, as in the run.  A text takes the place of the
    template's only column.
    """
    conversed: bool = False
    """True of a policy that was trained with tools or in an environment."""

    def save(self, folder: Path) -> None:
        """Write a plain Hugging Face folder; see `models.saving.save`."""
        save(self, folder)

    def frozen_copy(self) -> LoadedPolicy:
        """Copy the weights as they are now, for a reference; see `models.sharded.frozen_copy`."""
        copied: Any = frozen_copy(self)  # of the same class
        return copied

    def __repr__(self) -> str:
        """One line: neither the weights nor the vocabulary are printed."""
        size = sum(parameter.numel() for parameter in self.model.parameters())
        return f"LoadedPolicy({type(self.model).__name__}, {size:,} parameters, {self.device})"

    max_new_tokens: int = LENGTH
    """Longest completion in tokens, where `generate` is not told."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, where `generate` is not told."""

    @classmethod
    def of(cls, policy: Policy, origin: Origin | None = None) -> LoadedPolicy:
        """A policy, asked as the run that made it asked."""
        loaded = cls(
            **{field.name: getattr(policy, field.name) for field in dataclasses.fields(Policy)}
        )
        if origin is None:
            return loaded
        data, rollout = origin.dated.data, origin.recipe.rollout
        texts = {
            "data.system": data.system,
            "data.template": data.template,
            "rollout.stop": " ".join(rollout.stop),
        }
        for key in (key for key, text in texts.items() if text and REDACTED in text):
            log.warning(
                "%s was taken for a secret, and is %s in the run: prompts are not those it was"
                " trained on",
                key,
                REDACTED,
            )
        conversed = origin.recipe.environment.talks or origin.recipe.environment.asks
        return dataclasses.replace(
            loaded,
            data=dataclasses.replace(
                data, chat=data.chat or (conversed and bool(policy.tokenizer.chat_template))
            ),
            conversed=conversed,
            max_new_tokens=rollout.max_new_tokens,
            stop=rollout.stop,
        )

    @overload
    def generate(
        self,
        prompts: str | Row | Conversation,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        stop: Sequence[str] | None = None,
        seed: int = 0,
    ) -> str: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Conversation],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        stop: Sequence[str] | None = None,
        seed: int = 0,
    ) -> list[str]: ...

    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        stop: Sequence[str] | None = None,
        seed: int = 0,
    ) -> str | list[str]:
        """The completion of a prompt as text, or the completions of several prompts, in their
        order.

        prompts: a text, a row of data, chat messages, or a list of texts or of messages.  Equal
            prompts get different samples.
        max_new_tokens, stop: longest completion in tokens, and strings that end it; default: the
            run's.  temperature: 0 is greedy.
        seed: the same call returns the same texts.
        Raises DataError for an invalid prompt, EngineError for one that cannot be sampled.
        """
        if not isinstance(temperature, int | float):
            raise EngineError(
                f"temperature is a number from 0 (greedy), got {kind_of(temperature)}"
            )
        if self.conversed:
            log.warning(
                "this policy was trained in conversations: `generate` asks for one turn and shows"
                " no tools of its environment; `groupwise chat` and gw.evaluate hold conversations"
            )
        single = _is_single(prompts)
        questions = [
            Prompt(id=f"{place}", tokens=question.tokens, text=question.text)
            for place, question in enumerate(self._questions([prompts] if single else prompts))
        ]
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            stop=self.stop if stop is None else tuple(stop),
        )
        engine = NativeEngine(self, max_rows=ROWS)
        groups = engine.generate(questions, group_size=1, sampling=sampling, seed=seed)
        by_id = {rollout.prompt.id: rollout.text for (rollout,) in groups}
        texts = [by_id[prompt.id] for prompt in questions]
        return texts[0] if single else texts

    @overload
    def score(
        self,
        prompts: str | Row | Conversation,
        completions: str | Sequence[int] | np.ndarray,
        *,
        end: bool = False,
        temperature: float = 1.0,
    ) -> np.ndarray: ...
    @overload
    def score(
        self,
        prompts: Sequence[str] | Sequence[Conversation],
        completions: Sequence[str] | Sequence[Sequence[int]] | Sequence[np.ndarray],
        *,
        end: bool = False,
        temperature: float = 1.0,
    ) -> list[np.ndarray]: ...
    def score(
        self, prompts: Any, completions: Any, *, end: bool = False, temperature: float = 1.0
    ) -> np.ndarray | list[np.ndarray]:
        """Log-probs of every token of a completion after its prompt: (n,), nats.  Their sum is the
        completion's log-prob.

        prompts, completions: one of each, or equally many.  A completion is a text, or its token
            ids.  A text is encoded, which may give other ids than the policy sampled.
        end: also score the token that ends a completion (the first of `eos_ids`), after the others.
        temperature: divisor of the logits; 1 is the model's own distribution.
        Raises DataError for an invalid prompt or completion, or one longer than the context.
        """
        single = _is_single(prompts)
        prompts, completions = ([prompts], [completions]) if single else (prompts, completions)
        if len(prompts) != len(completions):
            raise DataError(
                f"score takes as many completions as prompts: got {len(completions)} of"
                f" {len(prompts)}"
            )
        if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
            raise DataError(
                f"score needs a finite temperature above 0, got {temperature!r}: greedy choices"
                " have no log-probs"
            )
        samples = []
        for place, (question, completion) in enumerate(
            zip(self._questions(prompts), completions, strict=True)
        ):
            ids = self._ids(completion, end)
            if question.tokens.size + ids.size > self.context:
                length = f"{question.tokens.size} and {ids.size} tokens"
                raise DataError(
                    f"prompt and completion {place} have {length}, more than the context of"
                    f" {self.context}"
                )
            weight = np.ones(ids.size)
            samples.append(
                Sample(
                    group=f"{place}",
                    prompt=question.tokens,
                    completion=ids,
                    weight=weight,
                    temperature=temperature,
                )
            )
        logp = score(self, samples, max_tokens_per_microbatch=POSITIONS).logp
        return logp[0] if single else logp

    def _questions(self, prompts: Sequence[Any]) -> list[Any]:
        """Each prompt as the policy reads it."""
        template = Template.build(self.data, self.tokenizer)
        unformatted = dataclasses.replace(
            template, format=None
        )  # messages are a prompt as they are
        examples: list[ReadRow] = []
        for place, prompt in enumerate(prompts):
            where = f"prompt {place}"
            if _is_conversation(prompt):
                examples.append(unformatted.read({"prompt": list(prompt)}, where))
            elif isinstance(prompt, str | Mapping):
                examples.append(template.read(self._row(prompt, where), where))
            else:
                raise DataError(
                    f"{where} is a text, a row or a list of chat messages, got {kind_of(prompt)}"
                )
            if not examples[-1].content:
                raise DataError(
                    f"{where} is empty: there is nothing that a completion could follow"
                )
        questions = template.ask(examples)
        unread = next((question.where for question in questions if question.unread_tools), None)
        if unread is not None:
            log.warning(
                "%s: the tools in its row cannot be read, and the policy does not see them", unread
            )
        empty = next((question.where for question in questions if not question.tokens.size), None)
        if empty is not None:
            raise DataError(f"{empty} is empty: it has no token that a completion could follow")
        return questions

    def _row(self, prompt: str | Row, where: str) -> Row:
        """A prompt as a row of data; a text fills the only column that the template reads.
        DataError if there are several.
        """
        if isinstance(prompt, Mapping):
            theirs = {
                ours: prompt[name] for ours, name in self.data.columns.items() if name in prompt
            }
            return {**prompt, **theirs}
        format = self.data.template
        if format is None:
            return {"prompt": prompt}
        named = [name for _, name, _, _ in string.Formatter().parse(format) if name]
        names = ["instruction"] if format == "alpaca" else list(dict.fromkeys(named))
        if len(names) != 1:
            raise DataError(
                f"{where} is a text, and the template {format!r} reads {', '.join(names)}: give a"
                " row of data"
            )
        return {names[0]: prompt}

    def _ids(self, completion: Any, end: bool) -> np.ndarray:
        if isinstance(completion, str):
            completion = self.tokenizer(completion, add_special_tokens=False)["input_ids"]
        ids = np.asarray(completion)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise DataError(
                f"a completion is a text or a list of token ids, got {kind_of(completion)}"
            )
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocabulary:
            raise DataError(
                f"a completion holds ids outside the vocabulary of {self.vocabulary} tokens:"
                f" {ids.min()} .. {ids.max()}"
            )
        return np.append(ids, [self.eos_ids[0]] if end else []).astype(np.int64)


def _is_conversation(prompt: Any) -> bool:
    """True for a list of messages."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt)


def _is_single(prompts: object) -> bool:
    """True for one prompt, False for a list of them."""
    if isinstance(prompts, str | Mapping) or _is_conversation(prompts):
        return True
    if isinstance(prompts, Sequence):
        return False
    raise DataError(
        "a prompt is a text, a row, a list of chat messages, or a list of these, got"
        f" {kind_of(prompts)}"
    )


def load_policy(
    path: str | os.PathLike[str] | ModelSettings,
    *,
    dtype: Literal["float32", "bfloat16", "autocast"] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> LoadedPolicy:
    """The policy of a run folder (its final model, else its newest checkpoint), a checkpoint, a
    model folder or a hub name.

    dtype: default: the run's, else float32.   dtype, device: see `ModelSettings`, which may also be
        given whole.
    Raises ConfigError, CheckpointError, DataError or Diverged with the remedy.
    """
    if isinstance(path, ModelSettings):
        if path.path is None:
            raise ConfigError(
                "load_policy reads a model from model.path; `scratch` makes one with random weights"
                " (make_policy)"
            )
        return LoadedPolicy.of(_proven(loading.load_policy(path)))
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            "a policy is loaded from a run, a checkpoint, a model folder or a hub name, got"
            f" {kind_of(path)}"
        )
    folder = model_folder(os.fspath(path))
    origin = _origin(path)
    if origin is not None:
        demand_trust(origin, ("model",))
    settings = (
        ModelSettings(path=folder) if origin is None else settings_of(origin.recipe.model, folder)
    )
    settings = dataclasses.replace(settings, device=device, dtype=dtype or settings.dtype)
    return LoadedPolicy.of(_proven(loading.load_policy(settings)), origin)


def _proven(policy: Policy) -> Policy:
    """A policy that scores, learns and, by the native engine, samples what its own pass gives.
    Raises ConfigError.
    """
    prove(policy, sampler=None if policy.attention == "single" else NATIVE)
    return policy


def make_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: ModelSettings | None = None,
    *,
    longest: int = UNSAID,
) -> Policy:
    """A loaded model with its tokenizer.  Scoring and training are proven on texts of up to
    `longest` tokens.

    Raises DataError, Diverged or ConfigError as `models.loading.make_policy`, ConfigError for what
    differs.
    """
    settings = settings or ModelSettings()
    policy = loading.make_policy(model, tokenizer, settings)
    again = settings.gradient_checkpointing
    prove(policy, longest=longest, recompute=again)
    policy = in_fp8(policy, settings.fp8)
    policy, _ = with_blocks(policy, settings.compile, longest=longest, recompute=again)
    return policy


def settings_of(model: ModelSettings, folder: str) -> ModelSettings:
    """How to load what a run has written: it is whole, and has its chat template."""
    return dataclasses.replace(
        model, path=folder, scratch=None, lora=None, quantize=None, fp8=None, chat_template=None
    )


def _origin(path: str | os.PathLike[str]) -> Origin | None:
    """The run that made a model; a recipe that this version cannot read is told of, and costs only
    what the run would have said.
    """
    try:
        return origin_of(os.fspath(path))
    except (ConfigError, RunError) as error:
        log.warning("%s; prompts are asked as they are given", error)
        return None


def model_folder(path: str) -> str:
    """The model meant by a path: a hub name as it is, else the Hugging Face folder in it (see
    `checkpoint.policy_folder`).

    Raises ConfigError or CheckpointError if there is none.
    """
    if not expanded(path).is_dir():
        wrong = wrong_model(path)
        if wrong:
            raise ConfigError(wrong)
    path = checkpoint_folder(path)
    return str(policy_folder(path)) if expanded(path).is_dir() else path
