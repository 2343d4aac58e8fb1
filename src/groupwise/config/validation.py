"""What the keys of a recipe must be together: checks that look at more than one value, at files and
at names.

Each check yields messages that name the keys they are about, the most telling one first;
`recipes.py` adds the line of the first that the file holds.  Where a message names none, or in
another order, the keys come with it.  Nothing here imports torch or reads a weight, so that a
recipe is refused in a fraction of a second.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.losses import Jsd
from groupwise.algorithms.table import ALGORITHMS, PARTS
from groupwise.config.live_objects import LIVE
from groupwise.config.objectives import DATASET, OBJECTIVES, is_online
from groupwise.config.packaged_models import (
    PACKAGED_MODELS,
    is_fetched,
    is_packaged,
    not_fetched,
)
from groupwise.config.resolve import conflicts, part_problems, with_group
from groupwise.config.schema import lookup, show
from groupwise.config.settings import (
    ANSWERING,
    ASKING,
    DATA_SUFFIXES,
    ENGINE_TRAITS,
    FACTORIES,
    OWNERS,
    REWARDS,
    TASKS,
    CriticSettings,
    EngineSettings,
    EnvironmentSettings,
    GroupSettings,
    Part,
    Recipe,
    TeacherSettings,
    engine_traits,
    verdict_of,
)
from groupwise.errors import ConfigError
from groupwise.sandbox.agent_sandbox import AgentSandboxSettings
from groupwise.sandbox.tools import SANDBOX_TOOLS, SandboxSettings
from groupwise.utils.files import expanded
from groupwise.utils.spelling import closest, near_path, nearest

Finding = tuple[tuple[str, ...], str]
"""The dotted keys that a check looked at, most telling first, and what is wrong with them."""
Findings = Iterator[str | Finding]

STAGE = "stage:"
"""Prefix of a path that means the final model of an earlier stage."""

PAIRED = ("reward", "dpo")
"""Objectives that learn from pairs, which an earlier stage can have sampled."""
SCORING = ("reward", "prm")
"""Objectives that train a scoring model."""


def validate_recipe(recipe: Recipe, earlier: Sequence[str] = ()) -> list[Finding]:
    """Everything wrong with a recipe whose single values are in range.

    earlier: names of the stages that run before this one, which `stage:NAME` may refer to.
    """
    findings: list[Finding] = []
    for check in _CHECKS:
        for finding in check(recipe, earlier):
            if isinstance(finding, str):
                finding = (_keys(finding, recipe), finding)
            findings.append(finding)
    return findings


def validate_environment(environment: EnvironmentSettings) -> list[str]:
    """Return what is wrong in a section `environment` whose single values are in range."""
    messages = []
    for finding in _environment_alone(environment):
        messages.append(finding if isinstance(finding, str) else finding[1])
    return messages


def _keys(message: str, recipe: Recipe) -> tuple[str, ...]:
    """The keys that a message names: its first word, dotted ones, and `objective` where it has the
    recipe's.
    """
    words = re.findall(r"^[a-z_.0-9]+|[a-z_]+(?:\.\w+)+", message)
    keys = [word for word in words if lookup(word) is not None]
    if repr(recipe.objective) in message:
        keys.append("objective")
    return tuple(keys)


def _objective(recipe: Recipe, _: Sequence[str]) -> Findings:
    if ":" not in recipe.objective and recipe.objective not in OBJECTIVES:
        near = closest(recipe.objective, OBJECTIVES)
        yield f"objective must be one of {', '.join(OBJECTIVES)}; got {recipe.objective!r}{near}"
    elif ":" in recipe.objective and (wrong := _wrong_name(recipe.objective, "NAME")):
        yield f"objective: {wrong}"
    if not re.fullmatch(r"\w[\w.+=-]*(/\w[\w.+=-]*)?", recipe.name):
        yield f"name must be a folder name (letters, digits, . _ + = -), got {recipe.name!r}"
    if recipe.parallel.name == "ddp" and (
        recipe.parallel.shards is not None or recipe.parallel.offload
    ):
        yield (
            "parallel: shards and offload are for weights that are spread: name zero2 or zero3,"
            " not ddp"
        )
    if recipe.parallel.tensor > 1 or recipe.parallel.expert > 1:
        yield from _split(recipe)
    if recipe.parallel.context > 1:
        yield from _split_streams(recipe)


def _split_streams(recipe: Recipe) -> Findings:
    """What streams that processes split between them cannot do."""
    if recipe.parallel.tensor > 1 or recipe.parallel.expert > 1:
        yield (
            ("parallel.context", "parallel.tensor"),
            "parallel: tensor, expert and context are not combined: leave context out, or the"
            " others (zero3 goes with each)",
        )
    if recipe.model.lora is not None and recipe.model.lora.dropout:
        yield (
            ("parallel.context", "model.lora.dropout"),
            "model.lora.dropout: its masks are drawn for whole streams: set it to 0, or leave"
            " parallel.context out",
        )
    if recipe.model.attention == "single":
        yield (
            ("parallel.context", "model.attention"),
            "model.attention 'single' packs no streams: leave parallel.context out",
        )


def _split(recipe: Recipe) -> Findings:
    """What a model that processes split between them cannot do."""
    parallel = recipe.parallel
    if parallel.shards is not None or parallel.offload:
        yield (
            ("parallel.tensor", "parallel"),
            "parallel: shards and offload are not for models that are split (tensor, expert): leave"
            " them out, or leave tensor and expert out",
        )
    if parallel.expert > 1 and parallel.expert % parallel.tensor:
        yield (
            ("parallel.expert", "parallel.tensor"),
            f"parallel.expert ({parallel.expert}) must be a multiple of parallel.tensor"
            f" ({parallel.tensor})",
        )
    if recipe.model.lora is not None:
        yield (
            ("parallel.tensor", "model.lora"),
            "model.lora: an adapter's factors are not split by parallel.tensor or expert: shard its"
            " base with parallel: zero3 instead, or train all weights",
        )
    if recipe.model.attention == "single":
        yield (
            ("parallel.tensor", "model.attention"),
            "model.attention 'single' runs each model as it is: leave tensor and expert out",
        )


def _length(recipe: Recipe, _: Sequence[str]) -> Findings:
    if recipe.steps is not None and recipe.epochs is not None:
        yield (
            ("epochs", "steps"),
            f"say steps ({recipe.steps}) or epochs ({recipe.epochs:g}), not both",
        )
    if is_online(recipe.objective) and recipe.steps is None:
        instead = " (epochs are for data-set objectives)" if recipe.epochs is not None else ""
        yield (
            ("steps", "epochs", "objective"),
            f"steps is missing: {recipe.objective!r} needs the number of rollouts{instead}",
        )
    if recipe.objective in DATASET and recipe.steps is None and recipe.epochs is None:
        yield (
            ("steps", "epochs", "objective"),
            f"steps is missing: say steps or epochs for {recipe.objective!r}",
        )


def policy_updates(recipe: Recipe) -> int:
    """Optimizer steps of the policy in the whole run; `steps` must be set."""
    per_step = 1
    if is_online(recipe.objective):
        per_step = recipe.group.updates_per_rollout * recipe.group.minibatches
    return max((recipe.steps or 0) - recipe.critic.pretrain, 0) * per_step


def demand_processes(recipe: Recipe, processes: int) -> None:
    """Refuse a recipe that cannot be run by so many processes.  Raises ConfigError."""
    together = recipe.rollout.engine.tensor_parallel
    if processes % together:
        message = (
            f"rollout.engine.tensor_parallel: {together} processes hold a vLLM together, and the"
            f" run has {processes}: start a multiple of {together} (--nproc), or leave"
            " tensor_parallel out"
        )
        raise ConfigError(message, key="rollout.engine.tensor_parallel")


def _model(recipe: Recipe, earlier: Sequence[str]) -> Findings:
    model = recipe.model
    if model.path is not None and model.scratch is not None:
        yield (
            ("model.scratch", "model.path"),
            "say model.path (a checkpoint) or model.scratch (random weights), not both",
        )
    if model.path is None and model.scratch is None:
        yield (
            ("model.path",),
            (
                "model.path is missing: a checkpoint folder, a hub name, or model.scratch for"
                " random weights"
            ),
        )
    if model.path is not None and (wrong := wrong_model(model.path, earlier)):
        yield f"model.path: {wrong}"
    if model.lora is not None and model.scratch is not None:
        yield (
            "model.lora trains beside weights that stay as they are; those of model.scratch are"
            " random"
        )
    if model.quantize is not None:
        yield from _quantized(recipe)
    if model.fp8 is not None:
        yield from _in_fp8(recipe)
    if model.lora is not None and model.lora.start is not None:
        start = model.lora.start
        if wrong := wrong_model(start, earlier):
            yield f"model.lora.start: {wrong}"
    if model.lora is not None and recipe.group.reference_refresh:
        yield (
            "model.lora: the reference is what lies under the adapter and cannot move: leave"
            " group.reference_refresh out"
        )
    template = model.chat_template
    if template is not None and template.endswith(".jinja") and (wrong := _no_file(template)):
        yield f"model.chat_template: {wrong}"


def _quantized(recipe: Recipe) -> Findings:
    """What cannot be trained on a quantised base."""
    model = recipe.model
    if model.lora is None:
        yield (
            ("model.quantize", "model.lora"),
            "model.quantize: weights in few bits cannot be trained, an adapter beside them can: set"
            " model.lora={}, or leave model.quantize out",
        )
    if model.path is not None and model.path.endswith(".gguf"):
        yield (
            ("model.quantize", "model.path"),
            "model.quantize: the numbers of a GGUF file are rounded to few bits already, and would"
            " be rounded again: name the model's safetensors folder, or leave model.quantize out",
        )


def _in_fp8(recipe: Recipe) -> Findings:
    """What does not go together with products in FP8."""
    model, parallel = recipe.model, recipe.parallel
    if model.lora is not None:
        yield (
            ("model.fp8", "model.lora"),
            "model.fp8: the weights under an adapter are frozen: leave model.lora out, or model.fp8"
            " (model.quantize holds them in few bits)",
        )
    if recipe.objective in SCORING:
        yield (
            ("model.fp8", "objective"),
            f"model.fp8: {recipe.objective!r} trains a scoring model, which does not run in FP8:"
            " leave model.fp8 out",
        )
    if model.compile != "off":
        yield (
            ("model.fp8", "model.compile"),
            "model.fp8: compiled blocks do not run in FP8: set model.compile to off",
        )
    if model.attention == "single":
        yield (
            ("model.fp8", "model.attention"),
            "model.fp8: model.attention 'single' runs no packed streams, which FP8 is for: leave"
            " model.fp8 out",
        )
    split = parallel.tensor > 1 or parallel.expert > 1 or parallel.context > 1
    if parallel.name in ("zero2", "zero3") or split:
        yield (
            ("model.fp8", "parallel"),
            "model.fp8: weights and streams that are spread over processes do not run in FP8: set"
            " parallel to ddp, or leave model.fp8 out",
        )


def _unspeakable(path: str) -> str | None:
    """Why nothing on a disk can have this path, or None."""
    longest = max(len(part.encode("utf-8", "surrogatepass")) for part in path.split("/"))
    if longest > 255 or len(path) >= 4096:
        return f"no file or folder can have a name of {len(path):,} characters ({path[:20]!r} ...)"
    return None


def _no_file(path: str) -> str | None:
    """Why there is no file of this path, or None."""
    wrong = _unspeakable(path)
    if wrong is None and not expanded(path).is_file():
        return f"no such file {path!r}{near_path(expanded(path))}"
    return wrong


def wrong_model(path: str, earlier: Sequence[str] = ()) -> str | None:
    """Why a model cannot come from `path` (a folder, a hub name or stage:NAME), or None.

    A path that is no hub name, or that lies in a folder that exists, is never looked for on the
    hub.
    """
    if path.startswith(LIVE):  # whoever needs the object says if it is not there
        return None
    if path.startswith(STAGE):
        stage = path.removeprefix(STAGE)
        if stage in earlier:
            return None
        known = "there is no earlier stage"
        if earlier:
            known = f"earlier stages are {', '.join(earlier)}"
        return f"no stage {stage!r} runs before this one ({known}){closest(stage, earlier)}"
    if wrong := _unspeakable(path):
        return wrong
    if is_packaged(path):
        return None if is_fetched(path) else not_fetched(path)
    folder = expanded(path)
    if folder.is_file() and folder.suffix.lower() == ".gguf":
        return None
    if folder.is_dir():
        return _no_model(folder, path)
    if folder.exists():
        return f"{path!r} is a file; a model is a folder in Hugging Face's format, or a .gguf file"
    if _means_local(path):
        return f"no such folder {path!r}{near_path(folder)}"
    if not _unreachable("models", path):
        return None
    near = closest(path, PACKAGED_MODELS) or near_path(folder)
    return f"no such folder {path!r}{near}; {UNREACHABLE}"


def _no_model(folder: Path, path: str) -> str | None:
    """Why a folder that exists, which the recipe calls `path`, is no model; None if it is one."""
    for name in ("config.json", "adapter_config.json"):
        if (folder / name).is_file():
            return None
    if any(folder.glob("*.gguf")):
        return None
    meant = ""
    inside = sorted((*folder.glob("final/config.json"), *folder.glob("*/final/config.json")))
    if inside:
        meant = f"; did you mean {path.rstrip('/')}/{inside[0].parent.relative_to(folder)}?"
    return f"the folder {path!r} is not a model: it holds no config.json{meant}"


def _means_local(path: str) -> bool:
    """True if a path that does not exist cannot be a hub name (`name` or `owner/name`), or is
    unlikely to be one.
    """
    first = path.split("/", 1)[0]
    return (
        not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path)
        or first in (".", "..", "~")
        or Path(first).is_dir()
    )


UNREACHABLE = "as a hub name it is not in the cache, and HF_HUB_OFFLINE forbids fetching it"


def _unreachable(kind: str, name: str) -> bool:
    """True offline, if Hugging Face's cache has no folder of the repository (whether it is complete
    is for transformers to say).
    """
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"
    )
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return offline and not (expanded(cache) / f"{kind}--{name.replace('/', '--')}").is_dir()


def _replay(recipe: Recipe, _: Sequence[str]) -> Findings:
    replay, at = recipe.reward_model.replay, "reward_model.replay"
    if replay is None:
        return
    if (replay.path is None) == (replay.task is None):
        yield (
            f"{at} needs the path of a file of older pairs, or a task: {{path: old.jsonl, share:"
            " 0.1}"
        )
    elif replay.path is not None and (wrong := _wrong_data(replay.path)):
        yield f"{at}.path: {wrong}"
    elif replay.task is not None and (wrong := _wrong_choice(replay.task, TASKS)):
        yield f"{at}.task {wrong}"


def _scratch(recipe: Recipe, _: Sequence[str]) -> Findings:
    scratch = recipe.model.scratch
    if scratch is None:
        return
    at, kind = "model.scratch", scratch.tokenizer
    if scratch.hidden % scratch.heads:
        near = _nearest_multiples(scratch.hidden, scratch.heads)
        yield (
            f"{at}.heads ({scratch.heads}) must divide {at}.hidden ({scratch.hidden}; nearest:"
            f" {near})"
        )
    elif scratch.family != "gpt2" and (scratch.hidden // scratch.heads) % 2:
        message = (
            f"a head is {scratch.hidden // scratch.heads} wide; rotary positions need an even width"
            f" ({at}.hidden / heads)"
        )
        yield (f"{at}.heads", f"{at}.hidden"), message
    elif scratch.family == "qwen3_vl" and (scratch.hidden // scratch.heads) % 4:
        message = (
            f"a head is {scratch.hidden // scratch.heads} wide; positions in images need a multiple"
            f" of 4 ({at}.hidden / heads)"
        )
        yield (f"{at}.heads", f"{at}.hidden"), message
    prompt, new = recipe.data.max_prompt_tokens or 1, recipe.rollout.max_new_tokens
    if is_online(recipe.objective) and prompt + new > scratch.context:
        longest = f"data.max_prompt_tokens ({prompt})"
        if recipe.data.max_prompt_tokens is None:
            longest = "a prompt of 1 token"
        message = (
            f"{longest} + rollout.max_new_tokens ({new}) is {prompt + new}, more than {at}.context"
            f" ({scratch.context})"
        )
        yield ("rollout.max_new_tokens", "data.max_prompt_tokens", f"{at}.context"), message
    known = kind in ("arithmetic", "bytes") or re.fullmatch(r"bpe:\d+", kind)
    if known:
        return
    wrong = _unspeakable(kind)
    if wrong is None and not expanded(kind).is_dir():
        near = closest(kind, ("arithmetic", "bytes"))
        wrong = f"no such folder {kind!r}, and it is not arithmetic, bytes or bpe:N{near}"
    if wrong is not None:
        yield f"{at}.tokenizer: {wrong}"


def _nearest_multiples(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def _data(recipe: Recipe, earlier: Sequence[str]) -> Findings:
    data = recipe.data
    sampled = data.path is not None and data.path.startswith(STAGE)
    if sampled and recipe.objective not in PAIRED:
        yield (
            ("data.path", "objective"),
            f"data.path: {data.path!r} means pairs, which {' and '.join(PAIRED)} learn from",
        )
    elif sampled and (wrong := wrong_model(STAGE + str(data.path).split(":")[1], earlier)):
        yield f"data.path: {wrong}"
    if data.path is not None and data.task is not None:
        yield (
            ("data.task", "data.path"),
            "say data.path (a file or a hub name) or data.task (a generated task), not both",
        )
    if recipe.environment.reasoning_gym is not None:
        if data.path is not None or data.task is not None:
            yield "environment.reasoning_gym brings its own rows: leave data.path and data.task out"
    elif data.path is None and data.task is None and recipe.environment.verifiers is None:
        yield (
            ("data.path",),
            "data.path is missing: a .jsonl, .json or .parquet file, a hub name, or data.task",
        )
    if data.task is not None and (wrong := _wrong_choice(data.task, TASKS)):
        yield f"data.task {wrong}"
    if data.task is None and data.task_args:
        yield "data.task_args belongs to data.task, which is not set"
    for key, path in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        if (
            path is not None
            and not (sampled and key == "data.path")
            and (wrong := _wrong_data(path))
        ):
            yield f"{key}: {wrong}"
    at = "data.eval_fraction"
    if data.eval_path is not None and data.parts:
        yield (
            (at, "data.eval_path"),
            f"say data.eval_path or {at} ({show(data.eval_fraction)}), not both",
        )
    if unknown := sorted(data.parts.keys() - {"test", "validation"}):
        yield f"{at} has parts test and validation, not {', '.join(unknown)}"
    elif "validation" in data.parts and "test" not in data.parts:
        yield f"{at} holds out validation but no test: what is reported would be what was watched"
    if sum(data.parts.values()) >= 1:
        yield f"{at} holds out everything: its parts sum to {sum(data.parts.values()):g}"
    if data.template is not None and (wrong := _wrong_template(data.template)):
        yield f"data.template: {wrong}"
    sampling, stages = is_online(recipe.objective), "; of several stages, in those that read it"
    if data.max_tokens is not None and sampling:
        bounds = f"set data.max_prompt_tokens and rollout.max_new_tokens{stages}"
        yield (
            f"data.max_tokens is for rows that an objective learns from, and {recipe.objective!r}"
            f" samples completions: {bounds}"
        )
    if data.max_prompt_tokens is not None and not sampling and not recipe.rewards:
        instead = f"set data.max_tokens{stages}"
        yield (
            f"data.max_prompt_tokens is for prompts to sample from; {recipe.objective!r} learns"
            f" from rows: {instead}"
        )
    for ours, theirs in data.columns.items():
        near = nearest(ours, ROW, cutoff=0.85)
        if (
            near is not None and ours not in ROW and f"{ours}s" != near
        ):  # `message` may be a column that a reward asks for
            message = (
                f"data.columns names ours: yours; nothing reads a column {ours!r}: write {{{near}:"
                f" {theirs}}}"
            )
            yield (f"data.columns.{ours}",), message


ROW = ("prompt", "messages", "completion", "chosen", "rejected")
"""Columns that rows are read from, whatever the reward functions ask for."""


NO_HUB_NAMES = (*DATA_SUFFIXES, ".csv", ".tsv", ".txt", ".gz", ".arrow")
"""Endings of files, which are never looked for on the hub."""


def _wrong_data(path: str) -> str | None:
    """Why rows cannot come from `path`, or None."""
    if path.startswith(LIVE):
        return None
    wrong, repository = wrong_rows(path), path.partition(":")[0]  # `owner/name:config`
    if wrong is None and not expanded(path).exists() and _unreachable("datasets", repository):
        return f"no such file {path!r}; {UNREACHABLE}"
    return wrong


def wrong_rows(path: str) -> str | None:
    """Why there are no rows at `path`, or None: it is a file that may be read, or may be a name on
    the hub.
    """
    if wrong := _unspeakable(path):
        return wrong
    file = expanded(path)
    if file.exists():
        wrong = _no_rows(file)
        return None if wrong is None else f"{path!r} {wrong}"
    if file.suffix.lower() in NO_HUB_NAMES or _means_local(path.partition(":")[0]):
        return f"no such file {path!r}{near_path(file)}"
    return None


def _no_rows(file: Path) -> str | None:
    """Why a file or a folder that exists is none that rows are read from, and what to do; None if
    rows are read from it.
    """
    suffixes, to_file = ", ".join(DATA_SUFFIXES), f".to_json('{file.stem}.jsonl')"
    for name, split in (("dataset_dict.json", "['train']"), ("dataset_info.json", "")):
        if (file / name).is_file():
            return (
                "was written by save_to_disk: make a file of it,"
                f" datasets.load_from_disk('{file}'){split}{to_file}"
            )
    if file.is_dir():
        return f"is a folder: give one of its files ({suffixes})"
    if file.suffix.lower() in DATA_SUFFIXES:
        return None
    remedy = "convert it"
    if file.suffix.lower() == ".csv":
        remedy = f"make one of it, datasets.Dataset.from_csv('{file}'){to_file}"
    return f"is none of {suffixes}: {remedy}"


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
    return bool(recipe.rewards or recipe.environment.named(OWNERS))


def _rewards(recipe: Recipe, earlier: Sequence[str]) -> Findings:
    known_online = is_online(recipe.objective) and not _unknown_credit(recipe)
    learns = known_online and _algorithm(recipe).needs.reward
    if learns and not _scored(recipe):
        yield (
            f"rewards is missing: {recipe.objective!r} needs at least one, e.g. [{{function:"
            " accuracy}]"
        )
    names: dict[str, int] = {}
    for place, reward in enumerate(recipe.rewards):
        at = f"rewards.{place}"
        if wrong := _wrong_choice(
            reward.function, REWARDS, "function", "module:function or file.py:function"
        ):
            yield f"{at}.function: {wrong}"
        if reward.function == "model" and "path" not in reward.args:
            yield (
                (f"{at}.args", f"{at}.function"),
                f"{at}.args: the reward 'model' needs the path of a reward model: {{path: ...}}",
            )
        name = reward.name or reward.function.rpartition(":")[2]
        if name in names:
            yield (
                (f"{at}.name", f"{at}.function"),
                f"two rewards are called {name!r}; give one of them another name",
            )
        names[name] = place
        for key, value in reward.args.items():
            if (
                isinstance(value, str)
                and value.startswith(STAGE)
                and (wrong := wrong_model(value, earlier))
            ):
                yield (f"{at}.args.{key}",), f"{at}.args.{key}: {wrong}"
    known = list(names) if recipe.rewards else ["environment"]
    if recipe.verdict is not None and recipe.verdict not in known:
        there = f"the rewards are {', '.join(known)}" if known else "there are no rewards"
        message = (
            f"verdict: there is no reward {recipe.verdict!r}{closest(recipe.verdict, known)};"
            f" {there}"
        )
        yield ("verdict", "rewards"), message
    if learns and recipe.rewards and all(reward.weight == 0 for reward in recipe.rewards):
        yield ("rewards.0.weight",), "every reward has weight 0: nothing would be learnt"


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
        return _no_file(place)
    if all(part.isidentifier() for part in place.split(".")):
        return None
    return f"{place!r} is neither a module nor a .py file"


def _sandbox(environment: EnvironmentSettings) -> Findings:
    at = "environment"
    try:
        if environment.agent is not None:
            AgentSandboxSettings.read(environment.sandbox)
            return
        sandbox = SandboxSettings.read(environment.sandbox)
    except ConfigError as error:
        yield str(error)
        return
    if not set(environment.tools) & set(SANDBOX_TOOLS):
        if environment.sandbox:
            yield f"{at}.sandbox is that of the tools `python` and `shell`, and none is set"
    elif sandbox.seconds > environment.tool_timeout:
        yield (
            f"{at}.sandbox.seconds is {sandbox.seconds:g}, and {at}.tool_timeout"
            f" {environment.tool_timeout:g}: a call of `python` or `shell` ends by the first"
        )


def _environment_alone(environment: EnvironmentSettings) -> Findings:
    at, factory = "environment", environment.factory
    for place, tool in enumerate(environment.tools):
        if tool not in SANDBOX_TOOLS and (wrong := _wrong_name(tool)):
            near = nearest(tool, SANDBOX_TOOLS)
            hint = "" if near is None else f" (did you mean {near}?)"
            yield f"{at}.tools.{place}: {wrong}{hint}"
    yield from _sandbox(environment)
    names = [tool.rpartition(":")[2] for tool in environment.tools]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        yield (
            f"{at}.tools: two tools are called {repeated[0]!r}; the policy tells them apart by name"
        )
    if factory is not None and not factory:
        yield f"{at}.factory names no environment: write {{name: file.py:Class}}"
    factories: dict[str, str] = {}
    if isinstance(factory, Mapping):
        for name, spec in factory.items():
            factories[f"{at}.factory.{name}"] = spec
    elif factory:
        factories[f"{at}.factory"] = factory
    for key, spec in factories.items():
        if wrong := _wrong_choice(spec, FACTORIES, "Class", "module:Class or file.py:Class"):
            yield (key,), f"{key}: {wrong}"
    bringing = [f"{at}.{name}" for name in environment.named((*ANSWERING, *ASKING))]
    if len(bringing) > 1 and bringing != [f"{at}.tools", f"{at}.factory"]:
        yield f"{' and '.join(bringing)}: who answers the policy is one of them"
    if isinstance(environment.harness, tuple) and not environment.harness[0]:
        yield (
            f"{at}.harness: a program has a name, [python, agent.py]; got"
            f" {show(environment.harness)}"
        )
    if (
        isinstance(environment.harness, str)
        and environment.harness != "outside"
        and (wrong := _wrong_name(environment.harness))
    ):
        yield (
            f"{at}.harness: {wrong}; or write `outside`, or a program as a list, [python, agent.py]"
        )
    wrong = _wrong_choice(
        environment.side_calls,
        ("without_tools", "none"),
        "function",
        "module:function or file.py:function",
    )
    if wrong:
        yield (f"{at}.side_calls",), f"{at}.side_calls: {wrong}"
    if not re.fullmatch(
        r"([^\s:]+|\[[0-9a-fA-F:]+\]):\d{1,5}", environment.listen
    ) or _has_wrong_port(f"//{environment.listen}"):
        yield (
            f"{at}.listen is written ADDRESS:PORT, with a port of at most 65535; got"
            f" {environment.listen!r}"
        )
    if environment.args and not environment.named(OWNERS):
        yield f"{at}.args are those of {', '.join(OWNERS)}, and none is set"
    if environment.openenv is not None and "url" in environment.args:
        yield f"{at}.openenv and {at}.args.url: the server's address is one of them"
    if environment.args and factory is not None and environment.reasoning_gym is not None:
        yield f"{at}.args: say whose they are: leave {at}.factory or {at}.reasoning_gym out"
    if environment.past == "split" and not (environment.talks or environment.asks):
        yield f"{at}.past is about conversations, and neither {at}.tools nor {at}.factory is set"


def _environment(recipe: Recipe, _: Sequence[str]) -> Findings:
    environment, data, at = recipe.environment, recipe.data, "environment"
    yield from _environment_alone(environment)
    if environment.talks and recipe.objective in DATASET and recipe.objective != "sft":
        yield (
            f"{at}: {recipe.objective!r} samples no conversations and shows no tools: leave it out"
            " of this stage"
        )
    if environment.asks and not is_online(recipe.objective):
        asking = f"{at}.{environment.named(ASKING)[-1]}"
        yield f"{asking}: {recipe.objective!r} samples no episodes: leave it out of this stage"
    own_rows = data.task is not None
    if data.path is not None:
        own_rows = own_rows or not data.path.startswith(LIVE)
    if environment.verifiers is not None and own_rows:
        yield f"{at}.verifiers brings its own rows: leave data.path and data.task out"
    if environment.reasoning_gym is not None and not is_online(recipe.objective):
        yield (
            f"{at}.reasoning_gym has prompts and a scorer, and no completions for"
            f" {recipe.objective!r} to learn from"
        )
    written = data.task is not None or data.template is not None
    if environment.talks and written and not data.chat:
        yield (
            ("data.chat", "data.task", "data.template", at),
            f"{at}: conversations are chat messages: set data.chat: true",
        )
    names = [reward.function for reward in recipe.rewards]
    gives = environment.factory or environment.openenv or environment.asks
    if environment.agent is not None:
        gives = None
        if is_online(recipe.objective) and not recipe.rewards:
            yield (
                f"{at}.agent gives no reward: name what judges its files, e.g."
                " rewards: [{function: code, args: {file: solution.py}}]"
            )
    if "environment" in names and not gives:
        where = f"rewards.{names.index('environment')}.function"
        yield (
            (where,),
            "the reward 'environment' needs environment.factory, openenv, harness or verifiers",
        )


def _group(recipe: Recipe, _: Sequence[str]) -> Findings:
    group = recipe.group
    for kind in PARTS:
        yield from _wrong_part(kind, recipe)
    if group.entropy_target is not None and group.entropy_bonus <= 0.0:
        yield (
            ("group.entropy_bonus", "group.entropy_target"),
            "group.entropy_target needs a bound: group.entropy_bonus, e.g. 0.02",
        )
    if not is_online(recipe.objective):
        return
    if group.minibatches > group.prompts_per_step:
        prompts = f"group.prompts_per_step ({group.prompts_per_step})"
        yield (
            f"group.minibatches ({group.minibatches}) is more than {prompts}: a minibatch holds at"
            " least one prompt"
        )
    if not _unknown_credit(recipe):
        yield from conflicts(
            _algorithm(recipe), ALGORITHMS.get(recipe.objective, PLAIN), _known(recipe)
        )
    # No preset has a KL of its own, so a beta that is not set is 0 too (a test asks the table); a
    # row of the user's may have one.
    without = not group.beta and (group.beta is not None or ":" not in recipe.objective)
    if without and group.reference_refresh:
        yield (
            f"group.reference_refresh is {group.reference_refresh}, but with group.beta 0 there is"
            " no reference to refresh"
        )
    if group.reference_refresh:
        yield from _too_little(
            recipe, "group.reference_mix", group.reference_mix, "the reference", "a mix"
        )
    if without and group.kl is not None:
        yield f"group.kl is {group.kl!r}, but with group.beta 0 no KL is in the loss"


def _critic(recipe: Recipe, earlier: Sequence[str]) -> Findings:
    critic = recipe.critic
    valued = is_online(recipe.objective) and (_may_read(recipe) or _algorithm(recipe).needs.critic)
    if not valued:
        if critic != CriticSettings():
            yield (
                "critic is for credits that ask one: objective"
                f" {_names(lambda row: row.needs.critic)}, or group.credit: gae"
            )
        return
    if critic.path is not None and (wrong := wrong_model(critic.path, earlier)):
        yield f"critic.path: {wrong}"
    if recipe.steps is not None and critic.pretrain >= recipe.steps:
        message = (
            f"critic.pretrain ({critic.pretrain}) leaves none of the {recipe.steps} steps to train"
            " the policy: raise steps"
        )
        yield ("critic.pretrain", "steps"), message


def _curriculum(recipe: Recipe, earlier: Sequence[str]) -> Findings:
    data = recipe.data
    if not (data.retire or data.curriculum):
        return
    if not (is_online(recipe.objective) and _scored(recipe)):
        keys = ("data.retire", "data.curriculum", "objective")
        yield (
            keys,
            (
                "data.retire and data.curriculum go by the verdict of sampled completions: there"
                " are none here"
            ),
        )
    elif verdict_of(recipe.rewards, recipe.verdict) is None:
        message = (
            "data.retire and data.curriculum go by the reward whose 1 says that a completion is"
            " right: name it, verdict: NAME"
        )
        yield ("data.retire", "data.curriculum", "verdict"), message


def _teacher(recipe: Recipe, earlier: Sequence[str]) -> Findings:
    teacher = recipe.teacher
    may_read = _may_read(recipe)
    if not is_online(recipe.objective) or not (may_read or _algorithm(recipe).needs.teacher):
        if teacher != TeacherSettings():
            yield (
                "teacher is for those that learn from one:"
                f" {_names(lambda row: row.needs.teacher)}, or group.divergence"
            )
        return
    if teacher.path is not None and (wrong := wrong_model(teacher.path, earlier)):
        yield f"teacher.path: {wrong}"
    yield from _served(recipe)
    if not may_read and (wrong := without_teacher(teacher)):
        yield wrong
    if teacher.hint is not None and (wrong := _wrong_template(teacher.hint, constant=True)):
        yield f"teacher.hint: {wrong}"


def _served(recipe: Recipe) -> Findings:
    """A teacher on servers, which say the log-probs of given tokens by their raw logits, and
    nothing else.
    """
    teacher, rollout = recipe.teacher, recipe.rollout
    if not teacher.servers:
        return
    yield from _addresses("teacher.servers", teacher.servers)
    if teacher.path is not None:
        yield "teacher.servers is instead of a checkpoint (teacher.path): name one of them"
    algorithm = _algorithm(recipe)
    if message := beyond_servers(algorithm):
        yield ("teacher.servers", "objective", "group.divergence"), message
    if rollout.temperature != 1.0 or rollout.top_k or rollout.top_p < 1 or rollout.min_p:
        message = (
            "teacher.servers score at temperature 1 over the whole vocabulary: leave temperature,"
            " top_k, top_p and min_p out"
        )
        yield (
            (
                "teacher.servers",
                "rollout.temperature",
                "rollout.top_k",
                "rollout.top_p",
                "rollout.min_p",
            ),
            message,
        )


def without_teacher(teacher: TeacherSettings) -> str | None:
    """Why nothing can be learnt from a teacher that is the policy itself, or None."""
    if teacher.path or teacher.servers or teacher.hint is not None:
        return None
    return (
        "teacher.path is missing: the policy would learn from itself as it is; give a checkpoint or"
        " a teacher.hint"
    )


def beyond_servers(algorithm: Algorithm) -> str | None:
    """Why a teacher on servers cannot teach an algorithm, or None."""
    if not algorithm.needs.teacher_states:
        return None
    return (
        "teacher.servers tell the log-probs of tokens that were drawn, not whole distributions:"
        " take objective distill_sampled, or a checkpoint (teacher.path)"
    )


def _has_wrong_port(url: str) -> bool:
    try:
        _ = urlsplit(url).port
    except ValueError:  # not between 0 and 65535
        return True
    return False


def _is_address(url: str) -> bool:
    return bool(re.fullmatch(r"http://[^/\s]+/?", url)) and not _has_wrong_port(url)


def _servers(at: str, servers: str | Mapping[str, str] | Sequence[str]) -> Findings:
    """What `rollout.engine.servers` may be: addresses, a file of them, or a router's."""
    if isinstance(servers, Mapping):
        if set(servers) != {"router"}:
            yield (
                f"{at} is a list of addresses, a file with one a line, or one key, router:"
                f" {{router: http://127.0.0.1:8080}}; got {show(servers)}"
            )
        for url in servers.values():
            if not _is_address(url):
                yield f"{at}.router is an address like http://127.0.0.1:8080, got {url!r}"
    elif isinstance(servers, str):
        if servers.startswith(("http://", "https://")):
            yield f"{at}: an address stands in a list: [{servers}]; text is the name of a file"
    else:
        yield from _addresses(at, servers)


