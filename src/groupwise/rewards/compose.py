"""All reward functions of a recipe together: built before any model is loaded; groups in, scored
groups out.

G completions of a prompt   K reward functions   N completions of a step
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from groupwise.config.live_objects import object_of
from groupwise.config.settings import RewardSettings, verdict_of
from groupwise.config.texts import demand_values
from groupwise.errors import ConfigError, Findings, RewardError
from groupwise.records import Episode, Prompt, Rollout, RolloutGroup
from groupwise.rewards import calls
from groupwise.rewards.calls import Host, Outcome, described
from groupwise.rewards.environment import EnvironmentState
from groupwise.rewards.functions import Excerpt, Functions, RewardCall
from groupwise.rewards.registry import GOLD_COLUMNS, find_builtin
from groupwise.rewards.step_rewards import ProcessReward, step_signal
from groupwise.rewards.trainer_state import TrainerState
from groupwise.rewards.user_functions import Completions, Reward, asynchronous, read_signature
from groupwise.utils import process_main, threads
from groupwise.utils.processes import Pool
from groupwise.utils.terminal import logger

log = logger(__name__)

LATE_SHARE = 0.1
"""A function that runs out of time in more of its calls than this, and more than once, is broken.
"""
RESERVED = ("prompt", "completion")
"""Columns that are not passed on: they would be the recipe's demonstration, not the policy's words.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveReward:
    """A reward function of this process: a lambda, a closure, a bound method, a function of a
    notebook.

    `runs: fork` (the default) calls it on the main thread of a fork of this process, made when the
    rewards are built.  The function sees the state of that moment.  Its changes stay in the fork,
    from call to call.  It can use signals and be killed, and does not delay Ctrl-C.  The fork has
    no other threads: locks that they held stay locked, torch computes on one thread, and CUDA
    cannot be used.  A function that waits for such a lock never returns.  Build rewards before
    models are loaded to keep the fork small. After a timeout the current process is forked again.

    `runs: here` calls it in this process, in one thread that is not the main one.  It sees and
    changes the program's objects (its arguments are copies) and can use CUDA.  It cannot be
    stopped: a `timeout` needs an async function, `signal.alarm` raises, and a function that holds
    the interpreter stops the whole program.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    name: str | None = None
    """Name in the log; default: the function's."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Extra keyword arguments."""
    timeout: float | None = None
    """Seconds after which a call counts as None, as in `RewardSettings`."""
    runs: Literal["fork", "here"] = "fork"

    def settings(self) -> RewardSettings:
        """The same as an entry of a recipe, without the function."""
        inner = (
            self.function.function if isinstance(self.function, ProcessReward) else self.function
        )
        name = self.name or getattr(inner, "__name__", type(inner).__name__)
        if self.timeout is not None and not (math.isfinite(self.timeout) and self.timeout > 0.0):
            raise ConfigError(
                f"the reward {name!r} has the timeout {self.timeout}; it is a number of seconds"
                " above 0"
            )
        if self.runs not in ("fork", "here"):
            raise ConfigError(f"the reward {name!r} runs 'fork' or 'here', got {self.runs!r}")
        if self.timeout is not None and self.runs == "here" and not asynchronous(inner):
            raise ConfigError(
                f"the reward {name!r} runs in this process and cannot be stopped: leave timeout"
                " out, or let it run 'fork'"
            )
        return RewardSettings(
            function=f"live:{name}",
            weight=self.weight,
            name=name,
            args=self.args,
            timeout=self.timeout,
        )


