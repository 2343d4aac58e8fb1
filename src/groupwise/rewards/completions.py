"""Rollouts as reward functions see them: texts or messages, columns, states of environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.records import Episode, Prompt, Rollout
from groupwise.rewards.environment import EnvironmentState
from groupwise.rewards.user_functions import Completions


def completions_of(rollouts: Sequence[Rollout], columns: Sequence[str]) -> Completions:
    """Return the arguments of reward functions for rollouts.   columns: of the data rows."""
    cells: dict[str, list[Any]] = {}
    for column in columns:
        cells[column] = [rollout.prompt.row.get(column) for rollout in rollouts]
    states = rewards = written = None
    if any(rollout.episode is not None for rollout in rollouts):
        states = [_state(rollout.episode) for rollout in rollouts]
        rewards = [_reward(rollout.episode) for rollout in rollouts]
        written = [rollout.tokens[rollout.trained].tolist() for rollout in rollouts]
    completion_ids = [rollout.tokens.tolist() for rollout in rollouts]
    prompts = [rollout.prompt for rollout in rollouts]
    prompt_ids = [prompt.tokens.tolist() for prompt in prompts]
    return Completions(
        labels=[rollout.place for rollout in rollouts],
        prompts=list(map(prompt_of, prompts)),
        prompt_messages=[prompt.messages for prompt in prompts],
        prompt_texts=[prompt.text for prompt in prompts],
        completions=list(map(_completion_of, rollouts)),
        texts=list(map(spoken, rollouts)),
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        finish_reasons=[rollout.finish.value for rollout in rollouts],
        columns=cells,
        environments=states,
        environment_rewards=rewards,
        written_ids=written,
    )


def prompt_of(prompt: Prompt) -> str | list[Mapping[str, Any]]:
    """Return a prompt as reward functions see it: the messages of a row that brings messages, else
    its text without a chat template.
    """
    if prompt.messages is None:
        return prompt.text
    if prompt.wrapped:
        return str(prompt.messages[-1]["content"])
    return list(prompt.messages)


def _completion_of(rollout: Rollout) -> str | list[Mapping[str, Any]]:
    """Return a completion in the form of its prompt; that of an episode as its messages."""
    episode = rollout.episode
    if episode is not None and episode.messages:
        return list(episode.messages)
    if isinstance(prompt_of(rollout.prompt), list):
        return as_messages(spoken(rollout))
    return spoken(rollout)


def as_messages(text: str) -> list[Mapping[str, Any]]:
    """Return a completion as the chat message that it is."""
    return [{"role": "assistant", "content": text}]


def spoken(rollout: Rollout) -> str:
    """Return the text of a completion for rewards that read one text: of several turns the policy's
    last one, with its reasoning.

    Text of tools and environments is left out: an answer that stands only in a tool's result was
    not given by the policy.
    """
    if rollout.episode is None:
        return rollout.text
    for message in reversed(rollout.episode.messages):
        if message["role"] == "assistant":
            reasoning = message.get("reasoning_content")
            said = str(message["content"])
            return f"<think>{reasoning}</think>{said}" if reasoning else said
    return ""


def _state(episode: Episode | None) -> EnvironmentState | None:
    if episode is None or episode.state is None:
        return None
    return EnvironmentState(episode.environment or "environment", episode.state, episode.reward)


def _reward(episode: Episode | None) -> float | None:
    return None if episode is None else episode.reward
