"""Keys for how completions are sampled and judged: sampling, engine, rewards, tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.config.settings import REWARDS
from groupwise.trl.configuration import Configuration
from groupwise.trl.values import numbers_of, short, texts_of
from groupwise.utils.spelling import counted

LIBRARIES = ("trl", "open_r1")
"""Packages in which these names mean what is built in here."""
REWARD_NAMES = {
    "accuracy": "accuracy",
    "accuracy_reward": "accuracy",
    "think_format_reward": "think_format",
    "format": "think_format",
    "format_reward": "think_format",
    "tag_count": "tags",
    "tag_count_reward": "tags",
}
"""Reward functions of TRL and of well-known scripts that are built in here."""
OVERLONG = ("get_soft_overlong_punishment", "soft_overlong_punishment")
"""The same for `soft_overlong`, whose arguments TRL's script sets to 1280 and 256."""
ENGINE = (
    "vllm_mode",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_device",
    "vllm_tensor_parallel_size",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
)
"""Arguments that `rollout.engine` is made of, beside `use_vllm`."""


class RewardModel(str):
    """The folder or hub name of a reward model in the place of a function."""


class RewardEntry(dict[str, Any]):
    """An entry of `rewards` in the place of a function."""


def write_sampling(trl: Configuration) -> None:
    """Write the distribution that is sampled from, and where completions end."""
    if not trl.online:
        return
    trl.write("rollout.max_new_tokens", trl.whole("max_completion_length"), "max_completion_length")
    arguments, softmax = trl.arguments, "the gradient is the cut distribution's, TRL's the whole's"
    if arguments.get("temperature") is not None:
        trl.write("rollout.temperature", trl.number("temperature"), "temperature")
    if arguments.get("top_k") is not None:
        size = max(trl.number("top_k", kind=int), 0)
        trl.write("rollout.top_k", size, "top_k", detail=softmax if size else "")
    for name in ("top_p", "min_p"):
        if arguments.get(name) is not None:
            trl.write(f"rollout.{name}", trl.number(name), name, detail=softmax)
    if arguments.get("stop") is not None:
        trl.write("rollout.stop", trl.made("stop", texts_of, arguments["stop"]), "stop")
    name = "generation_kwargs"
    options = arguments.get(name)
    if isinstance(options, Mapping) and options.get("stop"):
        lost = sorted(options.keys() - {"stop"})
        detail = f"without {', '.join(lost)}" if lost else ""
        fate = "missing" if lost else "same"
        stop = trl.made(name, texts_of, options["stop"])
        trl.write("rollout.stop", stop, name, detail=detail, fate=fate)


def write_engine(trl: Configuration) -> None:
    """Write the engine, if vLLM samples."""
    arguments = trl.arguments
    if not (arguments.get("use_vllm") and trl.online):
        trl.unused("use_vllm is off", *ENGINE)
        return
    vllm: dict[str, Any] = {"name": "vllm"}
    together = trl.whole("vllm_tensor_parallel_size", 1, null=1)
    url = arguments.get("vllm_server_base_url")
    if url is None and arguments.get("vllm_device") is None:
        if trl.get("vllm_mode") == "colocate":
            vllm["colocated"] = True
            if together > 1:
                vllm["tensor_parallel"] = together
        else:
            host = str(trl.get("vllm_server_host")).replace("0.0.0.0", "127.0.0.1")
            url = f"http://{host}:{trl.get('vllm_server_port')}"
    if url is not None:
        vllm["servers"] = [str(url)]
        serve = "start the servers with `groupwise serve MODEL`; those of `trl vllm-serve` have"
        trl.need(f"rollout.engine: {serve} other routes")
        if together > 1:
            trl.need(f"groupwise serve MODEL -- --tensor-parallel-size {together}")
    lost = unshared(trl, together) if "colocated" in vllm else None
    if lost is not None:
        for name in ("use_vllm", *ENGINE):
            trl.note(name, "missing", lost)
        servers = "servers (`groupwise serve MODEL`) on devices of their own"
        trl.need(f"rollout.engine: {servers}, or nothing: the native engine samples")
        return
    vllm["correct"] = correction(trl)
    trl.write("rollout.engine", vllm, "use_vllm", *ENGINE)


def unshared(trl: Configuration, together: int) -> str | None:
    """Why vLLM cannot share the devices of the trainer; None if it can.   together: processes that
    hold one vLLM.
    """
    if trl.devices % together:
        return f"{together} processes hold a vLLM together, and {trl.devices} are no multiple"
    talks = trl.arguments.get("tools") or trl.arguments.get("environment_factory")
    if together > 1 and talks:
        return "processes that hold a vLLM together hold no conversations: no tools, no environment"
    return None


def correction(trl: Configuration) -> dict[str, Any] | None:
    """How the mismatch of vLLM's probabilities is corrected."""
    prefix = "vllm_importance_sampling"
    if not trl.get(f"{prefix}_correction"):
        return None
    level, _, mode = str(trl.get(f"{prefix}_mode")).partition("_")
    correct: dict[str, Any] = {"level": "token" if level == "token" else "sequence_sum"}
    correct["mode"] = mode or "mask"
    high = f"{prefix}_cap" if trl.arguments.get(f"{prefix}_cap") else f"{prefix}_clip_max"
    for bound, name in (("high", high), ("low", f"{prefix}_clip_min")):
        if trl.get(name) is not None:
            correct[bound] = trl.number(name)
    return correct


