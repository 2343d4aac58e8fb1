"""Rollouts ahead of training: which weights draw what, what is remembered, and what a run that was broken off comes to."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rule_rewards import RuleRewards
from safetensors.torch import load_file
from scripted_judge import Server, by_digest

from groupwise.algorithms.losses import Correction
from groupwise.config.recipes import load_recipe
from groupwise.config.resolve import resolve
from groupwise.config.settings import GroupSettings, OptimizerSettings, RewardSettings
from groupwise.errors import EngineError
from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.records import Prompt, Rollout, RolloutGroup, Sampling, Step
from groupwise.rewards.compose import build_rewards
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.rollout_table import groups_from_bytes, groups_to_bytes
from groupwise.runs.run import train
from groupwise.training.groups import PrefetchedRollouts, SampledRollouts
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import score
from groupwise.training.samples import sample_of


def even(rollout: Rollout) -> float:
    """1 for an even sum of ids."""
    return float(rollout.tokens.sum() % 2 == 0)


def prompt(place: int) -> Prompt:
    return Prompt(id=f"0/{place}", tokens=np.arange(6, 9 + place % 4), text=f"prompt {place}", row={})


class Apart:
    """Samples with a copy of the weights, which `send_weights` renews: what a server is, within this process."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.version, self.begun = policy, 0, []
        self.before_group: Callable[[str], None] = lambda name: None
        self._copy = frozen_copy(policy)

    def send_weights(self, version: int) -> None:
        self.version, self._copy = version, frozen_copy(self.policy)

    def generate(self, prompts: Sequence[Prompt], **keywords: Any) -> Iterator[tuple[Rollout, ...]]:
        inner = NativeEngine(self._copy, max_rows=8)
        inner.send_weights(self.version)
        self.begun.append((prompts[0].id, self.version))
        for group in inner.generate(prompts, **keywords):
            self.before_group(group[0].prompt.id)
            yield group


@pytest.fixture
def run(tiny_policy: Callable) -> Callable[..., tuple[Any, Iterator[Step]]]:
    """`run(ahead, engine=..., **group)`: an engine and the steps of a loop over it, 2 prompts x 4 completions each."""

    def start(
        ahead: PrefetchedRollouts | None, kind: type = NativeEngine, steps: int = 6, rewards: Any = None, **group: Any
    ) -> tuple[Any, Iterator[Step]]:
        policy = tiny_policy(scale=2.0)
        settings = GroupSettings(**{"prompts_per_step": 2, "group_size": 4} | group)
        engine = Apart(policy) if kind is Apart else NativeEngine(policy, max_rows=8)
        places = iter(range(1000))
        return engine, train_online(
            policy,
            replace(resolve("grpo", settings, 8), correction=Correction()),
            SampledRollouts(
                algorithm=replace(resolve("grpo", settings, 8), correction=Correction()),
                engine=engine,
                rewards=rewards or RuleRewards(even),
                draw=lambda k: [prompt(next(places)) for _ in range(k)],
                sampling=Sampling(temperature=0.8, max_new_tokens=8),
                steps=steps,
                ahead=ahead,
                group=settings,
            ),
            Optimizer(policy.model, OptimizerSettings(lr=1e-2), steps * settings.minibatches),
            group=settings,
            max_tokens_per_microbatch=1000,
        )

    return start


def versions(step: Step) -> set[int]:
    return {int(version) for group in step.groups for r in group.rollouts for version in r.version}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("ahead", [1, 2])
def test_every_token_was_drawn_by_the_weights_that_it_names_and_none_is_older_than_allowed(
    ahead: int, beside: bool, run: Callable
) -> None:
    """Step k trains on what was begun after step k - 1 - ahead, and its log-probs are those of these weights."""
    engine, steps = run(PrefetchedRollouts(ahead, beside=beside), Apart if beside else NativeEngine, minibatches=2)
    kept = [frozen_copy(engine.policy)]
    for step in steps:
        age = min(step.number - 1, ahead)
        assert versions(step) == {2 * (step.number - 1 - age)}
        assert step.metrics.get("staleness/mean", 0.0) == step.metrics.get("staleness/max", 0.0) == 2 * age
        assert step.metrics.get("staleness/versions_max", 1.0) == 1.0
        assert ("mismatch/mean" in step.metrics) == (age == 0)  # nothing that the newest weights drew could be compared
        rollouts = [rollout for group in step.groups for rollout in group.rollouts]
        scored = score(kept[step.number - 1 - age], [sample_of(r) for r in rollouts], max_tokens_per_microbatch=1000).logp
        gap = max(np.abs(own - r.behavior_logp).max() for own, r in zip(scored, rollouts, strict=True))
        assert gap < 1e-4
        if age:
            newer = score(kept[-1], [sample_of(r) for r in rollouts], max_tokens_per_microbatch=1000).logp
            assert max(np.abs(own - r.behavior_logp).max() for own, r in zip(newer, rollouts, strict=True)) > 100 * gap
        kept.append(frozen_copy(engine.policy))
    assert len(kept) == 7