def _addresses(at: str, servers: Sequence[str]) -> Findings:
    for url in servers:
        if not _is_address(url):
            yield f"{at} is a list of addresses like http://127.0.0.1:8000, got {url!r}"


SEEN_BY_BFLOAT16 = 0.5
"""Share of a difference of one unit in the last place that does not round to nothing."""


def _too_little(recipe: Recipe, key: str, share: float, moved: str, remedy: str) -> Findings:
    """Weights in bfloat16 that are moved by a share that rounds to nothing."""
    if recipe.model.dtype == "bfloat16" and share < SEEN_BY_BFLOAT16:
        message = (
            f"{key} {show(share)} moves {moved} by less than bfloat16 weights can hold, so it would"
            " stay as it is: "
        )
        yield f"{message}set model.dtype: autocast, or {remedy} of at least {SEEN_BY_BFLOAT16}"


def _wrong_choice(
    name: str, names: Collection[str], kind: str = "NAME", others: str = "or module:NAME"
) -> str | None:
    """Say why `name` is neither one of ours nor somebody's own; None if it is."""
    if name in names:
        return None
    if ":" in name:
        return _wrong_name(name, kind)
    return f"must be one of {', '.join(names)}, {others}; got {name!r}{closest(name, names)}"


PLAIN = ALGORITHMS["grpo"]
"""Stands for a row of somebody's own, of which only the parts that the recipe replaces are known.
"""


