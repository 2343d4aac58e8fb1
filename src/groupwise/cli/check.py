"""`groupwise check`: a minute of sampling and scoring before hours of it."""

from __future__ import annotations

import argparse

from groupwise.cli import arguments as typed

EXAMPLES = (
    "groupwise check my.yaml                  before training",
    "groupwise check runs/demo/grpo           what a run has trained, with the run's own settings",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    typed.recipe(command, "a YAML file, the name of a bundled recipe, or a run")


def run(options: argparse.Namespace) -> int:
    """Check and print; 1 if something is wrong."""
    from groupwise.runs.folder import origin_of

    if (origin := origin_of(options.recipe)) is not None and not options.recipe.endswith(
        (".yaml", ".yml")
    ):
        from groupwise.api.check import check_run
        from groupwise.runs.trust import demand_trust

        demand_trust(
            origin, ("objective", "model", "data", "rewards", "environment", "group", "rollout")
        )

        return check_run(origin, options.recipe, options.overrides)
    from groupwise.config.recipes import load_stages

    load_stages(
        options.recipe, options.overrides
    )  # a bad recipe is refused before torch is imported
    from groupwise.api.check import check_recipe

    return check_recipe(options.recipe, options.overrides)
