"""The table of data-set objectives: the rows that each learns from, the model that it trains, and
its loss.

No code compares an objective's name: adding one is a loss (`offline.Objective`) and one row here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from groupwise.config.settings import Recipe, positions_of
from groupwise.data.encoding import DEMONSTRATIONS, PAIRS, PLAIN_PAIRS, SOLUTIONS, RecordKind
from groupwise.data.images import ImageEncoder, NoImages
from groupwise.data.load import Data, holds_images, load_records
from groupwise.data.templates import Tools
from groupwise.errors import ConfigError
from groupwise.models.gguf import checkpoint_folder
from groupwise.models.loading import Blueprint, make_policy
from groupwise.models.lora import adapt, take_over_adapter
from groupwise.models.policy import Policy
from groupwise.models.reward_head import Pooling, make_scorer
from groupwise.training.offline import SFT, Objective
from groupwise.training.preferences import (
    PROCESS,
    anchored,
    dpo_objective,
    reward_objective,
    with_replay,
)
from groupwise.utils.files import expanded

TEXT_ALONE = NoImages(
    "they are read by sft, by dpo and where the policy samples (grpo and its relatives)"
)
"""Says why what scoring models learn from has no images."""


def language_model(recipe: Recipe, blueprint: Blueprint) -> Policy:
    """A policy to train, with a new adapter where the recipe asks for one."""
    return with_adapter(recipe, make_policy(blueprint.load(), blueprint.tokenizer, recipe.model))


def scorer(recipe: Recipe, blueprint: Blueprint, pooling: Pooling) -> Policy:
    """A model with a score head to train, with a new adapter where the recipe asks for one."""
    return with_adapter(
        recipe, make_scorer(blueprint, recipe.model, pooling=pooling, seed=recipe.seed)
    )


def with_adapter(recipe: Recipe, policy: Policy) -> Policy:
    """The policy with its adapter, where the recipe asks for one."""
    settings = recipe.model
    lora = settings.lora
    if lora is None:
        return policy
    base = checkpoint_folder(str(settings.path))
    policy = adapt(policy, lora, base=base, seed=recipe.seed)
    if lora.start is not None:
        take_over_adapter(policy, expanded(lora.start))
    return policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One row of the table."""

    title: str
    load: Callable[[Recipe, Blueprint, Tools | None], Data[Any]]
    """The third argument says which tools a row's prompt shows."""
    objective: Callable[[Recipe], Objective[Any]]
    model: Callable[[Recipe, Blueprint], Policy] = language_model
    samples: bool = True
    """True if what it trains can be judged by sampling from it."""
    anchor: Callable[[Recipe, Policy, Sequence[Any]], Sequence[Any]] | None = None
    """Adds to rows what the model says of them before the first step; None: that is not needed."""


def _records(
    kind: RecordKind[Any],
    recipe: Recipe,
    blueprint: Blueprint,
    tools: Tools | None = None,
    images: ImageEncoder | NoImages = TEXT_ALONE,
) -> Data[Any]:
    context, eos_ids = blueprint.context, blueprint.eos_ids
    return load_records(
        kind,
        recipe.data,
        blueprint.tokenizer,
        context=context,
        eos_ids=eos_ids,
        seed=recipe.seed,
        tools=tools,
        images=images,
    )


def _demonstrations(recipe: Recipe, blueprint: Blueprint, tools: Tools | None = None) -> Data[Any]:
    rows = _records(DEMONSTRATIONS, recipe, blueprint, tools, blueprint.images)
    if recipe.data.train_on != "all":
        return rows
    if holds_images(rows):
        raise ConfigError(
            "data.train_on: prompts have images, whose placeholders are not learnt: leave train_on"
            " out, and completions are learnt",
            key="data.train_on",
        )
    return replace(
        rows,
        train=tuple(row.whole for row in rows.train),
        held_out=tuple(row.whole for row in rows.held_out),
        validation=tuple(row.whole for row in rows.validation),
    )


def _plain_pairs(recipe: Recipe, blueprint: Blueprint, tools: Tools | None = None) -> Data[Any]:
    return _records(PLAIN_PAIRS, recipe, blueprint, tools, blueprint.images)


def _replayed(recipe: Recipe, blueprint: Blueprint, tools: Tools | None = None) -> Data[Any]:
    pairs, settings = _records(PAIRS, recipe, blueprint), recipe.reward_model
    if settings.replay is None:
        return pairs
    path, task = settings.replay.path, settings.replay.task
    data = recipe.data
    if task is None:
        data = replace(data, path=path, task=None, task_args={}, limit=None)
    else:
        data = replace(
            data,
            path=None,
            task=task,
            task_args=data.task_args if task == data.task else {},
            eval_fraction=0.0,
        )
    old = _records(PAIRS, replace(recipe, data=data), blueprint)
    return replace(
        pairs, train=tuple(with_replay(pairs.train, old.train, settings.replay.share, recipe.seed))
    )


def _reward_model(recipe: Recipe, blueprint: Blueprint) -> Policy:
    return scorer(recipe, blueprint, recipe.reward_model.pooling)


def _process_reward_model(recipe: Recipe, blueprint: Blueprint) -> Policy:
    return scorer(recipe, blueprint, "steps")


def _anchored(recipe: Recipe, policy: Policy, rows: Sequence[Any]) -> Sequence[Any]:
    return anchored(policy, rows, max_tokens_per_microbatch=positions_of(recipe))


def _sft(recipe: Recipe) -> Objective[Any]:
    return SFT


def _bradley_terry(recipe: Recipe) -> Objective[Any]:
    return reward_objective(recipe.reward_model)


def _dpo(recipe: Recipe) -> Objective[Any]:
    return dpo_objective(recipe.pairs)


def _process(recipe: Recipe) -> Objective[Any]:
    return PROCESS


OBJECTIVES: dict[str, Kind] = {
    "sft": Kind(title="supervised fine-tuning", load=_demonstrations, objective=_sft),
    "reward": Kind(
        title="reward model (Bradley-Terry)",
        load=_replayed,
        objective=_bradley_terry,
        model=_reward_model,
        samples=False,
    ),
    "dpo": Kind(
        title="direct preference optimisation",
        load=_plain_pairs,
        objective=_dpo,
        anchor=_anchored,
    ),
    "prm": Kind(
        title="process reward model",
        load=partial(_records, SOLUTIONS),
        objective=_process,
        model=_process_reward_model,
        samples=False,
    ),
}
"""The data-set objectives by name (`config.objectives.DATASET`; a test compares them)."""
