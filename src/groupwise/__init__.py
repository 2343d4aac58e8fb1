"""Groupwise: post-train language models with GRPO and its family.

    import groupwise as gw
    for step in gw.train(gw.load_recipe("recipes/demo.yaml")):
        print(step.number, step.metrics.get("reward"))

Every stage is an ordinary function; the names below are the ones most loops of one's own need.  Importing the package alone
imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "train": "runs.run",
    "load_recipe": "config.recipes",
    "load_stages": "config.recipes",
    "Recipe": "config.settings",
    "Prompt": "records",
    "Rollout": "records",
    "Sampling": "records",
    "Scored": "records",
    "Sample": "records",
    "Step": "records",
    "load_policy": "models.policy",
    "make_policy": "models.policy",
    "Policy": "models.policy",
    "NativeEngine": "rollout.native.engine",
    "build_rewards": "rewards.compose",
    "ALGORITHMS": "algorithms.registry",
    "resolve": "algorithms.registry",
    "pack": "data.packing",
    "score": "training.scoring",
    "update": "training.updating",
    "Optimizer": "training.optimizer",
    "train_online": "training.online",
    "train_offline": "training.offline",
    "GroupwiseError": "errors",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'groupwise' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(f"groupwise.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
