"""Small real things that many tests need: policies of every family, random samples, rollouts."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import settings
from torch import nn

from groupwise.config.settings import ModelSettings, ScratchSettings
from groupwise.data.tasks.arithmetic import Arithmetic
from groupwise.data.tokenizers import make_tokenizer
from groupwise.environments.conversation import Reply, Stream
from groupwise.models.loading import make_policy
from groupwise.models.policy import Policy
from groupwise.models.scratch import scratch_model
from groupwise.records import Branch, Episode, Finish, Prompt, Rollout, RolloutGroup, Sample, Sampling, Turn

# The same examples in every run, so that a failure is a failure everywhere. `--hypothesis-seed=N` takes as many others,
# `--hypothesis-profile=search` looks for new ones; `few` is for what is asked again under other circumstances.
settings.register_profile("same", derandomize=True, max_examples=80, deadline=None, print_blob=True)
settings.register_profile("seeded", settings.get_profile("same"), derandomize=False, database=None)
settings.register_profile("search", max_examples=2000, deadline=None, print_blob=True)
settings.register_profile("few", settings.get_profile("same"), max_examples=20)
settings.load_profile("same")

# A shell ignores Ctrl-C for what it starts in the background, and children inherit that; the tests' children are to hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """A profile whose examples are always the same would not hear of a seed."""
    if config.getoption("--hypothesis-seed") is not None and config.getoption("--hypothesis-profile") is None:
        settings.load_profile("seeded")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever asks for a process or a browser is slow without saying so."""
    for item in items:
        if {"forked", "chromium"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def signals_are_left_alone() -> Iterator[None]:
    """A run that a test leaves open would hear the signals of the tests behind it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    changed = [number for number, handler in before.items() if signal.getsignal(number) is not handler]
    for number in changed:
        signal.signal(number, before[number])
    assert not changed, "a handler is left: the test did not close what it started"


@pytest.fixture(autouse=True)
def users_modules_are_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files of the same name in the folders of two tests are two modules."""
    path, modules = [*sys.path], {*sys.modules}
    yield
    sys.path[:] = path
    for name in {*sys.modules} - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path_factory.getbasetemp()):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="session")
