"""Worlds over byte tokenizers with templates that behave as the families' do."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from groupwise.config.settings import EnvironmentSettings
from groupwise.data.templates import Template
from groupwise.environments.conversation import Reply, Stream
from groupwise.environments.tool_episodes import ToolEnvironment, ToolEpisode
from groupwise.records import Finish, Prompt
from groupwise.runs.environments import make_runtime, tools_of

HERE = Path(__file__).parent
collect_ignore_glob = ["*/files/*", "files/*"]
"""What users and adapters bring; tests name it."""


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="session")
def templates() -> ModuleType:
    """tests/data/test_turns.py, which has the templates."""
    return _module("templates_of_families", HERE.parent / "data" / "test_turns.py")


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of files start where the users' files lie."""
    monkeypatch.chdir(HERE / "files")


class Table:
    """An environment, and how a test talks with it."""

    def __init__(self, environment: ToolEnvironment, template: Template) -> None:
        self.environment, self.template, self.tokenizer = environment, template, template.tokenizer
        self.streams: dict[ToolEpisode, Stream] = {}

    def prompt(self, text: str = "Do it.", name: str = "0/1", **row: Any) -> Prompt:
        row = {"prompt": [{"role": "user", "content": text}], **row}
        (question,) = self.template.ask([self.template.read(row, "a row")])
        return Prompt(id=name, tokens=question.tokens, text=question.text, row=row, messages=tuple(row["prompt"]))

    def open(self, prompt: Prompt, index: int = 0, seed: int = 0) -> tuple[ToolEpisode, Reply]:
        stream = Stream(prompt, index, 1 << 30)
        talk = self.environment.begin(stream, seed=seed)
        reply = talk.open().result()
        self.streams[talk] = stream
        stream.take(reply, 0, limit=stream.limit)
        return talk, reply

    def begin(self, index: int = 0, seed: int = 0, **row: Any) -> tuple[ToolEpisode, Reply]:
        return self.open(self.prompt(**row), index, seed)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, ids: Any) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def draw(self, talk: ToolEpisode, ids: list[int], finish: Finish = Finish.EOS) -> Future[Reply]:
        """The engine has drawn a turn."""
        stream = self.streams[talk]
        stream.add(ids, [0.0] * len(ids), 0)
        stream.end_turn(finish)
        return talk.answer()

    def later(self, talk: ToolEpisode, text: str, end: str = "<|im_end|>", finish: Finish = Finish.EOS) -> Future[Reply]:
        return self.draw(talk, self.ids(text + end), finish)

    def say(self, talk: ToolEpisode, text: str, end: str = "<|im_end|>", finish: Finish = Finish.EOS) -> Reply:
        return self.hear(talk, self.later(talk, text, end, finish))

    def hear(self, talk: ToolEpisode, reply: Future[Reply]) -> Reply:
        """The engine takes a reply."""
        found = reply.result()
        if found.finish is None:
            self.streams[talk].take(found, 0, limit=1 << 30)
        return found


def call(name: str, **arguments: Any) -> str:
    """A call as Qwen's models write it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


@pytest.fixture
def table(templates: ModuleType) -> Iterator[Callable[..., Table]]:
    """`table(tools=[...], template="keeps", ...)`: keys of `environment`, and `data.control_tokens`."""
    made: list[ToolEnvironment] = []

    def make(template: str = "keeps", tokenizer: Any = None, control_tokens: Any = "warn", **settings: Any) -> Table:
        chosen = EnvironmentSettings(**{"tool_timeout": 60.0, **settings})
        turns = templates.turns_of(templates.OWN.get(template, template), tokenizer)
        runtime = make_runtime(chosen)
        assert runtime is not None
        shown = Template(tokenizer=turns.tokenizer, chat=True, tools=tools_of(runtime), control_tokens=control_tokens)
        made.append(ToolEnvironment(runtime, chosen, shown, turns.eos_ids))
        return Table(made[-1], shown)

    yield make
    for environment in made:
        environment.close()
