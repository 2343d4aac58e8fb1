"""Built-in tasks: prompts, careless demonstrators and a fixed held-out set, generated from a seed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from groupwise.data.tasks.addition import Addition, Sums
from groupwise.data.tasks.arithmetic import Arithmetic
from groupwise.data.tasks.base import Task
from groupwise.data.tasks.calculator import Calculator
from groupwise.data.tasks.chat import ChatJson, ChatSums, ChatWords
from groupwise.data.tasks.gsm8k import Gsm8kArithmetic
from groupwise.data.tasks.guessing import Guessing
from groupwise.data.tasks.preferences import Preferences
from groupwise.errors import ConfigError
from groupwise.utils.imports import imported, own_code
from groupwise.utils.spelling import nearest

TASKS: dict[str, type[Task]] = {
    "addition": Addition,
    "sums": Sums,
    "arithmetic": Arithmetic,
    "gsm8k_arithmetic": Gsm8kArithmetic,
    "preferences": Preferences,
    "calculator": Calculator,
    "guessing": Guessing,
    "chat_sums": ChatSums,
    "chat_json": ChatJson,
    "chat_words": ChatWords,
}


def breakdown_of(name: str | None) -> tuple[str, ...]:
    """The columns of a built-in task for whose values evaluations report accuracies of their own.

    >>> breakdown_of("arithmetic"), breakdown_of("addition"), breakdown_of(None)
    (('operator',), (), ())
    """
    return getattr(TASKS.get(name or ""), "breakdown", ())


def make_task(name: str, arguments: Mapping[str, Any] | None = None) -> Task:
    """The built-in task `name`, or one's own (`module:NAME`), with its keyword arguments (`data.task_args`).

    Raises ConfigError for an unknown name or argument, with what there is, or for a value that the task refuses.

    >>> make_task("addition", {"digits": 2}).held_out(1)
    [{'prompt': '43+79', 'answer': '122'}]
    """
    if name not in TASKS and ":" not in name:
        near = nearest(name, TASKS)
        hint = "" if near is None else f" (did you mean {near}?)"
        raise ConfigError(f"no built-in task {name!r}{hint}; there are: {', '.join(TASKS)}, or module:NAME for one of your own")
    settings = dict(arguments or {})
    task = TASKS[name] if name in TASKS else imported("data.task", name, callable_only=True)
    known = inspect.signature(task).parameters
    for key in settings:
        if key not in known:
            raise ConfigError(f"task {name!r} has no argument {key!r}; it takes: {', '.join(known) or 'none'}")
    with own_code(f"the task {name!r}"):
        return task(**settings)
