"""What the keys of a recipe must be together: checks that look at more than one value, at files and at names.

Each check yields the dotted keys it looked at and a message; `recipes.py` adds the line of the file.  Nothing here imports torch or
reads a weight, so that a recipe is refused in a fraction of a second.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from groupwise.algorithms.divergences import Jsd
from groupwise.algorithms.resolve import adapted, conflicts, part_problems
from groupwise.algorithms.table import ALGORITHMS, PARTS, Algorithm
from groupwise.config.engines import ENGINES, engine_traits
from groupwise.config.live_objects import LIVE
from groupwise.config.packaged_models import is_packaged, not_fetched, packaged_folder
from groupwise.config.schema import show
from groupwise.config.settings import (
    DATA_SUFFIXES,
    DATASET,
    OBJECTIVES,
    REWARDS,
    TASKS,
    CriticSettings,
    EngineSettings,
    GroupSettings,
    Part,
    Recipe,
    TeacherSettings,
    is_online,
    verdict_of,
)
from groupwise.utils.files import expanded
from groupwise.utils.spelling import closest, near_path, nearest

Finding = tuple[tuple[str, ...], str]
"""The dotted keys that a check looked at, most telling first, and what is wrong with them."""

STAGE = "stage:"
"""Prefix of a path that means the final model of an earlier stage."""

PAIRED = ("reward", "dpo")
"""Objectives that learn from pairs, which an earlier stage can have sampled."""


def validate_recipe(recipe: Recipe, earlier: Sequence[str] = ()) -> list[Finding]:
    """Everything wrong with a recipe whose single values are in range.

    earlier: names of the stages that run before this one, which `stage:NAME` may refer to.
    """
    return [finding for check in _CHECKS for finding in check(recipe, earlier)]


def _objective(recipe: Recipe, _: Sequence[str]) -> Iterator[Finding]:
    if ":" not in recipe.objective and recipe.objective not in OBJECTIVES:
        names = f"one of {', '.join(OBJECTIVES)}; got {recipe.objective!r}{closest(recipe.objective, OBJECTIVES)}"
        yield ("objective",), f"objective must be {names}"
    elif ":" in recipe.objective and (wrong := _wrong_name(recipe.objective, "NAME")):
        yield ("objective",), f"objective: {wrong}"
    if not re.fullmatch(r"\w[\w.+-]*(/\w[\w.+-]*)?", recipe.name):
        yield ("name",), f"name must be a folder name (letters, digits, . _ + -), got {recipe.name!r}"


def _length(recipe: Recipe, _: Sequence[str]) -> Iterator[Finding]:
    if recipe.steps is not None and recipe.epochs is not None:
        yield ("epochs", "steps"), f"say steps ({recipe.steps}) or epochs ({recipe.epochs:g}), not both"
    if is_online(recipe.objective) and recipe.steps is None:
        instead = " (epochs are for data-set objectives)" if recipe.epochs is not None else ""
        yield ("steps", "epochs", "objective"), f"steps is missing: {recipe.objective!r} needs the number of rollouts{instead}"
    if recipe.objective in DATASET and recipe.steps is None and recipe.epochs is None:
        yield ("steps", "epochs", "objective"), f"steps is missing: say steps or epochs for {recipe.objective!r}"
    if recipe.steps is not None and recipe.optimizer.warmup_steps > _updates(recipe):
        warmup, updates = recipe.optimizer.warmup_steps, _updates(recipe)
        message = f"optimizer.warmup_steps ({warmup}) is more than all {updates} optimizer steps: lower it, or raise steps"
        yield ("optimizer.warmup_steps", "steps"), message


def _updates(recipe: Recipe) -> int:
    """Optimizer steps of the policy in the whole run; `steps` must be set."""
    per_step = recipe.group.updates_per_rollout * recipe.group.minibatches if is_online(recipe.objective) else 1
    return max((recipe.steps or 0) - recipe.critic.pretrain, 0) * per_step


def _model(recipe: Recipe, earlier: Sequence[str]) -> Iterator[Finding]:
    model = recipe.model
    if model.path is not None and model.scratch is not None:
        yield ("model.scratch", "model.path"), "say model.path (a checkpoint) or model.scratch (random weights), not both"
    if model.path is None and model.scratch is None:
        yield ("model.path", "model"), "model.path is missing: a checkpoint folder, a hub name, or model.scratch for random weights"
    if model.path is not None and (wrong := wrong_model(model.path, earlier)):
        yield ("model.path",), f"model.path: {wrong}"
    template = model.chat_template
    if template is not None and template.endswith(".jinja") and (wrong := _unspeakable(template)):
        yield ("model.chat_template",), f"model.chat_template: {wrong}"
    elif template is not None and template.endswith(".jinja") and not expanded(template).is_file():
        yield ("model.chat_template",), f"model.chat_template: no such file {template!r}"


def _unspeakable(path: str) -> str | None:
    """Why nothing on a disk can have this path, or None."""
    longest = max(len(part.encode("utf-8", "surrogatepass")) for part in path.split("/"))
    if longest > 255 or len(path) >= 4096:
        return f"no file or folder can have a name of {len(path):,} characters ({path[:20]!r} ...)"
    return None


def wrong_model(path: str, earlier: Sequence[str] = ()) -> str | None:
    """Why a model cannot come from `path` (a folder, a hub name or stage:NAME), or None.

    A path that is no hub name, or that lies in a folder that exists, is never looked for on the hub.
    """
    if path.startswith(LIVE):  # whoever needs the object says if it is not there
        return None
    if path.startswith(STAGE):
        stage = path.removeprefix(STAGE)
        if stage in earlier:
            return None
        known = f"earlier stages are {', '.join(earlier)}" if earlier else "there is no earlier stage"
        return f"no stage {stage!r} runs before this one ({known}){closest(stage, earlier)}"
    if wrong := _unspeakable(path):
        return wrong
    if is_packaged(path):
        return None if packaged_folder(path).is_dir() else not_fetched(path)
    folder = expanded(path)
    if folder.is_file() and folder.suffix.lower() == ".gguf":
        return None
    if folder.is_dir():
        if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")) or any(folder.glob("*.gguf")):
            return None
        inside = sorted(
            str(one.parent.relative_to(folder)) for one in (*folder.glob("final/config.json"), *folder.glob("*/final/config.json"))
        )
        meant = f"; did you mean {path.rstrip('/')}/{inside[0]}?" if inside else ""
        return f"the folder {path!r} is not a model: it holds no config.json{meant}"
    if folder.exists():
        return f"{path!r} is a file; a model is a folder in Hugging Face's format, or a .gguf file"
    if _means_local(path):
        return f"no such folder {path!r}{near_path(folder)}"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE") and not _cached("models", path):
        return f"no such folder {path!r}; as a hub name it is not in the cache, and HF_HUB_OFFLINE forbids fetching it"
    return None


def _means_local(path: str) -> bool:
    """True if a path that does not exist cannot be a hub name (`name` or `owner/name`), or is unlikely to be one."""
    first = path.split("/", 1)[0]
    return not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) or first in (".", "..", "~") or Path(first).is_dir()


def _cached(kind: str, name: str) -> bool:
    """True if Hugging Face's cache holds the repository (whether complete is for transformers to say)."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return (expanded(cache) / f"{kind}--{name.replace('/', '--')}").is_dir()