def _algorithm(recipe: Recipe) -> Algorithm:
    """The recipe's algorithm as far as it is known without anybody's code."""
    return with_group(
        ALGORITHMS.get(recipe.objective, PLAIN), _known(recipe), recipe.rollout.max_new_tokens
    )


def _known(recipe: Recipe) -> GroupSettings:
    """Return `group` without the parts that are wrong or somebody's own; the row's stand there."""
    unknown: list[str] = []
    for kind in PARTS:
        if _named(recipe, kind) or list(_wrong_part(kind, recipe)):
            unknown.append(kind)
    return replace(recipe.group, **dict.fromkeys(unknown))


def _unknown_credit(recipe: Recipe) -> bool:
    """True if the credit is somebody's own."""
    return _named(recipe, "credit") is not None or (
        ":" in recipe.objective and recipe.group.credit is None
    )


def _may_read(recipe: Recipe) -> bool:
    """True if somebody's own credit, or a term of somebody's own row, may read what a critic or a
    teacher gives.
    """
    return _named(recipe, "credit") is not None or ":" in recipe.objective


def _named(recipe: Recipe, kind: str) -> str | None:
    """The name of a part that is somebody's own."""
    name = _name(getattr(recipe.group, kind))
    return name if isinstance(name, str) and ":" in name else None