def build_rewards(
    settings: Sequence[RewardSettings | LiveReward | Callable[..., Any]],
    *,
    columns: Collection[str],
    tokenizer: Any = None,
    verdict: str | None = None,
) -> Rewards:
    """Find and check every function that a recipe names; `columns` are those of the data rows,
    `tokenizer` is the policy's.

    verdict: the name of the reward that is 1 for right completions; None: by `settings.verdict_of`.

    A function is a built-in (`registry`), `module:function` or `path/to/file.py:function`, with
    TRL's signature `f(prompts, completions, **columns) -> list[float | None]` or `f(completion,
    answer) -> float | None`, plain or `async`. A function that is given itself, and not by name, is
    a `LiveReward`.

    Built-ins and reward models run in this process.  All else runs in worker processes
    (`calls.py`), on their main thread and with copies of its arguments, in training as in
    evaluation, `check` and `score`; what it prints goes to standard error.

    Raises ConfigError: no function, an unknown one, two of the same name, a weight that is not
        finite, a bad argument, or a parameter that the data have no column for; Problems if several
        are wrong.  `key` of an error is that of the recipe.

    >>> rewards = build_rewards([RewardSettings(function="exact"), RewardSettings(function="think_format", weight=0.1)],
    ...                         columns=["prompt", "answer"])
    >>> rewards.names, rewards.weights
    (('exact', 'think_format'), (1.0, 0.1))
    """
    if not settings:
        raise ConfigError(
            "there is no reward function; name at least one under rewards:, e.g. `- function:"
            " accuracy`"
        )
    offered = [column for column in columns if column not in RESERVED]
    entries = [_entry(entry, place) for place, entry in enumerate(settings)]
    wrong = Findings()
    files = {
        file_of(entry.function): Host()
        for entry, live in entries
        if live is None and ":" in entry.function
    }
    names, rewards = list[str](), list[Reward]()
    try:
        for host in files.values():
            host.start()  # they start side by side
        for place, (entry, live) in enumerate(entries):
            key, name = f"rewards.{place}", entry.name or entry.function.rpartition(":")[2]
            with wrong.of(f"{key}.args"):
                demand_values(entry.args, f"{key}.args")
            with wrong.of(f"{key}.weight"):
                if not math.isfinite(entry.weight):
                    raise ConfigError(
                        f"the reward {name!r} has weight {entry.weight}; a weight is a finite"
                        " number"
                    )
            with wrong.of(f"{key}.name"):
                if name in names:
                    raise ConfigError(
                        f"two reward functions have the name {name!r}; give one of them another by"
                        " name:"
                    )
            names.append(name)
            with wrong.of(f"{key}.function"):
                if live is None and ":" not in entry.function:
                    rewards.append(find_builtin(entry, offered, tokenizer))
                    continue
                if live is not None:
                    signature = read_signature(live.function, name, entry.args, offered)
                elif (host := files[file_of(entry.function)]).worker is None:
                    continue  # that the file cannot be imported is one mistake
                else:
                    signature = host.describe(entry.function, name, entry.args, offered)
                rewards.append(
                    Reward(
                        name=name,
                        weight=float(entry.weight),
                        spec=entry.function,
                        signature=signature,
                        arguments=dict(entry.args),
                        timeout=entry.timeout,
                    )
                )
        with wrong.of("verdict"):
            verdict = verdict_of([entry for entry, _ in entries], verdict)
            if verdict is not None and verdict not in names:
                raise ConfigError(
                    f"verdict: there is no reward {verdict!r}; the rewards are {', '.join(names)}"
                )
        wrong.settle()
        return Rewards(
            rewards,
            offered,
            files,
            verdict,
            {entry.function: live for entry, live in entries if live is not None},
        )
    except BaseException:
        for host in files.values():
            host.kill()
        raise


def file_of(spec: str) -> str:
    """The file or module of a function."""
    return spec.rpartition(":")[0]


def _entry(
    reward: RewardSettings | LiveReward | Callable[..., Any], place: int
) -> tuple[RewardSettings, LiveReward | None]:
    """One of the functions that `build_rewards` takes, as a recipe has it, and itself where it is
    an object of the program.
    """
    if isinstance(reward, RewardSettings):
        live: LiveReward = object_of(reward.function, f"rewards.{place}.function")
        if live is None:
            return reward, None
        reward = replace(
            live,
            weight=reward.weight,
            name=reward.name or live.name,
            args=reward.args,
            timeout=reward.timeout,
        )
    elif not isinstance(reward, LiveReward):
        reward = LiveReward(function=reward)
    return reward.settings(), reward


