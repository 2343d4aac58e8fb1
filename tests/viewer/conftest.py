"""Servers over made-up runs, and a real Chromium where there is one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("viewer_synthetic", Path(__file__).with_name("synthetic.py"))
assert _spec is not None
assert _spec.loader is not None
synthetic = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("viewer_synthetic", synthetic)
_spec.loader.exec_module(synthetic)

from groupwise.viewer.pages import Pages  # noqa: E402
from groupwise.viewer.server import Viewer  # noqa: E402
from groupwise.viewer.sources import open_sources  # noqa: E402


@pytest.fixture(scope="session")
def made() -> Any:
    """The module that makes runs up."""
    return synthetic


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 40 steps, which nobody changes."""
    return synthetic.make_run(tmp_path_factory.mktemp("runs") / "alpha", 40)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another run, with another configuration, of the same prompts."""
    return synthetic.make_run(
        tmp_path_factory.mktemp("more") / "beta", 30, config="objective: grpo\nsteps: 30\ngroup: {beta: 0.0}\n", evaluated=False
    )


@pytest.fixture(scope="session")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose completions try to be more than text."""
    texts = synthetic.HOSTILE
    return synthetic.make_run(tmp_path_factory.mktemp("bad") / "hostile", 2, groups=2, size=len(texts), texts=texts, prompts=2)


SMALL = """
objective: grpo
name: small
seed: 3
steps: 2
model: {scratch: {hidden: 32, heads: 4, context: 96, tokenizer: arithmetic}}
data: {task: addition, limit: 64, eval_limit: 2}
rewards: [{function: regex, args: {pattern: "[0-4]"}}]
rollout: {max_new_tokens: 8}
group: {prompts_per_step: 4, group_size: 4, updates_per_rollout: 2}
optimizer: {lr: 0.05}
eval: {k: 2, at_start: false}
save: {every: 1}
"""


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of two steps."""
    from groupwise.config.recipes import parse_stages
    from groupwise.runs.run import train

    root = tmp_path_factory.mktemp("trained")
    (recipe,) = parse_stages(SMALL + f"runs: {root}\n", "small.yaml").values()
    for _ in train(recipe):
        pass
    return root / "small"


@pytest.fixture
def viewer() -> Iterator[Callable[..., Viewer]]:
    """`viewer(path, ...)` -> a server of them, closed at the end."""
    started: list[Viewer] = []

    def start(*paths: Path) -> Viewer:
        found = Viewer(Pages(open_sources(paths))).start()
        started.append(found)
        return found

    yield start
    for one in started:
        one.close()


@pytest.fixture(scope="module")
def chromium(chromium_with: Callable[..., Any]) -> Iterator[Any]:
    """A headless browser, for the tests of one module."""
    with chromium_with() as browser:
        yield browser


class Watched:
    """A page with a storage of its own, what it may ask, and what went wrong on it."""

    def __init__(self, chromium: Any) -> None:
        context = chromium.new_context()
        context.add_init_script("try { localStorage.clear(); } catch { /* a page from a file may have none */ }")
        self.page, self.own, self.wrong = context.new_page(), "about:", []
        self.page.on("console", lambda message: self.wrong.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.own, "data:")):
            self.wrong.append(f"request {request.url}")

    def open(self, address: str, width: int, height: int, scheme: str) -> None:
        self.own = address.split("#")[0].rsplit("/", 1)[0]
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme=scheme)
        self.page.goto(address)

    def leave(self) -> list[str]:
        """Be empty again.  What went wrong until now."""
        found, self.wrong = self.wrong, []
        self.own = "about:"
        self.page.goto("about:blank")
        return found


@pytest.fixture(scope="module")
def unused(chromium: Any) -> list[Watched]:
    """Pages that no test has open.  One that showed the application before shows it again at a third of a new page's cost."""
    return []


@pytest.fixture
def tab(chromium: Any, unused: list[Watched]) -> Iterator[Callable[..., Any]]:
    """`tab(address, width, scheme)` -> a page that is ready; at the end no error was logged and no other host was asked."""
    opened: list[Watched] = []

    def open_(address: str, width: int = 1280, scheme: str = "light", height: int = 900) -> Any:
        opened.append(unused.pop() if unused else Watched(chromium))
        opened[-1].open(address, width, height, scheme)
        opened[-1].page.wait_for_selector("main[data-ready]", timeout=30_000)
        return opened[-1].page

    yield open_
    found = [problem for one in opened for problem in one.leave()]
    unused.extend(opened)
    assert not found, found
