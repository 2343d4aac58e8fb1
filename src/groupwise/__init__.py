"""Groupwise: post-train language models with GRPO and its family.

    import groupwise as gw
    for step in gw.train("recipe.yaml"):
        print(step.number, step.metrics.get("reward"))

    training = gw.train(model="Qwen/Qwen3.5-0.8B", data=rows, rewards=[check], steps=100)
    training.run()

Every stage is a function.  The names below are those that a training loop needs.  Importing the
package imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if not __debug__:
    raise ImportError(
        "groupwise checks its records by assert, which `python -O` and PYTHONOPTIMIZE leave out:"
        " start Python without them"
    )

if TYPE_CHECKING:
    __version__: str

    from groupwise.algorithms.table import ALGORITHMS
    from groupwise.api.benchmark import evaluate_benchmark
    from groupwise.api.evaluate import EvalReport, evaluate
    from groupwise.api.export import export_gguf
    from groupwise.api.loaded_policy import LoadedPolicy, load_policy, make_policy
    from groupwise.api.publish import push
    from groupwise.api.tables import read_metrics, read_rollouts
    from groupwise.api.train import Training, train
    from groupwise.config import settings
    from groupwise.config.recipes import load_recipe, load_stages
    from groupwise.config.resolve import resolve
    from groupwise.config.settings import Recipe
    from groupwise.data.packing import pack
    from groupwise.errors import GroupwiseError
    from groupwise.inspection.comparison import Comparison, compare
    from groupwise.models.policy import Policy
    from groupwise.records import Prompt, Rollout, RolloutGroup, Sample, Sampling, Step
    from groupwise.rewards.compose import LiveReward, build_rewards
    from groupwise.rollout.native.engine import NativeEngine
    from groupwise.training.offline import train_offline
    from groupwise.training.online import train_online
    from groupwise.training.optimizer import Optimizer
    from groupwise.training.passes import score, update
    from groupwise.trl.live import from_trl

_WHERE = {
    "train": "api.train",
    "Training": "api.train",
    "from_trl": "trl.live",
    "settings": "config",
    "load_recipe": "config.recipes",
    "load_stages": "config.recipes",
    "Recipe": "config.settings",
    "Prompt": "records",
    "Rollout": "records",
    "Sampling": "records",
    "RolloutGroup": "records",
    "Sample": "records",
    "Step": "records",
    "load_policy": "api.loaded_policy",
    "LoadedPolicy": "api.loaded_policy",
    "evaluate": "api.evaluate",
    "evaluate_benchmark": "api.benchmark",
    "EvalReport": "api.evaluate",
    "make_policy": "api.loaded_policy",
    "push": "api.publish",
    "compare": "inspection.comparison",
    "Comparison": "inspection.comparison",
    "export_gguf": "api.export",
    "read_metrics": "api.tables",
    "read_rollouts": "api.tables",
    "Policy": "models.policy",
    "NativeEngine": "rollout.native.engine",
    "build_rewards": "rewards.compose",
    "LiveReward": "rewards.compose",
    "ALGORITHMS": "algorithms.table",
    "resolve": "config.resolve",
    "pack": "data.packing",
    "score": "training.passes",
    "update": "training.passes",
    "Optimizer": "training.optimizer",
    "train_online": "training.online",
    "train_offline": "training.offline",
    "GroupwiseError": "errors",
}

__all__ = [
    "ALGORITHMS", "Comparison", "EvalReport", "GroupwiseError", "LiveReward", "LoadedPolicy",
    "NativeEngine", "Optimizer", "Policy", "Prompt", "Recipe", "Rollout", "RolloutGroup", "Sample",
    "Sampling", "Step", "Training", "build_rewards", "compare", "evaluate", "evaluate_benchmark",
    "export_gguf", "from_trl", "load_policy", "load_recipe", "load_stages", "make_policy", "pack",
    "push", "read_metrics", "read_rollouts", "resolve", "score", "settings", "train",
    "train_offline", "train_online", "update",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # It imports `random`, which `python -m groupwise` finds in the working folder until
        # `__main__` has run.
        from importlib.metadata import version

        return version("groupwise")
    if name == "Scored":  # the former name of RolloutGroup warns in its module
        return importlib.import_module("groupwise.records").Scored
    if name not in _WHERE:
        raise AttributeError(
            f"module 'groupwise' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    if name == "settings":
        return importlib.import_module("groupwise.config.settings")
    return getattr(importlib.import_module(f"groupwise.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