class Rewards:
    """Reward functions and their weights.  Use it as a context manager, or call `close`, to end its
    workers early.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        columns: Collection[str] = (),
        files: Mapping[str, Host] | None = None,
        verdict: str | None = None,
        live: Mapping[str, LiveReward] | None = None,
    ) -> None:
        """Use `build_rewards`.   files: processes that have been started, by file.   live:
        functions of the program, by spec.
        """
        self.verdict = verdict
        """The function whose 1 says that a completion is right."""
        self._rewards = tuple(rewards)
        self._columns = tuple(columns)
        self._hosts = _hosts(self._rewards, dict(files or {}), live or {})
        """Where functions run that do not run in this process, by name."""
        self._thread: threads.Thread | None = None
        """In which functions of the program run, where they run here: always the same, and never
        the main one, whoever calls.
        """
        self._functions = Functions(
            {spec: one.function for spec, one in (live or {}).items() if one.runs == "here"}
        )
        self._lock = threading.Lock()
        self.seconds: dict[str, float] = {}
        """How long each function took in the last call, without what a worker process takes to
        start.
        """
        self.state = TrainerState()
        """Where the run stands, for functions that ask: the loop's caller says it."""
        self._calls = dict.fromkeys(self.names, 0)
        self._late = dict.fromkeys(self.names, 0)

    @property
    def names(self) -> tuple[str, ...]:
        """K names, in the order of the recipe."""
        return tuple(reward.name for reward in self._rewards)

    @property
    def weights(self) -> tuple[float, ...]:
        """K weights."""
        return tuple(reward.weight for reward in self._rewards)

    def asks(self, *names: str) -> bool:
        """True if some function asks for one of these by name."""
        return any(name in reward.signature.named for reward in self._rewards for name in names)

    @property
    def golds(self) -> dict[str, str]:
        """The functions that compare with a gold answer, by name, each with the data's column that
        holds it.
        """
        columns = {
            r.name: r.gold or next((c for c in GOLD_COLUMNS if c in r.signature.named), None)
            for r in self._rewards
        }
        return {name: column for name, column in columns.items() if column is not None}

    @property
    def process(self) -> bool:
        """True if some function rewards steps: groups then come with the signal `process`."""
        return any(reward.signature.process for reward in self._rewards)

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers; a call that another thread is waiting for fails."""
        for host in self._hosts.values():
            host.kill()
        if (
            self._thread is not None
        ):  # a later call has another one, and does not wait for a function that hangs
            self._thread.close()
            self._thread = None

    def plan(self) -> Iterator[str]:
        """Each function with where it runs, and what happens to a call that does not end."""
        for reward in self._rewards:
            each = "a completion" if reward.signature.single else "a call"
            more = "" if reward.signature.single else f", or {calls.SECONDS_EACH:g} s a completion,"
            if reward.name not in self._hosts:
                yield f"{reward.name}: in this process"
            elif reward.timeout is not None:
                yield (
                    f"{reward.name}: in a worker process; {reward.timeout:g} s for {each}, then"
                    " None"
                )
            else:
                yield (
                    f"{reward.name}: in a worker process; {each} that takes"
                    f" {calls.DEFAULT_SECONDS:g} s{more} ends the run"
                )

    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[RolloutGroup]:
        """Score every completion of every group, in one call per function; groups and completions
        keep their order.

        Every `reward` is the weighted sum over the functions that apply; it is NaN where none does.
        Raises RewardError if a function raises, is stopped at its timeout too often, or returns
        what is not one number or None each.
        """
        rollouts = [rollout for group in groups for rollout in group]
        if not rollouts:
            return []
        if not self._rewards:  # a teacher is learnt from
            return [unjudged(group) for group in groups]
        outcomes = self._outcomes(self._completions(rollouts))
        values = [outcome.values for outcome in outcomes]
        metrics, columns = self._logged(outcomes)
        rewards = self.matrix(values)
        combined = combine(rewards, self.weights)
        process = self._process(rollouts, values)
        scored, end = [], 0
        for group in groups:
            begin, end = end, end + len(group)
            scored.append(
                RolloutGroup(
                    rollouts=tuple(group),
                    names=self.names,
                    rewards=rewards[begin:end],
                    reward=combined[begin:end],
                    weights=self.weights,
                    signals={} if process is None else {"process": tuple(process[begin:end])},
                    logged=metrics,
                    extra={name: tuple(column[begin:end]) for name, column in columns.items()},
                    verdict=self.verdict,
                )
            )
        return scored

    def call(self, batch: Completions) -> list[list[Any]]:
        """K lists of N results: floats and None, or steps for process rewards.  Worker processes
        compute side by side, and beside what this process computes itself."""
        return [outcome.values for outcome in self._outcomes(batch)]

    def _outcomes(self, batch: Completions) -> list[Outcome]:
        # rollouts ahead of training come from several threads, and a function need not bear that
        with self._lock:
            outcomes = self._called(batch)
            self.seconds |= {
                name: outcome.seconds for name, outcome in zip(self.names, outcomes, strict=True)
            }
            for reward, outcome in zip(self._rewards, outcomes, strict=True):
                self._count_late(reward, outcome, batch)
            return outcomes

    def _logged(self, outcomes: Sequence[Outcome]) -> tuple[dict[str, float], dict[str, list[Any]]]:
        """The metrics and columns of all functions.  Raises RewardError for a column that two of
        them log.
        """
        metrics: dict[str, list[float]] = {}
        columns: dict[str, list[Any]] = {}
        for name, outcome in zip(self.names, outcomes, strict=True):
            for metric, values in outcome.notes.get("metrics", {}).items():
                metrics.setdefault(metric, []).extend(filter(math.isfinite, values))
            for column, values in outcome.notes.get("columns", {}).items():
                if column in columns:
                    raise RewardError(
                        f"the reward function {name!r} logs the column {column!r}, which another"
                        " one logs, too"
                    )
                columns[column] = values
        return {
            metric: float(np.mean(values)) if values else math.nan
            for metric, values in metrics.items()
        }, columns

    def _called(self, batch: Completions) -> list[Outcome]:
        """What each function gave.  The first failure ends all calls: their answers would be taken
        for those of the next.
        """
        work: dict[Host | None, list[RewardCall]] = {}
        for reward in self._rewards:
            if reward.function is None:
                work.setdefault(self._hosts.get(reward.name), []).extend(
                    _calls(reward, batch, self.state)
                )
        work = {host: sorted(some, key=calls.order_of) for host, some in work.items()}
        ended: dict[str, Outcome] = {}
        made: list[tuple[RewardCall, Outcome]] = []
        stop, running = threading.Event(), dict[Future[list[Outcome]], Host]()
        try:
            for host, some in work.items():
                if host is not None:
                    running[threads.begin(partial(host.run, some, stop), "groupwise-rewards")] = (
                        host
                    )
            here = self._in_thread(work[None]) if None in work else None
            for reward in self._rewards:
                if reward.function is not None:
                    ended[reward.name] = _in_this_process(reward, batch)
            if here is not None:
                made += zip(work[None], here.result(), strict=True)
            for future in as_completed(running):
                made += zip(work[running[future]], future.result(), strict=True)
        except BaseException:  # Ctrl-C among others
            stop.set()
            while unfinished := wait(running, timeout=0.0).not_done:
                for future in unfinished:
                    running[future].kill()
                wait(unfinished, timeout=0.05)
            raise
        for reward in self._rewards:
            if reward.function is None:
                ended[reward.name] = calls.all_together(
                    [one for one in made if one[0].reward is reward]
                )
        return [ended[name] for name in self.names]

    def _in_thread(self, some: Sequence[RewardCall]) -> Future[list[Outcome]]:
        if self._thread is None:
            self._thread = threads.Thread("groupwise-rewards")
        return self._thread.begin(lambda: calls.outcomes_of(some, list(self._functions.run(some))))

    def reach(self, step: int, last: int) -> None:
        """Note for functions that ask for `trainer_state` how many steps are done, and the number
        of the last.
        """
        self.state = TrainerState(global_step=step, max_steps=last)

    def matrix(self, values: Sequence[Sequence[Any]]) -> np.ndarray:
        """float64 (N, K): what `call` returned as numbers, None as NaN, step rewards as their sum."""
        return np.stack(
            [_column(reward, column) for reward, column in zip(self._rewards, values, strict=True)],
            axis=1,
        )

    def _count_late(self, reward: Reward, outcome: Outcome, batch: Completions) -> None:
        """A failure is not a wrong answer: scoring it 0 would teach the policy to fail, so it ends
        the run.  Only a call that ran out of its own time says nothing (None), as long as such
        calls are few.  Raises RewardError.
        """
        single, late = reward.signature.single, outcome.late
        self._calls[reward.name] += len(batch) if single else 1
        if late:
            self._late[reward.name] += len(late) if single else 1
            without, every = self._late[reward.name], self._calls[reward.name]
            what = (
                f"{without} of {every} calls of the reward function {reward.name!r} had no result"
                f" within {reward.timeout:g} s"
            )
            what += f"; the last on {described([batch.labels[index] for index in late])}"
            if without > max(1.0, LATE_SHARE * every):
                raise RewardError(f"{what}; give it more time (timeout:) or make it faster")
            log.warning("%s; they count as None", what)

    def _completions(self, rollouts: Sequence[Rollout]) -> Completions:
        prompts = [prompt_of(rollout.prompt) for rollout in rollouts]
        chat = [isinstance(prompt, list) for prompt in prompts]
        episodes = [rollout.episode for rollout in rollouts]
        texts = [spoken(rollout) for rollout in rollouts]
        answered = any(episode is not None for episode in episodes)
        return Completions(
            labels=[rollout.place for rollout in rollouts],
            prompts=prompts,
            prompt_messages=[rollout.prompt.messages for rollout in rollouts],
            prompt_texts=[rollout.prompt.text for rollout in rollouts],
            completions=[
                (
                    list(e.messages)
                    if e is not None and e.messages
                    else as_messages(text)
                    if c
                    else text
                )
                for text, e, c in zip(texts, episodes, chat, strict=True)
            ],
            texts=texts,
            prompt_ids=[rollout.prompt.tokens.tolist() for rollout in rollouts],
            completion_ids=[rollout.tokens.tolist() for rollout in rollouts],
            finish_reasons=[rollout.finish.value for rollout in rollouts],
            columns={
                column: [rollout.prompt.row.get(column) for rollout in rollouts]
                for column in self._columns
            },
            environments=[_state(episode) for episode in episodes] if answered else None,
            environment_rewards=(
                [None if e is None else e.reward for e in episodes] if answered else None
            ),
            written_ids=(
                [rollout.tokens[rollout.trained].tolist() for rollout in rollouts]
                if answered
                else None
            ),
        )

    def _process(
        self, rollouts: Sequence[Rollout], values: Sequence[Sequence[Any]]
    ) -> list[np.ndarray] | None:
        """Per completion (n,): weighted step rewards at the tokens that end a step, summed over the
        process functions, else NaN.
        """
        columns = [
            (reward, column)
            for reward, column in zip(self._rewards, values, strict=True)
            if reward.signature.process
        ]
        if not columns:
            return None
        signals = []
        for index, rollout in enumerate(rollouts):
            parts = [
                step_signal(reward.name, column[index], len(rollout), rollout.place)
                for reward, column in columns
            ]
            signals.append(
                combine(np.stack(parts, axis=1), tuple(reward.weight for reward, _ in columns))
            )
        return signals


def prompt_of(prompt: Prompt) -> str | list[Mapping[str, Any]]:
    """A prompt as reward functions see it: the messages of a row that brings messages, else its
    text without a chat template.
    """
    if prompt.messages is None:
        return prompt.text
    return str(prompt.messages[-1]["content"]) if prompt.wrapped else list(prompt.messages)


def spoken(rollout: Rollout) -> str:
    """The text of a completion for rewards that read one text: of several turns the policy's last
    one, with its reasoning.

    Text of tools and environments is left out: an answer that stands only in a tool's result was
    not given by the policy."""
    if rollout.episode is None:
        return rollout.text
    last = next(
        (
            message
            for message in reversed(rollout.episode.messages)
            if message["role"] == "assistant"
        ),
        None,
    )
    if last is None:
        return ""
    reasoning = last.get("reasoning_content")
    return f"<think>{reasoning}</think>{last['content']}" if reasoning else str(last["content"])


def _state(episode: Episode | None) -> EnvironmentState | None:
    if episode is None or episode.state is None:
        return None
    return EnvironmentState(episode.environment or "environment", episode.state, episode.reward)


def no_rewards() -> Rewards:
    """The rewards of a run that learns from a teacher: no function, and no reward for any
    completion.
    """
    return Rewards(())


def unjudged(group: Sequence[Rollout]) -> RolloutGroup:
    """A group of rollouts as a `RolloutGroup` record without rewards."""
    return RolloutGroup(
        rollouts=tuple(group),
        names=(),
        rewards=np.zeros((len(group), 0)),
        reward=np.full(len(group), np.nan),
    )


def combine(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Return the weighted sum `r = nansum_k(w_k R_k)` of rewards (N, K), float64 (N,).

    It is NaN where every function with a weight says None.  A function of weight 0 is logged, and
    is no verdict.

    >>> combine(np.array([[1.0, np.nan], [np.nan, np.nan]]), [2.0, 1.0])
    array([ 2., nan])
    >>> combine(np.array([[1.0, 1.0], [np.nan, 1.0]]), [1.0, 0.0])
    array([ 1., nan])
    """
    weight_K = np.asarray(weights, dtype=np.float64)
    counts_K = weight_K != 0.0
    unjudged_N = np.isnan(rewards[:, counts_K]).all(axis=1)
    sum_N = np.nansum(rewards * weight_K, axis=1)
    return np.where(unjudged_N, np.nan, sum_N)


