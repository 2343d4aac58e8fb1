"""Built-in tasks: prompts, careless demonstrators and a fixed held-out set, from a seed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from groupwise.config.settings import TASKS
from groupwise.data.tasks.base import Task, check_arguments
from groupwise.errors import ConfigError
from groupwise.utils.built_in import find_built_in
from groupwise.utils.imports import imported, own_code
from groupwise.utils.spelling import nearest


def task_class(name: str) -> type[Task]:
    """A built-in task."""
    return find_built_in("data.tasks", name)


def breakdown_of(name: str | None) -> tuple[str, ...]:
    """The columns of a built-in task for whose values evaluations report accuracies of their own.

    >>> breakdown_of("arithmetic"), breakdown_of("addition"), breakdown_of(None)
    (('operator',), (), ())
    """
    return getattr(task_class(name), "breakdown", ()) if name in TASKS else ()


def make_task(name: str, arguments: Mapping[str, Any] | None = None) -> Task:
    """The built-in task `name`, or one's own (`module:NAME`), with its keyword arguments
    (`data.task_args`).

    Raises ConfigError for an unknown name or argument, with what there is, or for a value that the
    task refuses.

    >>> make_task("addition", {"digits": 2}).held_out(1)
    [{'prompt': '43+79', 'answer': '122'}]
    """
    if name not in TASKS and ":" not in name:
        near = nearest(name, TASKS)
        hint = "" if near is None else f" (did you mean {near}?)"
        raise ConfigError(
            f"no built-in task {name!r}{hint}; there are: {', '.join(TASKS)}, or module:NAME for"
            " one of your own"
        )
    arguments = dict(arguments or {})
    task = task_class(name) if name in TASKS else imported("data.task", name, callable_only=True)
    known = inspect.signature(task).parameters
    for key in arguments:
        if key not in known:
            raise ConfigError(
                f"task {name!r} has no argument {key!r}; it takes: {', '.join(known) or 'none'}"
            )
    if name in TASKS:
        check_arguments(task, arguments)
    with own_code(f"the task {name!r}"):
        return task(**arguments)