def write_rewards(trl: Configuration) -> None:
    """Write `rewards`, with their weights."""
    if not trl.online:
        return
    functions = functions_of(trl)
    if not functions:
        trl.need("rewards: a list of {function: module:function or file.py:function, weight: ...}")
        trl.note("reward_weights", "changed", "rewards.N.weight, one in each entry of rewards")
        return
    weights = trl.arguments.get("reward_weights") or [None] * len(functions)
    weights = trl.made("reward_weights", numbers_of, weights)
    if len(weights) != len(functions):
        counts = counted(len(weights), "weight"), counted(len(functions), "reward function")
        trl.refuse("reward_weights", " for ".join(counts))
    entries: list[dict[str, Any]] = []
    for function, weight in zip(functions, weights, strict=True):
        entry = reward(trl, function)
        name_apart(entry, function, entries)
        if weight is not None:
            entry["weight"] = trl.made("reward_weights", float, weight)
        entries.append(entry)
    sources = ("reward_funcs", "reward_weights", "reward_model_name_or_path")
    trl.write("rewards", entries, *sources)
    guessed = []
    for function, entry in zip(functions, entries, strict=True):
        if type(function) is str and entry["function"] == f"rewards.py:{function}":
            guessed.append(function)
    if guessed:
        verb = "are" if len(guessed) > 1 else "is"
        trl.need(f"rewards: where {', '.join(guessed)} {verb} (rewards.py is a guess)")


def functions_of(trl: Configuration) -> list[Any]:
    """The reward functions and reward models, in their order."""
    functions = trl.arguments.get("reward_funcs")
    if functions is None:
        functions = []
    elif not isinstance(functions, list | tuple):
        functions = [functions]
    judge = trl.arguments.get("reward_model_name_or_path")
    if isinstance(judge, str):  # TRL's scripts put it before the functions
        return [RewardModel(judge), *functions]
    return list(functions)


def name_apart(entry: dict[str, Any], function: Any, before: list[dict[str, Any]]) -> None:
    """Give an entry a name, where one before it has its function's."""
    taken = [other.get("name", called(other["function"])) for other in before]
    name = called(entry["function"])
    if name not in taken or name == "<lambda>":
        return
    source = name
    if isinstance(function, str) and ":" not in function:
        source = str(function)
    entry["name"] = source if source not in taken else f"{source}_{len(before) + 1}"


def reward(trl: Configuration, function: Any) -> dict[str, Any]:
    """Make an entry of `rewards`.  A function of the user's own is never taken for a built-in one
    of the same name.
    """
    if isinstance(function, RewardEntry):
        return dict(function)
    if isinstance(function, RewardModel):
        return {"function": "model", "args": {"path": str(function)}}
    if callable(function):
        module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
        return {"function": built_in(str(module), name) or function}
    if not isinstance(function, str) or not function:
        wanted = "functions are needed, by name or themselves"
        trl.refuse("reward_funcs", f"{wanted}; {short(function)} is none")
    if function in OVERLONG:
        names = ("max_completion_len", "soft_punish_cache")
        sizes = {name: trl.whole(name) for name in names if trl.get(name) is not None}
        return dict(soft_overlong(sizes))
    if function in REWARD_NAMES:  # a name of TRL's registry, not of a script
        return {"function": REWARD_NAMES[function]}
    if function in REWARDS or ":" in function:
        return {"function": function}
    module, dot, name = function.rpartition(".")
    return {"function": f"{module}:{name}" if dot else f"rewards.py:{function}"}


def soft_overlong(arguments: Mapping[str, int]) -> RewardEntry:
    """Make the entry of `rewards` for TRL's punishment of long completions.

    arguments: of the function that makes it.
    """
    args = {
        "max_tokens": arguments.get("max_completion_len", 1280),
        "cache": arguments.get("soft_punish_cache", 256),
    }
    return RewardEntry(function="soft_overlong", args=args)


def built_in(module: str, name: str) -> str | None:
    """What a reward function of TRL's, or of a well-known script, is called here."""
    return REWARD_NAMES.get(name) if module.partition(".")[0] in LIBRARIES else None


def called(function: Any) -> str:
    """The name that a reward gets."""
    if isinstance(function, str):
        return function.rpartition(":")[2]
    return getattr(function, "__name__", type(function).__name__)


def write_environment(trl: Configuration) -> None:
    """Write the tools and the environment."""
    tools, factory = trl.arguments.get("tools"), trl.arguments.get("environment_factory")
    if isinstance(factory, Mapping) or (isinstance(factory, list) and len(factory) > 1):
        trl.note("environment_factory", "missing", "a run has one environment")
        factory = None
    elif isinstance(factory, list) and factory:
        factory = factory[0]
    if tools:
        trl.write("environment.tools", tools, "tools")
    if factory:
        trl.write("environment.factory", factory, "environment_factory")
    name = "max_tool_calling_iterations"
    turns = trl.whole(name, null=0) + 1
    if turns > 1 and (tools or factory):
        trl.write("environment.max_turns", turns, name, detail="turns, one more than rounds")
    elif turns > 1:
        trl.note(name, "changed", f"environment.max_turns: {turns}, with an environment")


CONVERTERS = (write_sampling, write_engine, write_rewards, write_environment)