def as_messages(text: str) -> list[dict[str, str]]:
    """A completion as the chat message that it is."""
    return [{"role": "assistant", "content": text}]


def _column(reward: Reward, values: Sequence[Any]) -> np.ndarray:
    """(N,): the results of a function as numbers, None as NaN, steps as their sum."""
    if reward.signature.process:
        values = [sum(r for _, r in steps) if steps else None for steps in values]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _hosts(
    rewards: Sequence[Reward], files: dict[str, Host], live: Mapping[str, LiveReward]
) -> dict[str, Host]:
    """The process of each function that has one, by name; they start here.   files: processes that
    can be used, by file.
    """
    hosts: dict[str, Host] = {}
    shared: dict[str, Host] = {}
    for reward in rewards:
        handed_over, file = live.get(reward.spec), file_of(reward.spec)
        if reward.function is not None or (handed_over is not None and handed_over.runs == "here"):
            continue
        if handed_over is not None:
            hosts[reward.name] = Host(
                lambda spec=reward.spec, f=handed_over.function: Functions({spec: f}).answer
            )
            continue
        alone = reward.timeout is not None and not reward.signature.asynchronous
        host = (None if alone else shared.get(file)) or files.pop(file, None) or Host()
        host.specs.append(reward.spec)
        hosts[reward.name] = host
        if not alone:
            shared[file] = host
    for host in hosts.values():
        host.start()
    return hosts