def test_a_judge_is_waited_for_beside_sampling_and_training(run: Callable) -> None:
    """The next rollout is sampled before the judge answers for this one, and a step is trained before it answers for the next."""
    sampled, scored, asked, trained = (threading.Event() for _ in range(4))
    waits: list[bool] = []
    second: list[str] = []

    def reply(answers: dict[str, str], body: dict[str, Any]) -> str:
        place = int(re.findall(r"<task>\nprompt (\d+)", body["messages"][0]["content"])[0])
        if place == 0:
            waits.append(sampled.wait(60))
        if place in (2, 3):
            second.append("answered")
            if len(second) == 2:
                scored.set()
        if place == 4:
            asked.set()
            waits.append(trained.wait(60))
        return by_digest(answers, body)

    def follow(name: str) -> None:
        if name == "0/2":
            sampled.set()
        if name in ("0/4", "0/5"):  # the calls of two rollouts are made one group after the other
            waits.append(scored.wait(60))

    server = Server(reply)
    settings = RewardSettings(function="judge", args={"url": server.url, "model": "scripted", "mode": "rank"})
    with build_rewards([settings], columns=["prompt"]) as rewards:
        engine, steps = run(PrefetchedRollouts(1, beside=True), Apart, steps=3, rewards=rewards)
        engine.before_group = follow
        assert [next(steps).number, next(steps).number] == [1, 2]
        assert asked.wait(60), "the judge is asked about the third rollout"
        trained.set()
        assert next(steps).number == 3
    server.shutdown()
    server.server_close()
    assert len(waits) == 4 and all(waits)


def test_sampling_goes_on_while_a_step_is_trained(run: Callable) -> None:
    """The next rollout is begun before the step at hand is trained on, and the one after it is not."""
    engine, steps = run(PrefetchedRollouts(1, beside=True), Apart, steps=4)
    begun, released = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        if name not in ("0/0", "0/1"):
            begun.set()
            released.wait(60)

    engine.before_group = wait
    first = next(steps)  # step 1 is over though nothing of rollout 2 has come
    assert first.number == 1
    assert begun.wait(60)
    # The first two are begun by two threads at once: either may come first.
    assert sorted(engine.begun) == [("0/0", 0), ("0/2", 0)]
    released.set()
    assert [step.number for step in steps] == [2, 3, 4]
    names, versions = zip(*sorted(engine.begun), strict=True)
    assert names == ("0/0", "0/2", "0/4", "0/6")
    # A thread that comes to run late finds the weights of a later step.
    assert all(version >= least for version, least in zip(versions, (0, 0, 1, 2), strict=True))


def test_an_error_of_the_sampling_thread_is_raised_by_the_next_take(run: Callable) -> None:
    def fail(name: str) -> None:
        if name == "0/4":
            raise EngineError("the server is gone")

    engine, steps = run(PrefetchedRollouts(1, beside=True), Apart, steps=5)
    engine.before_group = fail
    taken = []
    with pytest.raises(EngineError, match="the server is gone"):
        taken.extend(step.number for step in steps)
    assert taken == [1, 2]


def test_a_token_that_is_too_old_is_never_trained_on(run: Callable) -> None:
    """An engine that does not take new weights."""
    engine, steps = run(PrefetchedRollouts(1))
    engine.send_weights = lambda version: setattr(engine, "version", 0 if version < 2 else version)
    engine.generate, generate = lambda *a, **k: old(generate(*a, **k)), engine.generate

    def old(groups: Iterator[tuple[Rollout, ...]]) -> Iterator[tuple[Rollout, ...]]:
        for group in groups:
            for rollout in group:
                rollout.version[:] = 0
            yield group

    with pytest.raises(EngineError, match=r"step 4: a token was drawn by the weights after 0 optimizer steps, .* begun after 2"):
        list(steps)


