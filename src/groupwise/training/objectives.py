"""The table of data-set objectives: the rows that each learns from, the model that it trains, and
its loss.

No code compares an objective's name: adding one is a loss (`offline.Objective`) and one row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from groupwise.config.settings import Recipe, positions_of
from groupwise.data.encoding import DEMONSTRATIONS, PAIRS, PLAIN_PAIRS, SOLUTIONS, RecordKind
from groupwise.data.load import Data, load_records
from groupwise.data.templates import Tools
from groupwise.models.gguf import checkpoint_folder
from groupwise.models.loading import Blueprint, make_policy
from groupwise.models.lora import adapt
from groupwise.models.policy import Policy
from groupwise.models.reward_head import Pooling, make_scorer
from groupwise.training.baselines import simple_rules
from groupwise.training.offline import SFT, Objective
from groupwise.training.preferences import (
    PROCESS,
    anchored,
    dpo_objective,
    reward_objective,
    with_replay,
)
from groupwise.utils.statistics import Estimate


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
    if settings.lora is None:
        return policy
    return adapt(
        policy, settings.lora, base=checkpoint_folder(str(settings.path)), seed=recipe.seed
    )


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
    rules: Callable[[Policy, Sequence[Any], Sequence[Any]], Mapping[str, Estimate]] | None = None
    """(a policy that decodes, training rows, held-out rows) -> what simple rules reach on the
    latter.
    """


def _records(
    kind: RecordKind[Any], recipe: Recipe, blueprint: Blueprint, tools: Tools | None = None
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
    )


def _demonstrations(recipe: Recipe, blueprint: Blueprint, tools: Tools | None = None) -> Data[Any]:
    rows = _records(DEMONSTRATIONS, recipe, blueprint, tools)
    if recipe.data.train_on == "all":
        return replace(
            rows,
            **{
                part: tuple(row.whole for row in getattr(rows, part))
                for part in ("train", "held_out", "validation")
            },
        )
    return rows


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


OBJECTIVES: dict[str, Kind] = {
    "sft": Kind(title="supervised fine-tuning", load=_demonstrations, objective=lambda recipe: SFT),
    "reward": Kind(
        title="reward model (Bradley-Terry)",
        load=_replayed,
        objective=lambda recipe: reward_objective(recipe.reward_model),
        model=lambda recipe, blueprint: scorer(recipe, blueprint, recipe.reward_model.pooling),
        samples=False,
        rules=simple_rules,
    ),
    "dpo": Kind(
        title="direct preference optimisation",
        load=partial(_records, PLAIN_PAIRS),
        objective=lambda recipe: dpo_objective(recipe.pairs),
        anchor=lambda recipe, policy, rows: anchored(
            policy, rows, max_tokens_per_microbatch=positions_of(recipe)
        ),
    ),
    "prm": Kind(
        title="process reward model",
        load=partial(_records, SOLUTIONS),
        objective=lambda recipe: PROCESS,
        model=lambda recipe, blueprint: scorer(recipe, blueprint, "steps"),
        samples=False,
    ),
}
"""The data-set objectives by name (`settings.DATASET`; a test compares them)."""
