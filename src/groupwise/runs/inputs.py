"""The inputs of a run beside its recipe: the content of its data, of its own code and of the models of earlier stages.

A recipe names files, and a file can change while its name stays.  Digests of their content are written to the run folder
(`inputs.json`) when a run begins; a resumed run whose inputs have changed is refused unless the changes are accepted.
Own code is whatever a setting names as `module:NAME` or `file.py:NAME`, with the own files that it imports (`user_code.py`).
Of an object of the running program only the name counts.
Files and folders that arguments name are looked at too, but a reward may write to them: of their changes a warning tells.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from groupwise.config.live_objects import Live, short_digest
from groupwise.config.recipes import run_folder
from groupwise.config.settings import PARTS, Recipe
from groupwise.data.sources import fingerprint
from groupwise.errors import ConfigError, DataError, RunError
from groupwise.models.gguf import checkpoint_folder
from groupwise.models.lora import ADAPTER_CONFIG, read_adapter
from groupwise.runs import user_code
from groupwise.runs.folder import model_digest
from groupwise.runs.run_files import RunFiles
from groupwise.utils import files
from groupwise.utils.files import expanded
from groupwise.utils.secrets import redacted
from groupwise.utils.terminal import logger

log = logger(__name__)

INPUTS = "inputs.json"
Inputs = dict[str, dict[str, Any]]
"""Dotted key of the recipe -> what it names (`source`) and what that holds: size and xxh3-128 of a file or of a model's weights,
the fingerprint of a hub's data set, the digests of a finished stage's weights."""


def inputs_of(recipe: Recipe) -> Inputs:
    """The inputs of a recipe whose `stage:NAME` are folders and files already.  What is not found is left to those who read it."""
    found = [*_all(recipe), *_of_arguments(recipe)]
    return {key: {"source": redacted(source), **content} for key, (source, content) in found if content is not None}


def _all(recipe: Recipe) -> Iterator[tuple[str, tuple[str, dict[str, Any] | None]]]:
    data = recipe.data
    replay, shown = recipe.reward_model.replay, recipe.teacher.demonstrations
    sources = {
        "data.path": data.path,
        "data.eval_path": data.eval_path,
        "reward_model.replay.path": replay and replay.path,
        "teacher.demonstrations.path": shown and shown.path,
    }
    for key, source in sources.items():
        if isinstance(source, str) and not isinstance(source, Live):  # the name of rows in memory has a digest of them
            yield key, (source, _data(source, data.split if key != "data.eval_path" else data.eval_split))
    adapted = recipe.model.lora is not None
    for key, path in (("model", recipe.model.path), ("critic", recipe.critic.path), ("teacher", recipe.teacher.path)):
        if path is not None and not isinstance(path, Live):  # of a policy without an adapter checkpoints hold all weights
            yield f"{key}.path", (path, _weights(path) if key != "model" or adapted else _stage(path))
    if (template := recipe.model.chat_template) is not None:
        yield "model.chat_template", (template, _file(template))
    given = recipe.environment
    factories = given.factory if isinstance(given.factory, Mapping) else {"": given.factory} if given.factory else {}
    code: dict[str, Any] = {f"environment.tools.{place}": tool for place, tool in enumerate(given.tools)}
    code |= {f"environment.factory.{name}".rstrip("."): factory for name, factory in factories.items()}
    code |= {f"rewards.{place}.function": reward.function for place, reward in enumerate(recipe.rewards)}
    for part in PARTS:
        chosen = getattr(recipe.group, part)
        code[f"group.{part}"] = chosen.get("name") if isinstance(chosen, Mapping) else chosen
    code |= {"environment.harness": given.harness}
    told = {*sources, *code, *(f"{key}.name" for key in code)}
    code |= {key: text for key, text in _texts("", recipe) if key not in told}
    for key, function in code.items():
        if isinstance(function, str):
            yield from _code(key, function)


def _of_arguments(recipe: Recipe) -> Iterator[tuple[str, tuple[str, dict[str, Any] | None]]]:
    """What arguments name: with `warns`, but for the models of stages."""
    arguments = {f"rewards.{place}.args": reward.args for place, reward in enumerate(recipe.rewards)}
    arguments |= {"data.task_args": recipe.data.task_args, "environment.args": recipe.environment.args}
    arguments |= {"rollout.engine.args": recipe.rollout.engine.args}
    arguments |= {"environment.harness": recipe.environment.harness} if isinstance(recipe.environment.harness, tuple) else {}
    own = run_folder(recipe).resolve()
    for key, value in arguments.items():
        for place, text in _texts(key, value):
            written = _WRITTEN.intersection(re.split(r"[^a-z0-9]+", place.rpartition(".args.")[2].lower()))
            if written or not re.search(r"[/\\.]", text):  # a word alone is no path
                continue
            if (stage := _stage(text)) is not None:
                yield place, (text, stage)
            elif (content := _file(text, LARGE) or _folder(text, own)) is not None:
                yield place, (text, content | {"warns": True})


_WRITTEN = frozenset(
    ["cache", "caches", "log", "logs", "out", "output", "outputs", "save", "saves", "temp", "tmp", "workdir", "write"]
)
"""Words in the name of an argument that names what is written to: nothing is said of its changes."""
LARGE = 1 << 26
"""Bytes of a file that an argument names, above which its size and time stand for its content."""
ENTRIES = 4096
"""Files of a folder that are looked at, in the order of their names within each folder."""


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every text in settings, by its dotted key."""
    if isinstance(value, str):
        if not isinstance(value, Live):
            yield key, str(value)
        return
    if is_dataclass(value):
        inside = [(one.name, getattr(value, one.name)) for one in fields(value)]
    elif isinstance(value, Mapping):
        inside = [(str(name), inner) for name, inner in value.items()]
    else:
        inside = [(str(place), inner) for place, inner in enumerate(value)] if isinstance(value, list | tuple) else []
    for name, inner in inside:
        yield from _texts(f"{key}.{name}".lstrip("."), inner)


