"""Whose run it is: code that a run's recipe names is run for the user who made the run, or who has
trusted it.

    .seal     HMAC-SHA256 of `config.yaml`, with a key that lies in the user's cache folder and
    nowhere else

A run folder from elsewhere, or one whose recipe somebody has changed, has no seal of this user's.

Importing this file does not import torch.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from groupwise.algorithms.table import PARTS
from groupwise.config.live_objects import LIVE
from groupwise.config.settings import Recipe
from groupwise.errors import ConfigError, RunError
from groupwise.runs.folder import CONFIG, LARGEST_CONFIG, Origin
from groupwise.runs.run_files import RunFiles
from groupwise.utils import files
from groupwise.utils.cache import cache_folder

SEAL, KEY = ".seal", "seal-key"
SIZE = 32
"""Bytes of a key."""


def seal(folder: Path) -> None:
    """Mark a run as this user's, with the recipe that it has now.  Raises RunError, OSError."""
    run = RunFiles(folder)
    files.write(run.folder / SEAL, _seal_of(run))


def sealed(run: RunFiles) -> bool:
    """True if this user made the run or has trusted it, and its recipe is the same."""
    try:
        return run.has(SEAL) and hmac.compare_digest(run.read(SEAL), _seal_of(run))
    except (RunError, OSError):
        return False


def _seal_of(run: RunFiles) -> bytes:
    return hmac.digest(_key(), run.read(CONFIG, LARGEST_CONFIG), "sha256").hex().encode()


def _key() -> bytes:
    """The user's key, made when it is first asked for."""
    path = cache_folder() / KEY
    with suppress(FileExistsError):
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(made, secrets.token_bytes(SIZE))
        os.close(made)
    for _ in range(100):
        if len(key := path.read_bytes()) == SIZE:
            return key
        time.sleep(0.01)  # another process is writing it
    raise OSError(f"{path} is no key: delete it")


def named_code(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Dotted keys of a recipe that name code of somebody's own (`module:NAME`, `file.py:NAME`) or a
    program, and what they name.

    Objects of the running program are left out.
    """
    environment = recipe.environment
    factories = (
        environment.factory
        if isinstance(environment.factory, Mapping)
        else {"": environment.factory}
    )
    named: dict[str, object] = {
        "objective": recipe.objective,
        "data.task": recipe.data.task,
        "rollout.engine.name": recipe.rollout.engine.name,
        "environment.harness": environment.harness,
    }
    for kind in PARTS:
        part = getattr(recipe.group, kind)
        named |= (
            {f"group.{kind}.name": part.get("name")}
            if isinstance(part, Mapping)
            else {f"group.{kind}": part}
        )
    named |= {
        f"rewards.{place}.function": reward.function for place, reward in enumerate(recipe.rewards)
    }
    named |= {f"environment.tools.{place}": tool for place, tool in enumerate(environment.tools)}
    named |= {
        f"environment.factory.{name}".rstrip("."): factory for name, factory in factories.items()
    }
    for key, text in named.items():
        if isinstance(text, str) and ":" in text and not text.startswith(LIVE):
            yield key, text
    if isinstance(environment.harness, tuple):
        yield "environment.harness", " ".join(environment.harness)
    if environment.verifiers:
        yield "environment.verifiers", environment.verifiers
    if recipe.model.trust_remote_code:
        yield "model.trust_remote_code", "code of the checkpoint"
    for place, reward in enumerate(recipe.rewards):
        if reward.args.get("trust_remote_code"):
            yield f"rewards.{place}.args.trust_remote_code", "code of the checkpoint"


def demand_trust(origin: Origin, parts: Iterable[str]) -> None:
    """Raises ConfigError for a run that is not this user's and whose recipe names code in one of
    `parts` (its first keys).
    """
    wanted = tuple(parts)
    code = [
        f"{key}: {text}"
        for key, text in named_code(origin.recipe)
        if key.partition(".")[0] in wanted
    ]
    if code and not sealed(RunFiles(origin.folder)):
        lines = "\n".join(f"  {line}" for line in code)
        raise ConfigError(
            f"{origin.folder} was not made by you on this machine, or its {CONFIG} has changed"
            " since, and its recipe names code that would run with your rights. Read it, then:"
            f" groupwise trust {origin.folder}\n{lines}"
        )
