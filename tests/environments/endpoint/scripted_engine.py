"""An engine whose policy is a script: it writes down each turn that it draws.

It stands in a file of its own because a recipe names it (`rollout.engine`).  Its file imports no other test.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from groupwise.environments.conversation import Stream
from groupwise.records import Finish, Rollout
from groupwise.rollout.engine import InProcess, completion_limit
from groupwise.rollout.episodes import Conversations

DRAWN = "drawn.jsonl"
"""One line for each turn: prompt, index, the place of its first token, what it was drawn behind, its ids and log-probs."""
VARIABLE = "SCRIPTED_TURNS"
"""The turns as JSON: a list of texts, the same for every completion."""


class ScriptedEngine(InProcess):
    def __init__(self, policy: Any, environment: Any) -> None:
        self.policy, self.environment = policy, environment
        self.texts = json.loads(os.environ[VARIABLE])

    def generate(self, prompts: Any, *, group_size: int, sampling: Any, seed: int) -> Iterator[tuple[Rollout, ...]]:
        for prompt in prompts:
            streams = [Stream(prompt, index, completion_limit(self.policy, prompt, sampling)) for index in range(group_size)]
            rollouts: dict[int, Rollout] = {}
            with Conversations(self.policy, self.environment, sampling, seed, streams, rows=group_size) as conversations:
                conversations.begin()
                while conversations.unfinished:
                    for stream, rollout in conversations.heard(self.version, wait=True):
                        if rollout is None:
                            self.draw(stream)
                            conversations.turn(stream, Finish.EOS)
                        else:
                            rollouts[rollout.index] = rollout
            yield tuple(rollouts[index] for index in range(group_size))

    def draw(self, stream: Stream) -> None:
        text = self.texts[len(stream.turns)]
        ids = [*self.policy.tokenizer(text, add_special_tokens=False)["input_ids"], self.policy.eos_ids[0]]
        logp = [-0.5 - place / 64 for place in range(len(ids))]
        drawn = {"prompt": stream.prompt.id, "index": stream.index, "begin": len(stream.tokens), "ids": ids, "logp": logp}
        with Path(DRAWN).open("a") as file:
            file.write(json.dumps({**drawn, "behind": stream.ids().tolist()}) + "\n")
        stream.add(ids, logp, self.version)


def make(policy: Any, *, max_rows: int | None, environment: Any) -> ScriptedEngine:
    return ScriptedEngine(policy, environment)