def _calls(reward: Reward, batch: Completions, state: TrainerState) -> list[RewardCall]:
    """A call for each completion, or one for all.  Raises RewardError for arguments that cannot be
    copied.
    """
    keywords = reward.keywords(batch)
    pickled = []
    try:
        for n in range(len(batch)):
            row = {name: values[n] for name, values in keywords.items()}
            pickled.append(pickle.dumps(row))
    except Exception as error:  # whatever an object of a data row raises
        why = f"{type(error).__name__}: {process_main.message_of(error)}"
        raise RewardError(
            f"the reward function {reward.name!r} cannot be given copies of"
            f" {', '.join(keywords)}: {why}"
        ) from error
    if not pickled:
        return []
    excerpts = [
        Excerpt(prompt=prompt[-200:], completion=text[:200])
        for prompt, text in zip(batch.prompt_texts, batch.texts, strict=True)
    ]
    call = partial(RewardCall, reward=reward, state=state, chat=batch.chat)
    if not reward.signature.single:
        return [call(labels=list(batch.labels), excerpts=excerpts, pickled=pickled)]
    return [
        call(labels=[label], excerpts=[excerpt], pickled=[row])
        for label, excerpt, row in zip(batch.labels, excerpts, pickled, strict=True)
    ]


def _in_this_process(reward: Reward, batch: Completions) -> Outcome:
    assert reward.function is not None
    began, starting = time.monotonic(), Pool.starting
    try:
        values = reward.checked(
            reward.function(**reward.keywords(batch), **reward.arguments), batch.labels
        )
    except Exception as error:  # whatever it is, it names the function
        raise calls.raised(reward, batch.labels, process_main.described(error)) from error
    return Outcome(
        values=values, seconds=max(0.0, time.monotonic() - began - (Pool.starting - starting))
    )
