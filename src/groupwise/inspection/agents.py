"""One turn of an agent against a scripted policy, for `groupwise check`."""

from __future__ import annotations

from typing import Any

from groupwise.environments.agent_harness import AgentHarness
from groupwise.environments.conversation import Stream
from groupwise.environments.harness_episodes import HarnessEnvironment
from groupwise.errors import ConfigError, EnvironmentFailure
from groupwise.records import Finish, Prompt
from groupwise.utils.spelling import counted

SAID = "Done."
"""What the scripted policy says."""
SECONDS = 120.0
"""Seconds that an agent may take to its first request, on a busy machine."""


def try_agent(environment: HarnessEnvironment, prompt: Prompt, tokenizer: Any, end_id: int) -> str:
    """Return the version of an installed agent, and what its first request was like.

    Raises ConfigError for an agent that asks for no turn.
    """
    harness = environment.harness
    assert isinstance(harness, AgentHarness)
    try:
        version = harness.version()
    except EnvironmentFailure as error:
        raise ConfigError(f"{harness.agent} does not say its version: {error}") from None
    stream = Stream(prompt, 0, environment.sampling.max_new_tokens)
    conversation = environment.begin(stream, seed=0)
    try:
        reply = conversation.open().result(SECONDS)
        asked = reply.finish is None
        if asked:
            stream.take(reply, 0, limit=stream.limit)
            context = stream.size
            said = [*tokenizer(SAID, add_special_tokens=False)["input_ids"], end_id]
            stream.add(said, [0.0] * len(said), 0)
            stream.end_turn(Finish.EOS)
            conversation.answer().result(SECONDS)
    except TimeoutError:
        raise ConfigError(
            f"{harness.agent} {version} neither asked nor ended within {SECONDS:g} s"
        ) from None
    finally:
        episode = conversation.close(Finish.DONE)
    if not asked:
        raise ConfigError(f"{harness.agent} {version} asked for no turn: {conversation.failure}")
    found = f"{harness.agent} {version}: it asked for a turn behind {counted(context, 'token')}"
    wishes = episode.turns[0].wishes
    if wishes:
        found += f"; it does not get {', '.join(dict.fromkeys(wishes))}"
    return found
