"""Whose run it is: code that a run's recipe names is run for the user who made the run, or who has
trusted it.

    .seal     HMAC-SHA256 of `config.yaml` and of the code in the folder, with a key that lies in
              the user's cache folder and nowhere else

A run folder from elsewhere, or one whose recipe or code somebody has changed, has no seal of this
user's.  A seal is of the text of the recipe that was read, not of the file as it is by then.

Importing this file does not import torch.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from groupwise.algorithms.table import PARTS
from groupwise.config.live_objects import LIVE
from groupwise.config.settings import Recipe
from groupwise.errors import ConfigError, RunError
from groupwise.runs.folder import CONFIG
from groupwise.runs.origin import Origin, is_config_of, origin_of
from groupwise.runs.run_files import RunFiles
from groupwise.utils import files
from groupwise.utils.cache import cache_folder
from groupwise.utils.files import expanded

SEAL, KEY = ".seal", "seal-key"
SIZE = 32
"""Bytes of a key."""
SECTIONS = ("objective", "model", "data", "rewards", "environment", "group", "rollout")
"""Keys of a recipe that can name code."""


def seal(folder: Path, config: str) -> None:
    """Mark a run as this user's, with this text of its recipe and the code that its folder holds.

    Raises OSError.
    """
    files.write(Path(folder) / SEAL, _seal_of(Path(folder), config))


def sealed(run: RunFiles, config: str) -> bool:
    """Return whether this user made the run or has trusted it, with this text of its recipe."""
    try:
        return run.has(SEAL) and hmac.compare_digest(run.read(SEAL), _seal_of(run.folder, config))
    except (RunError, OSError):
        return False


def _seal_of(folder: Path, config: str) -> bytes:
    sealed_bytes = config.encode() + "".join(_code_digests(folder)).encode()
    return hmac.digest(_key(), sealed_bytes, "sha256").hex().encode()


def _code_digests(folder: Path) -> list[str]:
    """The digests of the Python files in a run folder, each once.

    Checkpoints of a model with code of its own come and go, and all hold the same files.
    """
    return sorted({files.digest(path) for path in folder.rglob("*.py") if path.is_file()})


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
        "environment.side_calls": environment.side_calls,
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
    if environment.agent is not None:
        yield "environment.agent", str(environment.args.get("program", environment.agent))
    if environment.verifiers:
        yield "environment.verifiers", environment.verifiers
    if recipe.model.trust_remote_code:
        yield "model.trust_remote_code", "code of the checkpoint"
    for place, reward in enumerate(recipe.rewards):
        if reward.args.get("trust_remote_code"):
            yield f"rewards.{place}.args.trust_remote_code", "code of the checkpoint"


def demand_trust(origin: Origin, parts: Collection[str] = SECTIONS) -> None:
    """Raises ConfigError for a run that is not this user's and whose recipe names code in one of
    `parts` (its first keys).
    """
    code = []
    for key, text in named_code(origin.recipe):
        if key.partition(".")[0] in parts:
            code.append(f"{key}: {text}")
    if code and not sealed(RunFiles(origin.folder), origin.config):
        lines = "\n".join(f"  {line}" for line in code)
        raise ConfigError(
            f"{origin.folder} was not made by you on this machine, or its {CONFIG} or the code in"
            " it has changed since, and its recipe names code that would run with your rights."
            f" Read it, then: groupwise trust {origin.folder}\n{lines}"
        )


def demand_trust_in_recipe(path: str | Path) -> None:
    """Raises ConfigError for a recipe that is the `config.yaml` of a run which is not this user's,
    and which names code.
    """
    place = expanded(path).resolve()
    if place.name != CONFIG:
        return
    origin = origin_of(place)
    if origin is not None and is_config_of(place, origin):
        demand_trust(origin)