def _name(part: Part | None) -> Any:
    return part.get("name") if isinstance(part, Mapping) else part


def _names(has: Callable[[Algorithm], bool]) -> str:
    return ", ".join(name for name, row in ALGORITHMS.items() if has(row))


def _wrong_part(kind: str, recipe: Recipe) -> Findings:
    """What is wrong with a part; the options of one that is somebody's own are looked at when it is
    imported.
    """
    part = getattr(recipe.group, kind)
    if name := _named(recipe, kind):
        if wrong := _wrong_name(name):
            yield f"group.{kind}: {wrong}"
    elif part is not None and (":" not in recipe.objective or _name(part) is not None or not part):
        row = ALGORITHMS.get(recipe.objective, PLAIN)
        preset = getattr(row, kind, None)
        if preset is None and kind == "divergence":
            preset = Jsd()
        further = {"beta": None} if kind == "credit" else None
        for key, message in part_problems(kind, part, preset, further):
            yield (key, f"group.{kind}"), message


def _rollout(recipe: Recipe, _: Sequence[str]) -> Findings:
    if "" in recipe.rollout.stop:
        yield "rollout.stop holds an empty string, which would end every completion at once"
    engine, at = recipe.rollout.engine, "rollout.engine"
    if wrong := _wrong_choice(engine.name, ENGINE_TRAITS):
        yield f"{at}.name {wrong}"
        return
    yield from _engine(engine, at)
    exact = engine_traits(engine.name).own_weights and recipe.model.fp8 is None
    if exact and engine.correct != EngineSettings().correct and not engine.ahead:
        trained = f"{engine.name} samples with the weights that are trained"
        yield f"{at}.correct: {trained}: there is nothing to correct, unless it is ahead of them"
    asking = recipe.environment.named((*ANSWERING, *ASKING))
    if engine.tensor_parallel > 1 and asking:
        message = (
            f"{at}.tensor_parallel: processes that hold a vLLM together sample the same turns at"
            f" the same time, and environment.{asking[0]} answers each at its own: leave"
            " tensor_parallel out, or use servers (`groupwise serve`)"
        )
        yield (f"{at}.tensor_parallel", f"environment.{asking[0]}"), message
    if engine.ahead and not is_online(recipe.objective):
        yield (
            f"{at}.ahead: nothing is sampled ahead of training by {recipe.objective!r}, which"
            " learns from a data set"
        )
    if (
        is_online(recipe.objective)
        and recipe.model.attention == "single"
        and engine_traits(engine.name).packed
    ):
        needs = f"the {engine.name} engine needs packed streams"
        yield (
            (at, "model.attention"),
            f"model.attention is 'single', and {needs}; set rollout.engine to transformers",
        )