def disks_are_not_waited_for() -> Iterator[None]:
    """A run brings some fifty files and folders to the disk, at milliseconds each.  What the system holds in memory is lost only
    with its power, which no test cuts.  Processes of their own wait as ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: os.fstat(descriptor) and None)
        yield


class ScriptedConversation:
    """One episode of a `ScriptedEnvironment`; what the engine did with it stands in `heard`, `stream` and `closed`."""

    def __init__(self, environment: ScriptedEnvironment, engines: Stream, seed: int) -> None:
        self.environment, self.engines, self.prompt, self.index = environment, engines, engines.prompt, engines.index
        self.rng = np.random.default_rng([*self.prompt.id.encode(), self.index, seed])
        self.turns: list[Turn] = []
        self.heard: list[tuple[Sequence[int], Finish, Sequence[float], int]] = []
        self.stream: list[int] = []
        self.branches: list[Branch] = []
        self.closed: list[Finish] = []
        self.count = int(self.rng.integers(1, environment.turns + 1))

    def open(self) -> Future[Reply]:
        return self.environment.later(self, self.reply)

    def answer(self) -> Future[Reply]:
        assert not self.closed
        begin, turn = len(self.stream), self.engines.turns[-1]
        tokens, finish, version = self.engines.tokens[turn.begin : turn.end], turn.finish, self.engines.version[-1]
        logp = self.engines.logp[turn.begin : turn.end]
        self.stream += tokens
        self.heard.append((tokens, finish, logp, version))  # nobody may change them later
        self.turns.append(Turn(begin=begin, end=len(self.stream), finish=finish, reward=float(len(self.turns))))
        return self.environment.later(self, self.reply)

    def reply(self) -> Reply:
        """The environment's next words: a function of prompt, index, seed and turn alone."""
        if len(self.turns) == self.count:
            return Reply(tokens=np.zeros(0, np.int64), finish=Finish.TURNS)
        new = self.rng.integers(4, self.environment.vocabulary, size=int(self.rng.integers(0, self.environment.longest + 1)))
        limit = int(self.rng.integers(1, 6)) if self.rng.random() < 0.7 else None
        if self.turns and self.rng.random() < self.environment.cut:
            context = np.concatenate([self.prompt.tokens, np.array(self.stream, np.int64), new])
            if self.environment.cut_to == "other":
                context = context[self.rng.random(context.size) < 0.6] if self.rng.random() < 0.5 else context[: context.size // 2]
                context = context if context.size else new[:1] if new.size else self.prompt.tokens
            elif self.environment.cut_to == "same":
                context = context[: context.size - new.size]
            self.branches.append(Branch(begin=len(self.stream), context=context))
            return Reply(tokens=np.zeros(0, np.int64), context=context, limit=limit)
        self.stream += new.tolist()
        return Reply(tokens=new, limit=limit)

    def close(self, finish: Finish) -> Episode:
        self.closed.append(finish)
        return Episode(turns=tuple(self.turns), branches=tuple(self.engines.branches))


class ScriptedEnvironment:
    """An environment whose answers are random ids by a fixed script, some of which come later than others.

    turns: most of an episode.   longest: ids of an answer.   cut: how often an answer is a context instead; cut_to: `same`, what
    stands there already; `longer`, with the answer behind it; `other`.   delays: seed of how late answers come; None: at once.
    never: conversations (prompt's id, index) that get no answer to their first turn.
    """

    def __init__(
        self,
        *,
        turns: int = 4,
        longest: int = 6,
        cut: float = 0.0,
        cut_to: str = "same",
        delays: int | None = None,
        never: Collection[tuple[str, int]] = (),
        vocabulary: int = 40,
    ) -> None:
        self.turns, self.longest, self.cut, self.cut_to, self.never = turns, longest, cut, cut_to, never
        self.vocabulary = vocabulary
        self.begun: dict[tuple[str, int], ScriptedConversation] = {}
        self._delay = None if delays is None else np.random.default_rng(delays)
        self._pool = ThreadPoolExecutor(4)

    def begin(self, stream: Stream, *, seed: int) -> ScriptedConversation:
        key = stream.prompt.id, stream.index
        assert key not in self.begun
        found = self.begun[key] = ScriptedConversation(self, stream, seed)
        return found

    def later(self, who: ScriptedConversation, reply: Callable[[], Reply]) -> Future[Reply]:
        if who.turns and (who.prompt.id, who.index) in self.never:
            return Future()
        if self._delay is None:
            said: Future[Reply] = Future()
            said.set_result(reply())
            return said
        seconds = float(self._delay.random() * 0.004)
        return self._pool.submit(lambda: (time.sleep(seconds), reply())[1])

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture
def scripted_environment() -> Iterator[Callable[..., ScriptedEnvironment]]:
    """`scripted_environment(...)`: see `ScriptedEnvironment`."""
    made: list[ScriptedEnvironment] = []

    def make(**keywords: Any) -> ScriptedEnvironment:
        made.append(ScriptedEnvironment(**keywords))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gemma2", "mixtral")


def exact_norms(model: nn.Module) -> None:
    """Replace transformers' RMS norms, which compute in float32 whatever the weights, by torch's own: for float64 tests."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, nn.RMSNorm):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=child.weight.dtype)
                norm.weight = child.weight
                setattr(module, name, norm)


@pytest.fixture(scope="session")
def tiny_policy() -> Callable[..., Policy]:
    """`tiny_policy(family, dtype=..., seed=..., model=ModelSettings(...), **scratch)`: a random model of 2 layers, 32 wide.

    Its biases are random too: at 0, where transformers starts them, whoever forgets one would not be noticed.
    """

    def make(
        family: str = "llama",
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        settings: ModelSettings | None = None,
        tokenizer: Any = None,
        scale: float = 1.0,
        **scratch: Any,
    ) -> Policy:
        tokenizer = tokenizer or make_tokenizer("arithmetic")
        shape = {"hidden": 32, "layers": 2, "heads": 4, "context": 96} | scratch
        kv_heads = shape.pop("kv_heads", 2)
        model = scratch_model(
            ScratchSettings(family=family, **shape),  # type: ignore[arg-type]
            vocabulary=len(tokenizer),
            eos_ids=(tokenizer.eos_token_id,),
            pad_id=tokenizer.pad_token_id,
            bos_id=tokenizer.bos_token_id,
            seed=seed,
            kv_heads=None if family == "gpt2" else kv_heads,
        ).to(dtype)
        if dtype == torch.float64:
            exact_norms(model)
        with torch.no_grad():  # sharper than an initial model's almost uniform distribution
            noise = torch.Generator().manual_seed(seed)
            for name, parameter in model.named_parameters():
                parameter.mul_(scale)
                if name.endswith("bias"):
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise).to(dtype))
        return make_policy(model, tokenizer, settings)

    return make


@pytest.fixture
def random_samples() -> Callable[..., list[Sample]]:
    """`random_samples(groups, size, seed)`: ragged groups, completions of 1 to `longest` tokens, ragged prompts from 1 token."""

    def make(
        groups: int = 3, size: int = 4, seed: int = 0, vocabulary: int = 60, longest: int = 12, temperature: float = 0.7
    ) -> list[Sample]:
        rng = np.random.default_rng(seed)
        samples = []
        for group in range(groups):
            prompt = rng.integers(0, vocabulary, size=1 if group == 0 else int(rng.integers(2, 12)))
            for _ in range(size):
                n = int(rng.integers(1, longest + 1))
                samples.append(
                    Sample(
                        group=str(group),
                        prompt=prompt,
                        completion=rng.integers(0, vocabulary, size=n),
                        weight=rng.random(n) + 0.1,
                        advantage=rng.normal(size=n),
                        behavior_logp=-3.0 - rng.random(n),
                        reference_logp=-3.0 - rng.random(n),
                        temperature=temperature,
                    )
                )
        return samples

    return make


@pytest.fixture
def scored_group() -> Callable[..., RolloutGroup]:
    """`scored_group(rewards, lengths, ...)`: a group of rollouts with random tokens and given rewards; None = unscorable."""

    def make(
        rewards: list[float | None],
        lengths: list[int] | None = None,
        *,
        prompt: int = 5,
        id: str = "0/0",
        seed: int = 0,
        truncated: tuple[int, ...] = (),
        vocabulary: int = 60,
        eos: int | None = None,
        sampling: Sampling | None = None,
        behavior: float = -4.0,
    ) -> RolloutGroup:
        rng = np.random.default_rng(seed)
        lengths = lengths or [int(rng.integers(1, 10)) for _ in rewards]
        question = Prompt(id=id, tokens=rng.integers(5, vocabulary, size=prompt), text="?", row={"answer": "1"})
        rollouts = []
        for i, n in enumerate(lengths):
            tokens = rng.integers(5, vocabulary, size=n)
            ends = eos is not None and i not in truncated and n > 0
            if ends:
                tokens[-1] = eos
            rollouts.append(
                Rollout(
                    prompt=question,
                    index=i,
                    tokens=tokens,
                    behavior_logp=behavior + 0.3 * rng.normal(size=n),
                    finish=Finish.EOS if ends else Finish.LENGTH if i in truncated else Finish.STOP,
                    eos_ids=(eos,) if eos is not None else (vocabulary + 1,),
                    sampling=sampling or Sampling(temperature=0.9),
                    text=f"completion {i}",
                )
            )
        values = np.array([np.nan if r is None else r for r in rewards], dtype=np.float64)
        return RolloutGroup(rollouts=tuple(rollouts), names=("r",), rewards=values[:, None], reward=values)

    return make


@pytest.fixture(scope="session")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl and test.jsonl in GSM8K's form: a story, its calculations as `<<12+9=21>>`, the answer behind ####.

    The calculations are those of the built-in arithmetic; the first thirty of train stand in test too.
    """
    task, folder = Arithmetic(), tmp_path_factory.mktemp("gsm8k")
    train = task.prompts(900, seed=0)
    for name, rows in (("train", train), ("test", train[:30] + task.held_out(270))):
        lines = []
        for i in range(0, len(rows), 3):
            sums = [(row["prompt"], row["answer"]) for row in rows[i : i + 3]]
            story = f"Janet fills three baskets. She reckons {', '.join(asked for asked, _ in sums)}. What is the last number?"
            worked = "".join(f"A basket holds <<{asked}={value}>>{value}.\n" for asked, value in sums)
            answer = f"{worked}#### {sums[-1][1]}"
            lines.append(json.dumps({"question": story, "answer": answer}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def write_recipe() -> Callable[..., Path]:
    """`write_recipe(folder, name, **changes)`: a small GRPO run on addition, from random weights, below the folder.

    Its reward is `judge` of a file judges.py where the run starts.  Keywords are merged one level deep.
    """

    def write(folder: Path, name: str, **changes: Any) -> Path:
        tree: dict[str, Any] = {
            "name": name,
            "runs": str(folder / "runs"),
            "seed": 3,
            "objective": "grpo",
            "steps": 4,
            "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 96, "tokenizer": "arithmetic"}},
            "data": {"task": "addition", "limit": 64, "eval_limit": 4},
            "rewards": [{"function": "judges.py:judge"}],
            "rollout": {"max_new_tokens": 8},
            "group": {"prompts_per_step": 3, "group_size": 3},
            "optimizer": {"lr": 1e-3},
            "eval": {"k": 2, "at_start": False},
            "save": {"every": 1},
        }
        for key, value in changes.items():
            tree[key] = tree[key] | value if isinstance(value, dict) and isinstance(tree.get(key), dict) else value
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    return write


@pytest.fixture(scope="session")
def check_types() -> Callable[..., None]:
    """See `python_api/checkers.py`."""
    spec = importlib.util.spec_from_file_location("checkers", Path(__file__).parent / "python_api" / "checkers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.check_types


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A `ForkServer`, one for the workers of xdist together; a test asks for `forked`."""
    spec = importlib.util.spec_from_file_location("fork_server", Path(__file__).with_name("fork_server.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    together = "PYTEST_XDIST_WORKER" in os.environ
    server = module.ForkServer(tmp_path_factory.getbasetemp().parent if together else None)
    yield server
    server.close()


@pytest.fixture
def forked(fork_server: Any) -> Iterator[Any]:
    """`forked.start("train", path, "--quiet")`: the command as a process, without an interpreter's start; see `ForkServer`."""
    yield fork_server
    fork_server.end_all()


Browser = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="session")
def chromium_with() -> Browser:
    """`with chromium_with("--flag") as browser`: a headless Chromium; skips, with what to install, where there is none.

    While one is open, Playwright's asyncio loop counts as running in this thread: a second one, and `asyncio.run`, are refused.
    So whoever opens one closes it with the tests of its module.
    """
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = os.environ.get("GROUPWISE_CHROMIUM") or next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium: install one (apt-get install chromium), or name it in GROUPWISE_CHROMIUM")

    @contextmanager
    def opened(*flags: str) -> Iterator[Any]:
        with sync.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", *flags])
            yield browser
            browser.close()

    return opened


@pytest.fixture(scope="session")
def axe() -> Callable[[Any], list[tuple[str, list[str]]]]:
    """`axe(page)`: what axe-core calls serious or critical on an open page, as (rule, the first elements that break it)."""
    core = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed: pip install -e '.[test]'"
    )

    def serious(page: Any) -> list[tuple[str, list[str]]]:
        found = core.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        broken = [rule for rule in found if rule["impact"] in ("serious", "critical")]
        return [(rule["id"], [node["html"][:160] for node in rule["nodes"]][:3]) for rule in broken]

    return serious
