"""The inputs of a run beside its recipe: the contents of the files that the recipe names.

A recipe names files, and a file can change while its name stays.  Digests of their contents are
written to the run folder (`inputs.json`) when a run begins; a resumed run whose inputs have changed
is refused unless the changes are accepted.

Inputs are data files, the file behind each name of code (`trust.named_code`), weights that no
checkpoint holds, and an adapter that a run goes on with.  Of an object of the running program only
the name counts, and what a file of code imports or reads is not looked at.  What an earlier stage
leaves (`resolved`) is a folder or a file too.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.config.live_objects import Live
from groupwise.config.recipes import run_folder
from groupwise.config.settings import ModelSettings, Recipe
from groupwise.config.validation import STAGE
from groupwise.data.sources import fingerprint
from groupwise.distributed import comm
from groupwise.errors import ConfigError, DataError, RunError
from groupwise.models.gguf import checkpoint_folder
from groupwise.models.lora import ADAPTER_CONFIG, FILE, FOLDER, adapter_folder, read_adapter
from groupwise.rewards.registry import MODEL
from groupwise.runs.final_model import model_digest
from groupwise.runs.folder import FINAL
from groupwise.runs.rollout_files import list_rollouts, read_step
from groupwise.runs.run_files import RunFiles
from groupwise.runs.trust import named_code
from groupwise.training.preferences import preference_rows
from groupwise.utils import files
from groupwise.utils.files import expanded
from groupwise.utils.redaction import redacted
from groupwise.utils.spelling import counted
from groupwise.utils.terminal import logger

log = logger(__name__)

INPUTS = "inputs.json"
Inputs = dict[str, dict[str, Any]]
"""Dotted key of the recipe -> what it names (`source`) and what that holds: size and xxh3-128 of a
file or of a model's weights, the fingerprint of a hub's data set, the digests of a finished stage's
weights."""


def inputs_of(recipe: Recipe) -> Inputs:
    """The inputs of a recipe whose `stage:NAME` are folders and files already.  What is not there,
    or damaged, is left out.
    """
    inputs: Inputs = {}
    for key, source, read in _named(recipe):
        try:
            content = read()
        except (ConfigError, DataError, OSError, ValueError, AttributeError, RecursionError):
            continue  # whoever reads it says what is wrong
        if content is not None:
            inputs[key] = {"source": redacted(source), **content}
    return inputs


def _named(recipe: Recipe) -> Iterator[tuple[str, str, Callable[[], dict[str, Any] | None]]]:
    """Dotted keys, what they name, and a way to what that holds; None where nothing is there.

    Of weights those that are read again on resume: checkpoints hold all weights of a policy without
    an adapter.
    Rows in memory are left out: their name has a digest of them.
    """
    data, replay = recipe.data, recipe.reward_model.replay
    rows = {
        "data.path": (data.path, data.split),
        "data.eval_path": (data.eval_path, data.eval_split),
        "reward_model.replay.path": (replay and replay.path, data.split),
    }
    for key, (source, split) in rows.items():
        if isinstance(source, str) and not isinstance(source, Live):
            yield key, source, partial(fingerprint, source, split)
    models = {
        "model": recipe.model.path,
        "critic": recipe.critic.path,
        "teacher": recipe.teacher.path,
    }
    for place, reward in enumerate(recipe.rewards):
        if reward.function == MODEL:
            models[f"rewards.{place}.args"] = reward.args.get("path")
    for key, path in models.items():
        if isinstance(path, str) and not isinstance(path, Live):
            saved = key == "model" and recipe.model.lora is None
            yield f"{key}.path", path, partial(_stage if saved else _weights, path)
    lora = recipe.model.lora
    if lora is not None and lora.start is not None:
        yield "model.lora.start", lora.start, partial(_file, f"{lora.start}/{FILE}")
    template = recipe.model.chat_template
    if template is not None:
        yield "model.chat_template", template, partial(_file, template)
    for key, text in named_code(recipe):
        file = code_file(text)
        if file is not None:
            yield key, text, partial(_file, str(file))


def code_file(text: str) -> Path | None:
    """The file of `file.py:NAME` or `module:NAME`, without importing it; None if the text names
    none.

    >>> code_file("json.decoder:JSONDecoder").name, code_file("ws://host:1"), code_file("accuracy")
    ('decoder.py', None, None)
    """
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        return None
    if place.endswith(".py"):
        candidates = [expanded(place)]
    elif all(part.isidentifier() for part in place.split(".")):
        candidates = _module_files(place)
    else:
        candidates = []
    for file in candidates:
        with suppress(OSError, ValueError):  # no path: too long a text, or with a NUL
            if file.is_file():
                return file
    return None


def _module_files(module: str) -> list[Path]:
    """Where a module's file may lie: the packages above it are not imported."""
    first, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError, AttributeError):  # `__main__` has none
        spec = None
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded is not None:
        return [Path(loaded)]
    roots = [str(Path.cwd() / first)]
    if spec is not None:
        if not inner:
            return [Path(spec.origin)] if spec.origin is not None else []
        roots = spec.submodule_search_locations or ()
    candidates = []
    for root in roots:
        place = Path(root, *inner)
        candidates += [place / "__init__.py", Path(f"{place}.py")]
    return candidates