def _engine(engine: EngineSettings, at: str) -> Findings:
    """What does not go together of an engine whose name is known."""
    plain, traits = EngineSettings(), engine_traits(engine.name)
    for other, has in ENGINE_TRAITS.items():
        for name in has.takes:
            differs = getattr(engine, name) != getattr(plain, name)
            if name not in traits.takes and differs:
                yield f"{at}.{name} is for {other}; {engine.name} does not take it"
    yield from _servers(f"{at}.servers", engine.servers)
    if engine.patience != plain.patience and not engine.servers:
        yield (
            f"{at}.patience is how long running servers may be away; name them in servers: a server"
            " that the run starts itself is not waited for"
        )
    if engine.colocated and (engine.servers or engine.ahead):
        yield (
            f"{at}.colocated samples in the trainer's process, in turn with training: leave servers"
            " and ahead out"
        )
    if engine.weights_folder is not None and not engine.servers:
        yield (
            f"{at}.weights_folder is shared with running servers, and rollout.engine.servers names"
            " none: leave it out"
        )
    if engine.tensor_parallel > 1 and not engine.colocated:
        yield (
            f"{at}.tensor_parallel is for a colocated vLLM; a server has its own: groupwise serve"
            f" MODEL -- --tensor-parallel-size {engine.tensor_parallel}"
        )
    if engine.servers and engine.dtype is not None:
        yield (
            f"{at}.dtype is that of a server which the run starts for itself; running servers have"
            " theirs"
        )
    if engine.correct is not None and engine.correct.low > engine.correct.high:
        yield (
            f"{at}.correct.low ({engine.correct.low:g}) is more than high ({engine.correct.high:g})"
        )