def _lora(recipe: Recipe, _: Sequence[str]) -> Iterator[Finding]:
    at = "model.lora"
    if recipe.model.lora is None:
        return
    if recipe.model.scratch is not None:
        yield (at, "model.scratch"), f"{at} trains beside weights that stay as they are; those of model.scratch are random"
    if recipe.group.reference_refresh:
        message = f"{at}: the reference is what lies under the adapter and cannot move: leave group.reference_refresh out"
        yield (at, "group.reference_refresh"), message


def _replay(recipe: Recipe, _: Sequence[str]) -> Iterator[Finding]:
    replay, at = recipe.reward_model.replay, "reward_model.replay"
    if replay is None:
        return
    if (replay.path is None) == (replay.task is None):
        yield (at,), f"{at} needs the path of a file of older pairs, or a task: {{path: old.jsonl, share: 0.1}}"
    elif replay.path is not None and (wrong := _wrong_data(replay.path)):
        yield (f"{at}.path", at), f"{at}.path: {wrong}"
    elif replay.task is not None and (wrong := _wrong_choice(replay.task, TASKS)):
        yield (f"{at}.task", at), f"{at}.task {wrong}"


def _scratch(recipe: Recipe, _: Sequence[str]) -> Iterator[Finding]:
    scratch = recipe.model.scratch
    if scratch is None:
        return
    at = "model.scratch."
    if scratch.hidden % scratch.heads:
        near = _nearest_multiples(scratch.hidden, scratch.heads)
        message = f"model.scratch.heads ({scratch.heads}) must divide model.scratch.hidden ({scratch.hidden}; nearest: {near})"
        yield (at + "heads", at + "hidden"), message
    elif scratch.family != "gpt2" and (scratch.hidden // scratch.heads) % 2:
        message = (
            f"a head is {scratch.hidden // scratch.heads} wide; rotary positions need an even width (model.scratch.hidden / heads)"
        )
        yield (at + "heads", at + "hidden"), message
    if scratch.kv_heads is not None and scratch.heads % scratch.kv_heads:
        message = f"model.scratch.kv_heads ({scratch.kv_heads}) must divide model.scratch.heads ({scratch.heads})"
        yield (at + "kv_heads", at + "heads"), message
    prompt, new = recipe.data.max_prompt_tokens or 1, recipe.rollout.max_new_tokens
    if is_online(recipe.objective) and prompt + new > scratch.context:
        longest = "a prompt of 1 token" if recipe.data.max_prompt_tokens is None else f"data.max_prompt_tokens ({prompt})"
        words = f"{longest} + rollout.max_new_tokens ({new})"
        keys = ("rollout.max_new_tokens", "data.max_prompt_tokens", at + "context")
        yield keys, f"{words} is {prompt + new}, more than model.scratch.context ({scratch.context})"
    kind = scratch.tokenizer
    known = kind in ("arithmetic", "bytes") or re.fullmatch(r"bpe:\d+", kind)
    if not known and (wrong := _unspeakable(kind)):
        yield (at + "tokenizer",), f"model.scratch.tokenizer: {wrong}"
    elif not known and not expanded(kind).is_dir():
        message = f"model.scratch.tokenizer: no such folder {kind!r}, and it is not arithmetic, bytes or bpe:N"
        yield (at + "tokenizer",), message + closest(kind, ("arithmetic", "bytes"))


def _nearest_multiples(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def _data(recipe: Recipe, earlier: Sequence[str]) -> Iterator[Finding]:
    data = recipe.data
    sampled = data.path is not None and data.path.startswith(STAGE)
    if sampled and recipe.objective not in PAIRED:
        yield ("data.path", "objective"), f"data.path: {data.path!r} means pairs, which {' and '.join(PAIRED)} learn from"
    elif sampled and (wrong := wrong_model(STAGE + str(data.path).split(":")[1], earlier)):
        yield ("data.path",), f"data.path: {wrong}"
    if data.path is not None and data.task is not None:
        yield ("data.task", "data.path"), "say data.path (a file or a hub name) or data.task (a generated task), not both"
    if recipe.environment.reasoning_gym is not None:
        if data.path is not None or data.task is not None:
            message = "environment.reasoning_gym brings its own rows: leave data.path and data.task out"
            yield ("environment.reasoning_gym", "data.path", "data.task"), message
    elif data.path is None and data.task is None and recipe.environment.verifiers is None:
        yield ("data.path", "data"), "data.path is missing: a .jsonl, .json or .parquet file, a hub name, or data.task"
    if data.task is not None and (wrong := _wrong_choice(data.task, TASKS)):
        yield ("data.task",), f"data.task {wrong}"
    if data.task is None and data.task_args:
        yield ("data.task_args",), "data.task_args belongs to data.task, which is not set"
    for key, path in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        if path is not None and not (sampled and key == "data.path") and (wrong := _wrong_data(path)):
            yield (key,), f"{key}: {wrong}"
    if data.eval_path is not None and data.parts:
        message = f"say data.eval_path or data.eval_fraction ({show(data.eval_fraction)}), not both"
        yield ("data.eval_fraction", "data.eval_path"), message
    if unknown := sorted(data.parts.keys() - {"test", "validation"}):
        message = f"data.eval_fraction has parts test and validation, not {', '.join(unknown)}"
        yield ("data.eval_fraction",), message
    elif "validation" in data.parts and "test" not in data.parts:
        yield (
            ("data.eval_fraction",),
            "data.eval_fraction holds out validation but no test: what is reported would be what was watched",
        )
    if sum(data.parts.values()) >= 1:
        yield ("data.eval_fraction",), f"data.eval_fraction holds out everything: its parts sum to {sum(data.parts.values()):g}"
    if data.template is not None and (wrong := _wrong_template(data.template)):
        yield ("data.template",), f"data.template: {wrong}"
    for ours, theirs in data.columns.items():
        near = nearest(ours, ROW, cutoff=0.85)
        if near is not None and ours not in ROW and f"{ours}s" != near:  # `message` may be a column that a reward asks for
            message = f"data.columns names ours: yours; nothing reads a column {ours!r}: write {{{near}: {theirs}}}"
            yield (f"data.columns.{ours}", "data.columns"), message


ROW = ("prompt", "messages", "completion", "chosen", "rejected")
"""Columns that rows are read from, whatever the reward functions ask for."""


def _wrong_data(path: str) -> str | None:
    """Why rows cannot come from `path`, or None."""
    if path.startswith(LIVE):
        return None
    if wrong := _unspeakable(path):
        return wrong
    file = expanded(path)
    if file.is_dir():
        return f"{path!r} is a folder: give one of its files ({', '.join(DATA_SUFFIXES)})"
    if file.is_file():
        return None if file.suffix.lower() in DATA_SUFFIXES else f"{path!r} is none of {', '.join(DATA_SUFFIXES)}"
    repository = path.partition(":")[0]  # `owner/name:config`
    if file.suffix in DATA_SUFFIXES or _means_local(repository):
        return f"no such file {path!r}{near_path(file)}"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE") and not _cached("datasets", repository):
        return f"no such file {path!r}; as a hub name it is not in the cache, and HF_HUB_OFFLINE forbids fetching it"
    return None


def _wrong_template(template: str, *, constant: bool = False) -> str | None:
    """What is wrong with a format string over columns, or None.   constant: it may name none."""
    if template == "alpaca":
        return None
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        return f"not a Python format string ({error}); write {{{{ and }}}} for braces"
    if not names and not constant:
        return f"{template!r} names no column; write {{column}} where its text goes"
    if "" in names:
        return "{} names no column; write {column}"
    return None


def _scored(recipe: Recipe) -> bool:
    """True if completions have a reward: of a function, or perhaps of what answers the policy."""
    environment = recipe.environment
    return bool(recipe.rewards or environment.asks or environment.factory or environment.reasoning_gym or environment.openenv)


def _rewards(recipe: Recipe, earlier: Sequence[str]) -> Iterator[Finding]:
    if is_online(recipe.objective) and not _unknown_credit(recipe) and _algorithm(recipe).needs_reward and not _scored(recipe):
        yield ("rewards",), f"rewards is missing: {recipe.objective!r} needs at least one, e.g. [{{function: accuracy}}]"
    names: dict[str, int] = {}
    for place, reward in enumerate(recipe.rewards):
        at = f"rewards.{place}."
        if wrong := _wrong_function(reward.function):
            yield (at + "function",), f"rewards.{place}.function: {wrong}"
        name = reward.name or reward.function.rpartition(":")[2]
        if name in names:
            message = f"two rewards are called {name!r}; give one of them another name"
            yield (at + "name", at + "function"), message
        names[name] = place
        for key, value in reward.args.items():
            if isinstance(value, str) and value.startswith(STAGE) and (wrong := wrong_model(value, earlier)):
                yield (f"{at}args.{key}",), f"rewards.{place}.args.{key}: {wrong}"
    known = [*names, *(["environment"] if not recipe.rewards else [])]
    if recipe.verdict is not None and recipe.verdict not in known:
        there = f"the rewards are {', '.join(known)}" if known else "there are no rewards"
        message = f"verdict: there is no reward {recipe.verdict!r}{closest(recipe.verdict, known)}; {there}"
        yield ("verdict", "rewards"), message
    if recipe.rewards and all(reward.weight == 0 for reward in recipe.rewards):
        yield ("rewards.0.weight",), "every reward has weight 0: nothing would be learnt"


def _wrong_function(function: str) -> str | None:
    """Why a reward function cannot be found, or None.  Modules are not imported here."""
    if ":" not in function:
        if function in REWARDS:
            return None
        got = f"got {function!r}{closest(function, REWARDS)}"
        return f"must be one of {', '.join(REWARDS)}, module:function or file.py:function; {got}"
    return _wrong_name(function)


def _wrong_name(function: str, kind: str = "function") -> str | None:
    """Why there can be nothing behind `module:function` or `file.py:function`, or None."""
    if function.startswith(LIVE):
        return None
    if ":" not in function:
        return f"must be module:{kind} or file.py:{kind}, got {function!r}"
    place, _, name = function.rpartition(":")
    if not name.isidentifier():
        return f"{name!r} is not the name of a {kind} (write module:{kind} or file.py:{kind})"
    if place.endswith(".py"):
        if wrong := _unspeakable(place):
            return wrong
        file = expanded(place)
        return None if file.is_file() else f"no such file {place!r}{near_path(file)}"
    if all(part.isidentifier() for part in place.split(".")):
        return None
    return f"{place!r} is neither a module nor a .py file"


def _environment(recipe: Recipe, _: Sequence[str]) -> Iterator[Finding]:
    environment, at = recipe.environment, "environment"
    for place, tool in enumerate(environment.tools):
        if wrong := _wrong_name(tool):
            yield (f"{at}.tools.{place}", f"{at}.tools"), f"{at}.tools.{place}: {wrong}"
    names = [tool.rpartition(":")[2] for tool in environment.tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield (f"{at}.tools",), f"{at}.tools: two tools are called {twice!r}; the policy tells them apart by name"
    factories = (
        environment.factory
        if isinstance(environment.factory, Mapping)
        else {}
        if environment.factory is None
        else {"": environment.factory}
    )
    if isinstance(environment.factory, Mapping) and not environment.factory:
        yield (f"{at}.factory",), f"{at}.factory names no environment: write {{name: file.py:Class}}"
    for name, one in factories.items():
        key = f"{at}.factory.{name}" if name else f"{at}.factory"
        if wrong := _wrong_name(one, "Class"):
            yield (key, f"{at}.factory"), f"{key}: {wrong}"
    if environment.talks and recipe.objective in DATASET and recipe.objective != "sft":
        yield (
            (at, "objective"),
            f"{at}: {recipe.objective!r} samples no conversations and shows no tools: leave it out of this stage",
        )
    bringing = [name for name in ("tools", "factory", "openenv", "harness", "verifiers") if getattr(environment, name)]
    if len(bringing) > 1 and bringing != ["tools", "factory"]:
        named = " and ".join(f"{at}.{name}" for name in bringing)
        yield tuple(f"{at}.{name}" for name in bringing), f"{named}: who answers the policy is one of them"
    if environment.asks and not is_online(recipe.objective):
        key = f"{at}.{bringing[-1]}"
        yield (key, "objective"), f"{key}: {recipe.objective!r} samples no episodes: leave it out of this stage"
    path = recipe.data.path
    if environment.verifiers is not None and (recipe.data.task is not None or (path is not None and not path.startswith(LIVE))):
        message = f"{at}.verifiers brings its own rows: leave data.path and data.task out"
        yield (f"{at}.verifiers", "data.path", "data.task"), message
    if isinstance(environment.harness, tuple) and not environment.harness[0]:
        yield (f"{at}.harness",), f"{at}.harness: a program has a name, [python, agent.py]; got {show(environment.harness)}"
    if isinstance(environment.harness, str) and environment.harness != "outside" and (wrong := _wrong_name(environment.harness)):
        yield (f"{at}.harness",), f"{at}.harness: {wrong}; or write `outside`, or a program as a list, [python, agent.py]"
    if not re.fullmatch(r"([^\s:]+|\[[0-9a-fA-F:]+\]):\d{1,5}", environment.listen) or _has_wrong_port(f"//{environment.listen}"):
        yield (f"{at}.listen",), f"{at}.listen is written ADDRESS:PORT, with a port of at most 65535; got {environment.listen!r}"
    if environment.reasoning_gym is not None and not is_online(recipe.objective):
        message = f"{at}.reasoning_gym has prompts and a scorer, and no completions for {recipe.objective!r} to learn from"
        yield (f"{at}.reasoning_gym", "objective"), message
    if environment.interface is not None and environment.factory is None:
        yield (f"{at}.interface",), f"{at}.interface belongs to {at}.factory, which is not set"
    owners = ("factory", "reasoning_gym", "openenv", "harness", "verifiers")
    if environment.args and not any(getattr(environment, name) for name in owners):
        yield (f"{at}.args",), f"{at}.args are those of {', '.join(owners)}, and none is set"
    if environment.args and environment.factory is not None and environment.reasoning_gym is not None:
        yield (f"{at}.args", f"{at}.factory"), f"{at}.args: say whose they are: leave {at}.factory or {at}.reasoning_gym out"
    if environment.past == "split" and not (environment.talks or environment.asks):
        yield (f"{at}.past",), f"{at}.past is about conversations, and neither {at}.tools nor {at}.factory is set"
    if environment.talks and (recipe.data.task is not None or recipe.data.template is not None) and not recipe.data.chat:
        yield ("data.chat", "data.task", "data.template", at), f"{at}: conversations are chat messages: set data.chat: true"
    if environment.talks and _algorithm(recipe).mix:
        yield (at, "group.mix"), f"{at}: a teacher that helps to sample holds no conversations: set group.mix: 0"
    names = [reward.function for reward in recipe.rewards]
    if "environment" in names and not (environment.factory or environment.openenv or environment.asks):
        where = f"rewards.{names.index('environment')}.function"
        yield (where,), "the reward 'environment' needs environment.factory, openenv, harness or verifiers"


def _group(recipe: Recipe, _: Sequence[str]) -> Iterator[Finding]:
    group = recipe.group
    for kind in PARTS:
        yield from _wrong_part(kind, recipe)
    if not is_online(recipe.objective):
        return
    if group.minibatches > group.prompts_per_step:
        message = f"group.minibatches ({group.minibatches}) is more than group.prompts_per_step ({group.prompts_per_step})"
        yield ("group.minibatches", "group.prompts_per_step"), f"{message}: a minibatch holds at least one prompt"
    if not _unknown_credit(recipe):
        yield from conflicts(_algorithm(recipe), ALGORITHMS.get(recipe.objective, PLAIN), _known(recipe))
    # No preset has a KL of its own, so a beta that is not set is 0 too (a test asks the table); a row of the user's may have one.
    without = not group.beta and (group.beta is not None or ":" not in recipe.objective)
    if without and group.reference_refresh:
        message = f"group.reference_refresh is {group.reference_refresh}, but with group.beta 0 there is no reference to refresh"
        yield ("group.reference_refresh", "group.beta"), message
    if recipe.model.dtype == "bfloat16" and group.reference_refresh and group.reference_mix < SEEN_BY_BFLOAT16:
        message = (
            f"group.reference_mix {show(group.reference_mix)} moves the reference by less than bfloat16 weights can hold, so it "
            f"would stay as it is: set model.dtype: autocast, or a mix of at least {SEEN_BY_BFLOAT16}"
        )
        yield ("group.reference_mix", "model.dtype"), message
    if without and group.kl is not None:
        yield ("group.kl", "group.beta"), f"group.kl is {group.kl!r}, but with group.beta 0 no KL is in the loss"


def _critic(recipe: Recipe, earlier: Sequence[str]) -> Iterator[Finding]:
    critic = recipe.critic
    valued = is_online(recipe.objective) and (_may_read(recipe) or _algorithm(recipe).needs_value)
    if not valued:
        if critic != CriticSettings():
            yield (
                ("critic",),
                f"critic is for credits that ask one: objective {_names(lambda row: row.needs_value)}, or group.credit: gae",
            )
        return
    if critic.path is not None and (wrong := wrong_model(critic.path, earlier)):
        yield ("critic.path",), f"critic.path: {wrong}"
    if recipe.steps is not None and critic.pretrain >= recipe.steps:
        message = f"critic.pretrain ({critic.pretrain}) leaves none of the {recipe.steps} steps to train the policy: raise steps"
        yield ("critic.pretrain", "steps"), message


def _curriculum(recipe: Recipe, earlier: Sequence[str]) -> Iterator[Finding]:
    data = recipe.data
    if (data.retire or data.curriculum) and not (is_online(recipe.objective) and _scored(recipe)):
        keys = ("data.retire", "data.curriculum", "objective")
        yield keys, "data.retire and data.curriculum go by the verdict of sampled completions: there are none here"
    elif (data.retire or data.curriculum) and verdict_of(recipe.rewards, recipe.verdict) is None:
        message = "data.retire and data.curriculum go by the reward whose 1 says that a completion is right: name it, verdict: NAME"
        yield ("data.retire", "data.curriculum", "verdict"), message


def _entropy(recipe: Recipe, earlier: Sequence[str]) -> Iterator[Finding]:
    group = recipe.group
    if group.entropy_target is None:
        return
    if group.entropy_bonus <= 0.0:
        yield ("group.entropy_bonus", "group.entropy_target"), "group.entropy_target needs a bound: group.entropy_bonus, e.g. 0.02"
    if _algorithm(recipe).mix:
        message = "group.entropy_target reads the policy's entropy off its samples; here a teacher helps to sample (group.mix)"
        yield ("group.entropy_target", "group.mix"), message


def _teacher(recipe: Recipe, earlier: Sequence[str]) -> Iterator[Finding]:
    teacher = recipe.teacher
    may_read = _may_read(recipe)
    if not is_online(recipe.objective) or not (may_read or _algorithm(recipe).needs_teacher):
        if teacher != TeacherSettings():
            yield (
                ("teacher",),
                f"teacher is for those that learn from one: {_names(lambda row: row.needs_teacher)}, or group.divergence",
            )
        return
    if teacher.path is not None and (wrong := wrong_model(teacher.path, earlier)):
        yield ("teacher.path",), f"teacher.path: {wrong}"
    if teacher.path is not None and teacher.ema:
        yield ("teacher.ema", "teacher.path"), "teacher.ema moves a policy that teaches itself; a checkpoint (teacher.path) stays"
    yield from _served(recipe)
    if not (teacher.path or teacher.servers or teacher.ema or teacher.hint is not None) and not may_read:
        message = (
            "teacher.path is missing: the policy would learn from itself as it is; give a checkpoint, a teacher.hint or an ema"
        )
        yield ("teacher.path", "teacher"), message
    if recipe.model.dtype == "bfloat16" and 0 < teacher.ema < SEEN_BY_BFLOAT16:
        message = (
            f"teacher.ema {show(teacher.ema)} moves the teacher by less than bfloat16 weights can hold, so it would stay as it is: "
            f"set model.dtype: autocast, or an ema of at least {SEEN_BY_BFLOAT16}"
        )
        yield ("teacher.ema", "model.dtype"), message
    if recipe.model.lora is not None and 0 < teacher.ema < 1:
        yield ("teacher.ema", "model.lora"), "teacher.ema must be 0 or 1 with model.lora: what lies under an adapter cannot move"
    if teacher.hint is not None and (wrong := _wrong_template(teacher.hint, constant=True)):
        yield ("teacher.hint",), f"teacher.hint: {wrong}"
    yield from _mixing(recipe)
    yield from _shown(recipe)


def _served(recipe: Recipe) -> Iterator[Finding]:
    """A teacher on servers, which say the log-probs of given tokens by their raw logits, and nothing else."""
    teacher, rollout = recipe.teacher, recipe.rollout
    if not teacher.servers:
        return
    yield from _addresses("teacher.servers", teacher.servers)
    if teacher.path is not None or teacher.ema:
        message = "teacher.servers is instead of a checkpoint (teacher.path) or the policy itself (teacher.ema): name one of them"
        yield ("teacher.servers", "teacher.path", "teacher.ema"), message
    algorithm = _algorithm(recipe)
    if message := beyond_servers(algorithm):
        yield ("teacher.servers", "objective", "group.divergence", "group.mix"), message
    if rollout.temperature != 1.0 or rollout.top_k or rollout.top_p < 1 or rollout.min_p:
        message = "teacher.servers score at temperature 1 over the whole vocabulary: leave temperature, top_k, top_p and min_p out"
        yield ("teacher.servers", "rollout.temperature", "rollout.top_k", "rollout.top_p", "rollout.min_p"), message


def beyond_servers(algorithm: Algorithm) -> str | None:
    """Why a teacher on servers cannot teach an algorithm, or None."""
    if "teacher" not in algorithm.reads and not algorithm.mix:
        return None
    return (
        "teacher.servers tell the log-probs of tokens that were drawn, not whole distributions: take objective distill_sampled, "
        "or a checkpoint (teacher.path)"
    )


def _has_wrong_port(url: str) -> bool:
    try:
        _ = urlsplit(url).port
    except ValueError:  # not between 0 and 65535
        return True
    return False


def _addresses(at: str, servers: Sequence[str]) -> Iterator[Finding]:
    for url in servers:
        if not re.fullmatch(r"http://[^/\s]+/?", url) or _has_wrong_port(url):
            yield (at, at.rpartition(".")[0]), f"{at} is a list of addresses like http://127.0.0.1:8000, got {url!r}"


def _mixing(recipe: Recipe) -> Iterator[Finding]:
    rollout = recipe.rollout
    if not _algorithm(recipe).mix:
        return
    if rollout.top_k or rollout.top_p < 1 or rollout.min_p:
        message = (
            "the teacher helps to sample (group.mix), from the whole distribution: leave top_k, top_p and min_p out, or set mix: 0"
        )
        yield ("rollout.top_k", "rollout.top_p", "rollout.min_p", "group.mix"), message
    if rollout.engine != EngineSettings():
        message = f"the teacher helps to sample (group.mix) in this process: leave rollout.engine ({rollout.engine.name}) out"
        yield ("rollout.engine", "group.mix"), f"{message}, or set group.mix: 0"


SEEN_BY_BFLOAT16 = 0.5
"""Share of a difference of one unit in the last place that does not round to nothing."""


def _shown(recipe: Recipe) -> Iterator[Finding]:
    shown, at = recipe.teacher.demonstrations, "teacher.demonstrations"
    if shown is None:
        return
    if wrong := _wrong_data(shown.path):
        yield (f"{at}.path", at), f"{at}.path: {wrong}"
    if not shown.lm and not shown.divergence:
        yield (at,), f"{at}: with lm 0 and divergence 0 nothing is learnt from them"
    if recipe.group.beta:
        yield (at, "group.beta"), f"{at}: nothing ties demonstrations to a reference: leave group.beta out"


def _wrong_choice(name: str, names: Sequence[str]) -> str | None:
    """Why `name` is neither one of ours nor `module:NAME`, or None."""
    if name in names:
        return None
    if ":" in name:
        return _wrong_name(name, "NAME")
    return f"must be one of {', '.join(names)}, or module:NAME; got {name!r}{closest(name, names)}"


PLAIN = ALGORITHMS["grpo"]
"""Stands for a row of somebody's own, of which only the parts that the recipe replaces are known."""


def _algorithm(recipe: Recipe) -> Algorithm:
    """The recipe's algorithm as far as it is known without anybody's code."""
    return adapted(ALGORITHMS.get(recipe.objective, PLAIN), _known(recipe), recipe.rollout.max_new_tokens)


def _known(recipe: Recipe) -> GroupSettings:
    """`group` without the parts that are wrong, or somebody's own: the row's stand in their place."""
    unknown = [kind for kind in PARTS if _named(recipe, kind) or any(True for _ in _wrong_part(kind, recipe))]
    return replace(recipe.group, **dict.fromkeys(unknown))


def _unknown_credit(recipe: Recipe) -> bool:
    """True if the credit is somebody's own."""
    return _named(recipe, "credit") is not None or (":" in recipe.objective and recipe.group.credit is None)


def _may_read(recipe: Recipe) -> bool:
    """True if somebody's own credit, or a term of somebody's own row, may read what a critic or a teacher gives."""
    return _named(recipe, "credit") is not None or ":" in recipe.objective


def _named(recipe: Recipe, kind: str) -> str | None:
    """The name of a part that is somebody's own."""
    name = _name(getattr(recipe.group, kind))
    return name if isinstance(name, str) and ":" in name else None


def _name(part: Part | None) -> Any:
    return part.get("name") if isinstance(part, Mapping) else part


def _names(has: Callable[[Algorithm], bool]) -> str:
    return ", ".join(name for name, row in ALGORITHMS.items() if has(row))


def _wrong_part(kind: str, recipe: Recipe) -> Iterator[Finding]:
    """What is wrong with a part; the options of one that is somebody's own are looked at when it is imported."""
    part = getattr(recipe.group, kind)
    if name := _named(recipe, kind):
        if wrong := _wrong_name(name):
            yield (f"group.{kind}",), f"group.{kind}: {wrong}"
    elif part is not None and (":" not in recipe.objective or _name(part) is not None or not part):
        row = ALGORITHMS.get(recipe.objective, PLAIN)
        preset = getattr(row, kind, None) or (Jsd() if kind == "divergence" else None)
        for key, message in part_problems(kind, part, preset, {"beta": None} if kind == "credit" else None):
            yield (key, f"group.{kind}"), message


def _parallel(recipe: Recipe, _: Sequence[str]) -> Iterator[Finding]:
    parallel = recipe.parallel
    if parallel.name == "ddp" and (parallel.shards is not None or parallel.offload):
        yield ("parallel",), "parallel: shards and offload are for weights that are spread: name zero2 or zero3, not ddp"


def _rollout(recipe: Recipe, _: Sequence[str]) -> Iterator[Finding]:
    if "" in recipe.rollout.stop:
        yield ("rollout.stop",), "rollout.stop holds an empty string, which would end every completion at once"
    engine, at = recipe.rollout.engine, "rollout.engine"
    if wrong := _wrong_choice(engine.name, tuple(ENGINES)):
        yield (f"{at}.name", at), f"{at}.name {wrong}"
        return
    yield from _engine(engine, at)
    if engine.ahead and not is_online(recipe.objective):
        message = f"{at}.ahead: nothing is sampled ahead of training by {recipe.objective!r}, which learns from a data set"
        yield (f"{at}.ahead", "objective"), message
    if is_online(recipe.objective) and recipe.model.attention == "single" and engine_traits(engine.name).packed:
        message = (
            f"model.attention is 'single', and the {engine.name} engine needs packed streams; set rollout.engine to transformers"
        )
        yield (at, "model.attention"), message


def _engine(engine: EngineSettings, at: str) -> Iterator[Finding]:
    """What does not go together of an engine whose name is known."""
    plain, traits = EngineSettings(), engine_traits(engine.name)
    for other, name in ((one, key) for one, has in ENGINES.items() for key in has.takes if key not in traits.takes):
        if getattr(engine, name) != getattr(plain, name):
            yield (f"{at}.{name}", at), f"{at}.{name} is for {other}; {engine.name} does not take it"
    if engine.args and ":" not in engine.name:
        yield (f"{at}.args", at), f"{at}.args are for an engine of your own (module:function); {engine.name} takes none"
    if traits.own_weights and engine.correct != plain.correct and not engine.ahead:
        message = (
            f"{engine.name} samples with the weights that are trained: there is nothing to correct, unless it is ahead of them"
        )
        yield (f"{at}.correct", at), f"{at}.correct: {message}"
    yield from _addresses(f"{at}.servers", engine.servers)
    if engine.colocated and (engine.servers or engine.ahead):
        message = "samples in the trainer's process, in turn with training: leave servers and ahead out"
        yield (f"{at}.colocated", at), f"{at}.colocated {message}"
    if engine.servers and engine.dtype is not None:
        message = "is that of a server which the run starts for itself; running servers have theirs"
        yield (f"{at}.dtype", at), f"{at}.dtype {message}"
    if engine.correct is not None and engine.correct.low > engine.correct.high:
        message = f"{at}.correct.low ({engine.correct.low:g}) is more than high ({engine.correct.high:g})"
        yield (f"{at}.correct", at), message


_CHECKS: tuple[Callable[[Recipe, Sequence[str]], Iterator[Finding]], ...] = (
    _objective,
    _length,
    _model,
    _lora,
    _replay,
    _scratch,
    _data,
    _rewards,
    _rollout,
    _environment,
    _group,
    _critic,
    _teacher,
    _entropy,
    _curriculum,
    _parallel,
)