def _file(path: str) -> dict[str, Any] | None:
    file = expanded(path)
    if not file.is_file():
        return None
    return {"size": file.stat().st_size, "xxh3_128": files.digest(file)}


def _stage(path: str) -> dict[str, Any] | None:
    """The weights of a run that has finished, if its final model is what the path names."""
    digest = model_digest(Path(path).parent)
    return None if digest is None else {"weights": digest}


def _weights(path: str) -> dict[str, Any] | None:
    """The weights in a model's folder: of a stage as `_stage` names them, but as they are now.
    None of a name of the hub.
    """
    paths = _weight_files(path)
    if not paths:
        return None
    digests = " ".join(map(files.digest, paths))
    if _stage(path) is not None:
        return {"weights": digests}
    return {"size": sum(file.stat().st_size for file in paths), "xxh3_128": digests}


def _weight_files(path: str) -> list[Path]:
    """Files with a model's weights; of an adapter also those of its base."""
    folder = expanded(checkpoint_folder(path))
    paths = sorted(folder.glob("*.safetensors")) or sorted(
        [*folder.glob("pytorch_model*.bin"), *folder.glob("adapter_model.bin")]
    )
    if (folder / ADAPTER_CONFIG).is_file():
        paths += _weight_files(read_adapter(folder))
    return paths


def check_inputs(folder: Path, now: Inputs, *, accept: bool) -> None:
    """Compare with what the run in a folder was last trained on.

    accept: go on with what is there now.   Raises ConfigError with everything that changed.
    """
    then = _last(folder)
    different = changed_inputs(then, now)
    for key in sorted(then.keys() - now.keys()):
        different.append(f"{key}: {then[key].get('source') or 'it'} is not there any more")
    if different and not accept:
        lines = "\n".join(f"  {line}" for line in different)
        raise ConfigError(
            f"{folder} was begun with other inputs than there are now; bring them back, start anew"
            f" (fresh=True), or go on with what there is now (accept_changes=True)\n{lines}"
        )


def warn_of_changed_inputs(folder: Path, now: Inputs) -> None:
    """Name what has changed since the run in a folder was last trained."""
    for line in changed_inputs(_last(folder), now):
        log.warning(
            "since %s was trained this has changed, and is used as it is now: %s", folder, line
        )


def changed_inputs(then: Inputs, now: Inputs) -> list[str]:
    """A line for every input that is there and holds something else than it did."""
    shared = sorted(then.keys() & now.keys())
    return [_difference(key, then[key], now[key]) for key in shared if then[key] != now[key]]