def _data(source: str, split: str) -> dict[str, Any] | None:
    try:
        return fingerprint(source, split)
    except (DataError, OSError):  # whoever reads it says what is wrong
        return None


def _file(path: str, large: int | None = None) -> dict[str, Any] | None:
    """large: bytes above which a file is known by its size and time, not by its content."""
    try:
        file = expanded(path)
        if not file.is_file():
            return None
        state = file.stat()
        if large is not None and state.st_size > large:
            return {"size": state.st_size, "mtime_ns": state.st_mtime_ns}
        return {"size": state.st_size, "xxh3_128": files.digest(file)}
    except (OSError, ValueError):  # no path at all: a text that is too long, or with a NUL in it
        return None


def _folder(path: str, own: Path) -> dict[str, Any] | None:
    """Number and size of a folder's first `ENTRIES` files and one digest of their names, sizes and times, hidden ones left out.

    None for one that is worked in: it holds the run's own folder or lies in it, or holds the working directory.
    """
    try:
        folder = expanded(path).resolve()
        if not folder.is_dir() or folder.is_relative_to(own):
            return None
        if any(place.is_relative_to(folder) for place in (own, Path.cwd().resolve(), Path.home().resolve())):
            return None
        states = [(str(file.relative_to(folder)), file.stat()) for file in islice(_walked(folder), ENTRIES)]
        parts = [f"{name} {state.st_size} {state.st_mtime_ns}".encode() for name, state in states]
        return {"files": len(states), "size": sum(state.st_size for _, state in states), "digest": short_digest(parts)}
    except (OSError, ValueError):
        return None


def _walked(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _hidden(name))
        yield from (Path(here, name) for name in sorted(names) if not _hidden(name) and Path(here, name).is_file())


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _stage(path: str) -> dict[str, Any] | None:
    """The weights of a run that has finished, if its final model is what the path names."""
    digest = model_digest(Path(path).parent)
    return None if digest is None else {"weights": digest}


