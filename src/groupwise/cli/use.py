"""Using a trained model: evaluate a checkpoint on prompts, chat with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from groupwise.config.recipes import make_recipe
from groupwise.config.settings import DataSettings, ModelSettings, RewardSettings
from groupwise.data.load import load_data
from groupwise.data.prompts import encode_prompts, prompt_limit, visit
from groupwise.data.sources import read_rows
from groupwise.data.templates import Template, Tools
from groupwise.environments.episodes import EpisodeWorld
from groupwise.errors import ConfigError, DataError
from groupwise.models.policy import Policy, load_policy
from groupwise.records import Prompt, Sampling
from groupwise.rewards.compose import build_rewards
from groupwise.rewards.compose import spoken as spoken_text
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.probe import prove_engine
from groupwise.runs.loaded import model_folder
from groupwise.runs.worlds import make_source, tools_of
from groupwise.training.evaluate import Evaluation, evaluate


@dataclass(frozen=True, slots=True)
class EvalReport:
    """An evaluation, for people and for programs."""

    checkpoint: str
    evaluation: Evaluation

    def render(self) -> str:
        """Plain text."""
        found = self.evaluation
        lines = [
            f"{self.checkpoint}: {found.prompts} prompts, {found.k} samples each (± is half of a 95 % interval)",
            f"  greedy accuracy   {found.greedy}",
            f"  sampled accuracy  {found.sampled}",
            f"  {f'pass@{found.k}':16}  {found.pass_at_k}",
            f"  mean reward       {found.reward}",
            f"  mean length       {found.length:.1f} tokens, {found.truncated:.1%} truncated",
        ]
        for column, shares in found.by_column.items():
            lines.append(f"  greedy by {column}: " + ", ".join(f"{value} {share:.3f}" for value, share in shares.items()))
        return "\n".join(lines)

    def to_json(self) -> str:
        """One JSON object."""
        found = {"checkpoint": self.checkpoint, "prompts": self.evaluation.prompts, "k": self.evaluation.k}
        return json.dumps(found | self.evaluation.metrics(), indent=1)


def evaluate_checkpoint(
    path: str,
    *,
    data: str | None = None,
    task: str | None = None,
    task_args: Mapping[str, Any] | None = None,
    reward: str = "accuracy",
    k: int = 8,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    limit: int | None = None,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    system: str | None = None,
    chat: bool = False,
    split: str = "test",
    dtype: str = "float32",
    environment: Mapping[str, Any] | None = None,
) -> EvalReport:
    """Greedy accuracy, sampled accuracy and pass@k of a checkpoint.

    data: a file or hub name, all of whose rows are used; or task: a built-in task, whose held-out prompts are used.
    reward: the function that says what is right.   k: samples per prompt.   limit: first rows only.
    environment: keys of a recipe's `environment`.   Raises ConfigError, DataError, RewardError, EnvironmentFailure.
    """
    if (data is None) == (task is None):
        raise ConfigError("say what to evaluate on: --data FILE or --task NAME")
    policy = load_policy(ModelSettings(path=model_folder(path), dtype=dtype))  # type: ignore[arg-type]
    settings = DataSettings(
        path=data, task=task, task_args=task_args or {}, columns=columns or {}, template=template, system=system, chat=chat,
        split=split, eval_limit=limit, limit=1 if task else limit,
    )  # fmt: skip
    with ExitStack() as ends:
        world = _world(policy, settings, environment or {}, ends)
        prompts = _prompts(policy, settings, max_new_tokens, seed, tools_of(None if world is None else world.source))
        functions = build_rewards([RewardSettings(function=reward)], columns=list(prompts[0].row), tokenizer=policy.tokenizer)
        ends.callback(functions.close)
        sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens)
        prove_engine(policy, NativeEngine)
        engine = NativeEngine(policy, max_rows=256, world=world)
        return EvalReport(path, evaluate(engine, functions, prompts, k=k, sampling=sampling, seed=seed))


def _world(policy: Policy, data: DataSettings, keys: Mapping[str, Any], ends: ExitStack) -> EpisodeWorld | None:
    """Who answers the policy; closed with `ends`.  Raises ConfigError for what is wrong with the keys."""
    unused = {"objective": "grpo", "steps": 1, "model": {"scratch": {}}, "rewards": [{"function": "exact"}]}
    data_keys = {"task": data.task or "addition", "chat": True}
    settings = make_recipe(unused | {"data": data_keys, "environment": dict(keys)}).environment
    source = make_source(settings)
    if source is None:
        return None
    ends.callback(source.close)
    template = Template.build(data, policy.tokenizer, tools_of(source))
    return EpisodeWorld(source, settings, template, policy.eos_ids)


def _prompts(policy: Policy, settings: DataSettings, max_new_tokens: int, seed: int, tools: Tools | None) -> tuple[Prompt, ...]:
    if settings.task is not None:
        given = {"context": policy.context, "max_new_tokens": max_new_tokens, "seed": seed, "tools": tools}
        return load_data(settings, policy.tokenizer, **given).held_out
    assert settings.path is not None
    rows = read_rows(settings.path, settings.split).renamed(settings.columns).first(settings.limit)
    room = prompt_limit(policy.context, max_new_tokens, None)
    found, _ = encode_prompts(rows, Template.build(settings, policy.tokenizer, tools), max_tokens=room)
    return tuple(visit(prompt, "eval") for prompt in found)


def chat(
    path: str,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    seed: int = 0,
    environment: Mapping[str, Any] | None = None,
) -> int:
    """Talk to a checkpoint in the terminal; an empty line or end of input ends it.  Returns the exit status.

    With a chat template the conversation so far is the prompt; without one every line is a prompt of its own.
    environment: keys of a recipe's `environment`: tools that the model may call while it answers.
    """
    with ExitStack() as ends:
        return _chat(path, temperature, max_new_tokens, seed, environment or {}, ends)


def _chat(path: str, temperature: float, max_new_tokens: int, seed: int, environment: Mapping[str, Any], ends: ExitStack) -> int:
    from rich.console import Console

    from groupwise.runs.progress import safe

    console = Console(highlight=False)
    policy = load_policy(ModelSettings(path=model_folder(path)))
    prove_engine(policy, NativeEngine)
    world = _world(policy, DataSettings(chat=True), environment, ends)
    engine = NativeEngine(policy, max_rows=1, world=world)
    template = Template(tokenizer=policy.tokenizer, tools=tools_of(None if world is None else world.source))
    messages: list[Mapping[str, Any]] = []
    console.print(f"{path}: an empty line ends the conversation", style="dim", markup=False)
    turn = 0
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            console.print()  # Ctrl-D leaves the cursor behind the prompt
            return 0
        except UnicodeDecodeError as error:
            raise DataError(
                f"standard input: not {error.encoding.upper()}: {error.reason} (byte 0x{error.object[error.start]:02x})"
            ) from None
        if not said:
            return 0
        messages.append({"role": "user", "content": said})
        told = [dict(message) for message in messages]
        (question,) = template.ask([told if policy.tokenizer.chat_template else said], ["the conversation"])
        sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens)
        prompt = Prompt(id=f"chat/{turn}", tokens=question.tokens, text=question.text, row={"prompt": told})
        ((rollout,),) = engine.generate([prompt], group_size=1, sampling=sampling, seed=seed)
        if rollout.episode is None:
            messages.append({"role": "assistant", "content": rollout.text})
            console.print(safe(rollout.text))
        else:
            messages += rollout.episode.messages
            for call in (call for spoken in rollout.episode.turns for call in spoken.calls):
                console.print(safe(f"{call.name}({call.arguments}) -> {call.result}"), style="dim")
            console.print(safe(spoken_text(rollout)))
        turn += 1