def _difference(key: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    source = now.get("source")
    named = f"{key} {source}".rstrip()
    if "weights" in now:
        return (
            f"{named}: the stage has been trained again, or its files were changed: its weights are"
            " others"
        )
    if "fingerprint" in now:
        return (
            f"{named}: the data set has changed (fingerprint {then.get('fingerprint')} then,"
            f" {now['fingerprint']} now)"
        )
    before, after = then.get("size"), now.get("size")
    change = "as many bytes, but not the same"
    if before != after and before is not None and after is not None:
        change = f"{before:,} bytes then, {after:,} now"
    return f"{named}: its content has changed ({change})"


def record_inputs(folder: Path, now: Inputs, done: int) -> None:
    """Keep what a run is trained on from now on, beside what it was trained on before, if that is
    something else.
    """
    history = _history(folder) if done else []
    if not history or history[-1].get("inputs") != now:
        entry = {"after_step": done, "time": time.time(), "inputs": now}
        text = json.dumps({"history": [*history, entry]}, indent=1)
        with files.storing(folder / INPUTS, "the inputs of the run"):
            RunFiles(folder).write(INPUTS, text.encode())


def _last(folder: Path) -> Inputs:
    history = _history(folder)
    record = history[-1].get("inputs") if history else None
    inputs = {}
    if isinstance(record, dict):
        inputs = {key: value for key, value in record.items() if isinstance(value, dict)}
    if inputs != record and RunFiles(folder).has(INPUTS):
        log.warning(
            "%s is damaged: whether data, code or models have changed since the run began cannot be"
            " told",
            folder / INPUTS,
        )
    return inputs


def _history(folder: Path) -> list[dict[str, Any]]:
    """What `record_inputs` wrote; nothing if that is not there (an older run), or damaged."""
    try:
        return [{**entry} for entry in RunFiles(folder).json(INPUTS)["history"]]
    except (RunError, KeyError, TypeError):
        return []


# ---------------------------------------------------------------- what an earlier stage leaves


def recorded_pairs(folder: Path, judge: str | None = None) -> Path:
    """Write `preference_rows` of all that a run recorded (`rollouts/`) into a file of the run's
    folder, which is returned.

    Raises DataError if the run recorded nothing, or nothing with a difference.
    """
    steps, rows = list_rollouts(folder), []
    for step in steps:
        rows += preference_rows(read_step(folder, step).groups, judge)
    if not rows:
        raise DataError(
            f"{folder} holds no pair: {counted(len(steps), 'recorded step')} (save.rollouts_every),"
            " none with a difference"
        )
    path = folder / ("pairs.jsonl" if judge is None else f"pairs-{judge}.jsonl")
    lines = [json.dumps(row, default=str) + "\n" for row in rows]
    files.write(path, "".join(lines).encode())
    return path


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with every `stage:NAME` replaced: by the folder of that stage's final model (the
    model's, the rewards'), or by a file of pairs that are made of what the stage sampled (the
    data's; `stage:NAME:REWARD` by that reward).

    Raises ConfigError if it is not there.
    """
    path, data = recipe.model.path, recipe.data.path
    if path is not None:
        model = replace(recipe.model, path=_folder_of(path, recipe, "model.path"))
        if model.lora is not None:  # of a stage that has finished
            _folder_of(model.lora.start, recipe, "model.lora.start")
        recipe = replace(recipe, model=with_start(model, run_folder(recipe).parent))
    if data is not None and data.startswith(STAGE):
        stage, _, judge = data.removeprefix(STAGE).partition(":")
        folder = Path(_folder_of(f"{STAGE}{stage}", recipe, "data.path")).parent
        pairs = comm.from_first(lambda: str(recorded_pairs(folder, judge or None)))
        recipe = replace(recipe, data=replace(recipe.data, path=pairs))
    critic = replace(recipe.critic, path=_folder_of(recipe.critic.path, recipe, "critic.path"))
    rewards = []
    for place, reward in enumerate(recipe.rewards):
        args = {}
        for key, value in reward.args.items():
            args[key] = _folder_of(value, recipe, f"rewards.{place}.args.{key}")
        rewards.append(replace(reward, args=args))
    teacher = replace(recipe.teacher, path=_folder_of(recipe.teacher.path, recipe, "teacher.path"))
    return replace(recipe, rewards=tuple(rewards), critic=critic, teacher=teacher)


def with_start(model: ModelSettings, stages: Path) -> ModelSettings:
    """The settings with the folder of the adapter that `model.lora.start` means: of an earlier
    stage, beside a merged model, or the folder itself.

    stages: the folder of the run folders of all stages.
    """
    lora = model.lora
    if lora is None or lora.start is None:
        return model
    if lora.start.startswith(STAGE):
        folder = stages / lora.start.removeprefix(STAGE) / FINAL / FOLDER
    else:
        folder = adapter_folder(expanded(lora.start))
    return replace(model, lora=replace(lora, start=str(folder)))


def _folder_of(value: Any, recipe: Recipe, key: str) -> Any:
    """A value of a recipe; the folder of a stage's final model where it is `stage:NAME`."""
    if not isinstance(value, str) or not value.startswith(STAGE):
        return value
    stage = value.removeprefix(STAGE)
    folder = run_folder(recipe).parent / stage / FINAL
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{key}: the stage {stage!r} has not finished: there is no model in {folder}"
        )
    return str(folder)
