"""Reasoning Gym's procedural data sets: rows to learn from, and their scorers, which are tested
before a run uses them.

Some scorers raise for what is no answer, some give full marks to a text that says that it does not
know, and some data sets have no answer to compare with.  An entry whose scorer gives full marks for
`I do not know.` is left out.

Needs the extra `reasoning-gym`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from groupwise.config.settings import Recipe, RewardSettings
from groupwise.data.sources import live_rows
from groupwise.data.tasks.base import text_of
from groupwise.errors import ConfigError
from groupwise.rewards.answers import boxes
from groupwise.rewards.final_message import final_message

IGNORANCE = "I do not know."
"""Earns nothing where a scorer means what it says."""
ROWS, HELD_OUT = 1_000, 200
"""Rows to train on and to be judged on, where `data.limit` and `data.eval_limit` do not say."""
HELD_OUT_SEED = 2**31 - 1
"""Seed of the held-out rows: always the same, whatever the run's seed."""
FULL = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class Health:
    """What the test has found out about the scorers of some entries."""

    entries: int
    faults: Mapping[str, int]
    """Entries with each fault; none where there is none."""
    believable: bool
    """False if no entry's own answer earns full marks."""

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {fault}" for fault, count in self.faults.items())
        return (
            f"of {self.entries} entries {counts}"
            if counts
            else f"{self.entries} entries, whose scorers tell right from wrong"
        )


def with_procedural_data(recipe: Recipe) -> Recipe:
    """The recipe with the rows and the scorer of its `environment.reasoning_gym`; itself if it
    names none.

    Raises ConfigError: no such data set, bad arguments, or no entry that can be scored.
    """
    environment, data = recipe.environment, recipe.data
    if environment.reasoning_gym is None or data.path is not None:  # it has been done
        return recipe
    name, arguments = environment.reasoning_gym, dict(environment.args)
    rows, _ = rows_of(name, arguments, data.limit or ROWS, recipe.seed)
    held_out, _ = rows_of(name, arguments, data.eval_limit or HELD_OUT, HELD_OUT_SEED)
    scorer = RewardSettings(
        function="groupwise.environments.procedural:score",
        name="reasoning_gym",
        args={"dataset": name, "arguments": arguments},
        timeout=environment.tool_timeout,
    )
    named = f"reasoning_gym {name}"
    data = replace(
        data,
        path=live_rows(rows, named),
        eval_path=live_rows(held_out, f"{named}, held out"),
        eval_fraction=0.0,
    )
    return replace(recipe, data=data, rewards=(scorer, *recipe.rewards))


def rows_of(
    name: str, arguments: Mapping[str, Any], count: int, seed: int
) -> tuple[list[dict[str, Any]], Health]:
    """At most `count` rows with prompt, answer and entry, and what was found out about their
    scorers.  Raises ConfigError.
    """
    entries = make_dataset(name, arguments, count, seed)
    rows: list[dict[str, Any]] = []
    faults: Counter[str] = Counter()
    right = 0
    for entry in entries:
        worth, answer = _scored(entries, IGNORANCE, entry), entry.get("answer")
        if worth is None:
            faults["raise for what is no answer (worth 0)"] += 1
        elif worth >= FULL:
            faults[f"give full marks for {IGNORANCE!r} (left out)"] += 1
            continue
        if answer is None:
            faults["have no answer of their own"] += 1
        elif (_scored(entries, str(answer), entry) or 0.0) < FULL:
            faults["do not give full marks to their own answer"] += 1
        else:
            right += 1
        rows.append({"prompt": entry["question"], "answer": answer, "entry": dict(entry)})
    if not rows:
        raise ConfigError(
            f"environment.reasoning_gym {name!r}: every entry gives full marks for {IGNORANCE!r}:"
            " nothing can be learnt"
        )
    return rows, Health(count, faults, right > 0)


def make_dataset(name: str, arguments: Mapping[str, Any], count: int, seed: int) -> Any:
    """The data set.  Raises ConfigError if the extra is missing, or for a name or arguments that
    the library refuses.
    """
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "environment.reasoning_gym needs a package: pip install reasoning-gym==0.1.25"
            f" ({error})"
        ) from error
    options = {"size": count, "seed": seed} | dict(arguments)
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise ConfigError(
            f"environment.reasoning_gym {name!r} with {options}: {type(error).__name__}: {error}"
        ) from error


def score(
    completion: Any, entry: Mapping[str, Any], dataset: str, arguments: Mapping[str, Any]
) -> float:
    """A reward function: what the data set's scorer gives for the answer in a completion; 0 where
    it raises.
    """
    worth = _scored(
        _dataset(dataset, json.dumps(arguments, sort_keys=True)),
        answer_in(text_of(completion)),
        entry,
    )
    return 0.0 if worth is None else worth


def answer_in(text: str) -> str:
    r"""The answer of a completion: the last `<answer>`, else the last `\boxed{}`, else what stands
    behind the reasoning.

    >>> answer_in("so <answer> 12 </answer>"), answer_in("<think>6*2</think> 12")
    ('12', '12')
    """
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return tagged[-1].strip()
    rest = final_message(text)
    boxed = [content for _, _, content, _ in boxes(rest)]
    return (boxed[-1] if boxed else rest).strip()


@cache
def _dataset(name: str, arguments: str) -> Any:
    """One data set of each kind, for its scorer.   arguments: as JSON."""
    return make_dataset(name, json.loads(arguments), 1, 0)


def _scored(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float | None:
    """None if the scorer raises: it cannot read the answer."""
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:  # scorers of a hundred data sets: what they raise for is no answer
        return None
