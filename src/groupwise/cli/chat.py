"""`groupwise chat`: talk to a trained model in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from groupwise.cli import arguments as typed
from groupwise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = (
    (
        "groupwise chat runs/demo/grpo                                        with the settings of"
        " the run"
    ),
    "groupwise chat runs/demo/grpo --temperature 0 --max-new-tokens 20    greedy, and brief",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument("checkpoint", metavar="RUN", help="a run, a checkpoint or a model folder")
    command.add_argument("--system", metavar="TEXT", help="system message (default: the run's)")
    typed.environment(command)
    command.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="0 is greedy (default %(default)g)",
    )
    length = "longest completion (default: the run's, else 256)"
    command.add_argument("--max-new-tokens", type=typed.positive, metavar="N", help=length)
    command.add_argument(
        "--seed",
        type=typed.seed,
        default=0,
        metavar="N",
        help="seed of the samples (default %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Talk."""
    if not options.temperature >= 0:
        raise ConfigError(f"--temperature must be at least 0, got {options.temperature:g}")
    return chat(
        options.checkpoint,
        system=options.system,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        environment=typed.pairs(options.environment, "--environment") or None,
    )


def chat(
    path: str,
    *,
    system: str | None = None,
    temperature: float = 1.0,
    max_new_tokens: int | None = None,
    seed: int = 0,
    environment: Mapping[str, Any] | None = None,
) -> int:
    """Talk to a checkpoint in the terminal; an empty line or end of input ends it.  Returns the
    exit status.

    A model of a run is asked as the run asked.  With a chat template, or an environment, the
    conversation so far is the prompt; else every line is a prompt of its own, put into the run's
    template.
    environment: keys of a recipe's `environment`, whose tools the model may call while it answers;
        default: the run's."""
    from rich.console import Console

    from groupwise.api.loaded_policy import load_policy
    from groupwise.api.progress import safe
    from groupwise.api.tool_chat import Answered
    from groupwise.rewards.completions import spoken
    from groupwise.runs.origin import origin_of
    from groupwise.runs.trust import demand_trust

    console = Console(highlight=False)
    origin = origin_of(path)
    if origin is not None and environment is None:
        demand_trust(origin, ("environment",))
    policy = load_policy(path)
    data = policy.data if system is None else dataclasses.replace(policy.data, system=system)
    talks = (
        data.chat
        or environment is not None
        or (origin is None and bool(policy.tokenizer.chat_template))
    )
    policy = dataclasses.replace(policy, data=data, conversed=False)
    if talks:
        way = "a conversation" + (f" under {data.system!r}" if data.system else "")
    else:
        way = "every line is a prompt of its own" + (
            f", put into {data.template!r}" if data.template else ""
        )
    length = max_new_tokens or policy.max_new_tokens
    console.print(
        safe(f"{path}: {way}; at most {length} tokens; an empty line ends it", style="dim"),
        soft_wrap=True,
    )
    messages: list[Mapping[str, Any]] = []
    with ExitStack() as ends:
        answered = Answered.of(policy, origin, environment, length, ends) if talks else None
        while typed := _typed(console):
            messages.append({"role": "user", "content": typed})
            if answered is None:
                answer = policy.generate(
                    messages if talks else typed,
                    max_new_tokens=length,
                    temperature=temperature,
                    seed=seed,
                )
                messages.append({"role": "assistant", "content": answer})
            else:
                rollout = answered.turn(messages, temperature, seed)
                answer, episode = spoken(rollout), rollout.episode
                messages += (
                    [{"role": "assistant", "content": rollout.text}]
                    if episode is None
                    else episode.messages
                )
                for call in (
                    () if episode is None else (call for one in episode.turns for call in one.calls)
                ):
                    console.print(
                        safe(f"{call.name}({call.arguments}) -> {call.result}", style="dim"),
                        soft_wrap=True,
                    )
            console.print(safe(answer), soft_wrap=True)
            seed += 1  # the same question again has another answer
    return 0


def _typed(console: Console) -> str:
    """The next line; empty at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        console.print()  # Ctrl-D leaves the cursor behind the prompt
        return ""
    except UnicodeDecodeError as error:
        raise DataError(
            f"standard input: not {error.encoding.upper()}: {error.reason} (byte"
            f" 0x{error.object[error.start]:02x})"
        ) from None