def test_refills_come_when_the_step_is_taken(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic sampling replaces what teaches nothing by what the newest weights draw."""
    monkeypatch.setattr("groupwise.training.groups.MAX_REFILLS", 5)
    _, steps = run(PrefetchedRollouts(1, beside=True), Apart, dead_groups="refill", group_size=2)
    found = list(steps)
    assert any(step.metrics["prompts"] > 2 for step in found)
    assert any(len(versions(step)) == 2 for step in found)
    assert all(len(step.groups) == 2 for step in found)


# ---- whole runs


TREE: dict[str, Any] = {
    "seed": 3,
    "objective": "grpo",
    "steps": 6,
    "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 96, "tokenizer": "arithmetic"}},
    "data": {"task": "addition", "limit": 8, "eval_limit": 4},
    "rewards": [{"function": "accuracy"}, {"function": "think_format", "weight": 0.5}, {"function": "repetition"}],
    "rollout": {"max_new_tokens": 12},
    "group": {"prompts_per_step": 4, "group_size": 3, "updates_per_rollout": 2, "minibatches": 2, "beta": 0.1},
    "optimizer": {"lr": 1e-3},
    "eval": {"k": 2, "at_start": False},
    "save": {"every": 1},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, **changes: Any) -> Path:
        tree = TREE | {"name": name, "runs": str(tmp_path / "runs")} | changes
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    return make


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path.parent / "runs" / path.stem / "final" / "model.safetensors")


def metrics(path: Path) -> list[dict]:
    lines = read_metrics(path.parent / "runs" / path.stem)
    timing = ("time/", "wall", "tokens/per_second", "flops/per_second")
    return [{key: value for key, value in line.items() if not key.startswith(timing)} for line in lines]


def rollout_of(engine: str, **changes: Any) -> dict[str, Any]:
    return {"max_new_tokens": 12, "engine": {"name": engine, **changes}}


@pytest.mark.slow
def test_ahead_of_zero_steps_is_the_synchronous_run(recipe: Callable) -> None:
    plain, zero = recipe("plain", steps=3), recipe("zero", steps=3, rollout=rollout_of("native", ahead=0))
    for path in (plain, zero):
        for _ in train(load_recipe(path)):
            pass
    assert metrics(zero) == metrics(plain)
    assert all(torch.equal(weights(zero)[name], weight) for name, weight in weights(plain).items())


def test_what_was_being_sampled_is_begun_again_with_the_same_prompts(tiny_policy: Callable) -> None:
    """Of servers nothing is kept but the prompts: none is skipped, and none is visited twice."""
    ahead, engine = PrefetchedRollouts(2, beside=True, find=lambda name: prompt(int(name[2:]))), Apart(tiny_policy())
    go_on, source = threading.Event(), SourceOf(engine)
    engine.before_group = lambda name: (go_on.wait(10), None)[1] if name >= "0/2" else None
    ahead.take(1, 9, source)  # type: ignore[arg-type]
    states = [begun.state() for begun in ahead.pending()]
    assert states == [{"step": 2, "prompts": ["0/2", "0/3"]}, {"step": 3, "prompts": ["0/4", "0/5"]}]
    go_on.set()
    again = PrefetchedRollouts(2, beside=True, find=lambda name: prompt(int(name[2:])))
    again.restore(states)
    for number, names in ((2, ["0/2", "0/3"]), (3, ["0/4", "0/5"]), (4, ["0/6", "0/7"])):
        groups, drawn = again.take(number, 9, source)  # type: ignore[arg-type]
        assert [group.prompt.id for group in groups] == names
        assert drawn == 2


class SourceOf:
    """A source of two prompts a step, from an engine."""

    def __init__(self, engine: Apart) -> None:
        self.engine, self.places = engine, iter(range(100))

    def prompts(self) -> list[Prompt]:
        return [prompt(next(self.places)) for _ in range(2)]

    def sample(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        groups = self.engine.generate(prompts, group_size=2, sampling=Sampling(max_new_tokens=3), seed=0)
        return RuleRewards(even).score(list(groups))

    def collect(self, prompts: Sequence[Prompt] = (), own: Callable[[], list[RolloutGroup]] | None = None) -> Any:
        found = sorted(own() if own is not None else self.sample(prompts), key=lambda group: group.prompt.id)
        return found, len(found)


@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=6), Sampling(top_k=4, top_p=0.9, max_new_tokens=6, stop=("1",))])
def test_kept_groups_come_back_as_they_were(sampling: Sampling, tiny_policy: Callable) -> None:
    groups = RuleRewards(even).score(
        list(NativeEngine(tiny_policy(), max_rows=8).generate([prompt(0), prompt(1)], group_size=3, sampling=sampling, seed=1))
    )
    groups[1].reward[0] = np.nan
    for ours, theirs in zip(groups_from_bytes(groups_to_bytes(groups)), groups, strict=True):
        assert (ours.names, ours.weights, ours.prompt.id, ours.prompt.text) == (
            theirs.names, theirs.weights, theirs.prompt.id, theirs.prompt.text
        )  # fmt: skip
        np.testing.assert_array_equal(ours.reward, theirs.reward)
        np.testing.assert_array_equal(ours.rewards, theirs.rewards)
        for a, b in zip(ours.rollouts, theirs.rollouts, strict=True):
            for name in ("tokens", "behavior_logp", "trained", "version"):
                assert getattr(a, name).dtype == getattr(b, name).dtype
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            assert (a.finish, a.eos_ids, a.sampling, a.text, a.index) == (b.finish, b.eos_ids, b.sampling, b.text, b.index)
            assert (a.support is None) == (b.support is None)
            assert all(np.array_equal(x, y) for x, y in zip(a.support or (), b.support or (), strict=True))


def test_the_threads_end_with_what_they_sample(run: Callable) -> None:
    _, steps = run(PrefetchedRollouts(2, beside=True), Apart, steps=3)
    list(steps)
    deadline = time.monotonic() + 120
    while any(thread.name.startswith("rollout-") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