DATASET_FIGURES = {
    "sft": ("loss", "nll", "perplexity"),
    "reward": ("loss", "accuracy", "margin", "calibration/error"),
    "dpo": ("loss", "accuracy", "margin", "calibration/error"),
    "prm": ("loss", "accuracy", "accuracy/whole_solutions"),
}
"""Held-out figures of the objectives on data that tell models apart."""


def _evaluation(recipe: Recipe, _: Sequence[str]) -> Findings:
    settings, data = recipe.eval, recipe.data
    if settings.best is None:
        if settings.stop_after is not None:
            yield (
                "eval.stop_after counts evaluations without a better one: name the figure that is"
                " compared, e.g. eval.best: reward"
            )
        return
    if settings.every == 0:
        yield (
            ("eval.best", "eval.every"),
            "eval.best compares evaluations during training, and there is none: set eval.every",
        )
    held_out = data.task is not None or data.eval_path is not None or bool(data.parts)
    if not held_out and recipe.environment.verifiers is None:
        yield (
            ("eval.best", "data.eval_path"),
            (
                "eval.best compares evaluations, and nothing is held out: set data.eval_path or"
                " data.eval_fraction"
            ),
        )
    known = _figures(recipe)
    by_column = settings.best.startswith("greedy/") and "=" in settings.best
    if settings.best not in known and not by_column:
        yield (
            f"eval.best is a held-out figure, one of {', '.join(known)}; got"
            f" {settings.best!r}{closest(settings.best, known)}"
        )


def _figures(recipe: Recipe) -> list[str]:
    """Names of held-out figures by which `eval.best` can choose."""
    if not is_online(recipe.objective) and not recipe.rewards:
        return list(DATASET_FIGURES[recipe.objective])
    figures = ["greedy_reward"]
    if verdict_of(recipe.rewards, recipe.verdict) is not None or not recipe.rewards:
        figures = ["greedy", "sampled", f"pass@{recipe.eval.k}"]
    figures.append("reward")
    for reward in recipe.rewards:
        figures.append(f"rewards/{reward.name or reward.function.rpartition(':')[2]}")
    return figures


_CHECKS: tuple[Callable[[Recipe, Sequence[str]], Findings], ...] = (
    _objective,
    _length,
    _model,
    _replay,
    _scratch,
    _data,
    _rewards,
    _rollout,
    _environment,
    _group,
    _critic,
    _teacher,
    _curriculum,
    _evaluation,
)