def _weights(path: str) -> dict[str, Any] | None:
    """The weights in a model's folder: of a stage as `_stage` names them, but as they are now.  None of a name of the hub."""
    try:
        found = _weight_files(path)
        digests = " ".join(map(files.digest, found))
        size = sum(file.stat().st_size for file in found)
    except (OSError, ValueError, AttributeError, RecursionError, ConfigError):  # whoever reads it says what is wrong
        return None
    if not found:
        return None
    return {"size": size, "xxh3_128": digests} if _stage(path) is None else {"weights": digests}


def _weight_files(path: str) -> list[Path]:
    """Files with a model's weights; of an adapter also those of its base."""
    folder = expanded(checkpoint_folder(path))
    own = sorted(folder.glob("*.safetensors")) or sorted([*folder.glob("pytorch_model*.bin"), *folder.glob("adapter_model.bin")])
    return [*own, *_weight_files(read_adapter(folder))] if (folder / ADAPTER_CONFIG).is_file() else own


def _code(key: str, function: str) -> Iterator[tuple[str, tuple[str, dict[str, Any] | None]]]:
    """The file of `file.py:function` or `module:function`, and the own files that it imports."""
    if not isinstance(function, Live) and (file := user_code.file_of(function)) is not None:
        yield key, (function, _file(str(file)))
        for name, path in user_code.imported_files(file).items():
            yield f"{key} imports {name}", ("", _file(str(path)))


def check_inputs(folder: Path, now: Inputs, *, accept: bool) -> None:
    """Compare with what the run in a folder was last trained on.

    accept: go on with what is there now.   Raises ConfigError with everything that changed.
    """
    then = _last(folder)
    different = {key: _difference(key, then[key], now[key]) for key in sorted(then.keys() & now.keys()) if then[key] != now[key]}
    different |= {
        key: f"{key}: {then[key].get('source') or 'it'} is not there any more" for key in sorted(then.keys() - now.keys())
    }
    warned = [key for key in different if then[key].get("warns") or now.get(key, {}).get("warns")]
    for key in warned:
        log.warning("since the run began, what an argument names has changed; the run goes on.  %s", different.pop(key))
    if different and not accept:
        lines = "\n".join(f"  {line}" for line in different.values())
        raise ConfigError(
            f"{folder} was begun with other inputs than there are now; bring them back, start anew (fresh=True), or "
            f"go on with what there is now (accept_changes=True)\n{lines}"
        )


def _difference(key: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    source = now.get("source")
    named = f"{key} {source}".rstrip()
    if "weights" in now:
        return f"{named}: the stage has been trained again, or its files were changed: its weights are others"
    if "fingerprint" in now:
        return f"{named}: the data set has changed (fingerprint {then.get('fingerprint')} then, {now['fingerprint']} now)"
    sizes = (then.get("size"), now.get("size"))
    told = (
        f"{sizes[0]:,} bytes then, {sizes[1]:,} now" if sizes[0] != sizes[1] and None not in sizes else f"{sizes[1]} bytes, others"
    )
    return f"{named}: its content has changed ({told})"


def record_inputs(folder: Path, now: Inputs, done: int) -> None:
    """Keep what a run is trained on from now on, beside what it was trained on before, if that is something else."""
    history = _history(folder) if done else []
    if not history or history[-1].get("inputs") != now:
        entry = {"after_step": done, "time": time.time(), "inputs": now}
        with files.storing(folder / INPUTS, "the inputs of the run"):
            RunFiles(folder).write(INPUTS, json.dumps({"history": [*history, entry]}, indent=1).encode())


def _last(folder: Path) -> Inputs:
    history = _history(folder)
    found = history[-1].get("inputs") if history else None
    inputs = {key: value for key, value in found.items() if isinstance(value, dict)} if isinstance(found, dict) else {}
    if inputs != found and RunFiles(folder).has(INPUTS):
        log.warning("%s is damaged: whether data, code or models have changed since the run began cannot be told", folder / INPUTS)
    return inputs


def _history(folder: Path) -> list[dict[str, Any]]:
    """What `record_inputs` wrote; nothing if that is not there (an older run), or damaged."""
    try:
        return [{**entry} for entry in RunFiles(folder).json(INPUTS)["history"]]
    except (RunError, KeyError, TypeError):
        return []
