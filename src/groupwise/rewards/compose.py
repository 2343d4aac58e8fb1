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

from groupwise.config.findings import Findings
from groupwise.config.live_objects import object_of
from groupwise.config.settings import RewardSettings, verdict_of
from groupwise.config.texts import demand_values
from groupwise.errors import ConfigError, RewardError
from groupwise.records import Rollout, RolloutGroup
from groupwise.rewards import calls
from groupwise.rewards.calls import Host, Outcome, described
from groupwise.rewards.completions import completions_of
from groupwise.rewards.functions import Excerpt, Functions, RewardCall
from groupwise.rewards.registry import CODE, GOLD_COLUMNS, JUDGE, find_builtin
from groupwise.rewards.step_rewards import ProcessReward, step_signal
from groupwise.rewards.trainer_state import RUN_PARAMETERS, Notes, TrainerState
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
        inner = self.function
        if isinstance(inner, ProcessReward):
            inner = inner.function
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

    >>> settings = [RewardSettings(function="exact"), RewardSettings(function="tags", weight=0.1)]
    >>> rewards = build_rewards(settings, columns=["prompt", "answer"])
    >>> rewards.names, rewards.weights
    (('exact', 'tags'), (1.0, 0.1))
    """
    if not settings:
        raise ConfigError(
            "there is no reward function; name at least one under rewards:, e.g. `- function:"
            " accuracy`"
        )
    entries = [_entry(entry, place) for place, entry in enumerate(settings)]
    build = _Build([column for column in columns if column not in RESERVED], tokenizer)
    try:
        build.start(entries)
        for entry in entries:
            build.add(entry)
        return build.rewards([entry.settings for entry in entries], verdict)
    except BaseException:
        build.kill()
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One of the functions that `build_rewards` takes."""

    key: str
    """The place in the recipe: rewards.0."""
    settings: RewardSettings
    live: LiveReward | None
    """The function itself, where it is an object of the program."""

    @property
    def name(self) -> str:
        return self.settings.name or self.settings.function.rpartition(":")[2]

    @property
    def in_file(self) -> bool:
        """Return True for a function of a file or module."""
        return self.live is None and ":" in self.settings.function


class _Build:
    """Finds and checks functions one by one, and collects what is wrong with them."""

    def __init__(self, columns: Sequence[str], tokenizer: Any) -> None:
        self._columns, self._tokenizer = columns, tokenizer
        self._wrong = Findings()
        self._names: list[str] = []
        self._rewards: list[Reward] = []
        self._live: dict[str, LiveReward] = {}
        self._files: dict[str, Host] = {}

    def start(self, entries: Sequence[_Entry]) -> None:
        """Start the processes of all files, side by side."""
        for entry in entries:
            if entry.in_file:
                self._files[file_of(entry.settings.function)] = Host()
        for host in self._files.values():
            host.start()

    def kill(self) -> None:
        """End the processes."""
        for host in self._files.values():
            host.kill()

    def add(self, entry: _Entry) -> None:
        """Check an entry, and find its function."""
        key, settings = entry.key, entry.settings
        with self._wrong.of(f"{key}.args"):
            demand_values(settings.args, f"{key}.args")
        with self._wrong.of(f"{key}.weight"):
            if not math.isfinite(settings.weight):
                raise ConfigError(
                    f"the reward {entry.name!r} has weight {settings.weight}; a weight is a finite"
                    " number"
                )
        with self._wrong.of(f"{key}.name"):
            if entry.name in self._names:
                raise ConfigError(
                    f"two reward functions have the name {entry.name!r}; give one of them another"
                    " by name:"
                )
        self._names.append(entry.name)
        with self._wrong.of(f"{key}.function"):
            reward = self._found(entry)
            if reward is not None:
                self._rewards.append(reward)

    def _found(self, entry: _Entry) -> Reward | None:
        """Return a function with its signature; None for another one of a file that is refused."""
        settings = entry.settings
        if entry.live is None and not entry.in_file:
            return find_builtin(settings, self._columns, self._tokenizer)
        if entry.live is not None:
            self._live[settings.function] = entry.live
            function = entry.live.function
            signature = read_signature(function, entry.name, settings.args, self._columns)
        else:
            host = self._files[file_of(settings.function)]
            if host.worker is None:
                return None  # that the file cannot be imported is one mistake
            signature = host.describe(settings.function, entry.name, settings.args, self._columns)
        return Reward(
            name=entry.name,
            weight=float(settings.weight),
            spec=settings.function,
            signature=signature,
            arguments=dict(settings.args),
            timeout=settings.timeout,
        )

    def rewards(self, settings: Sequence[RewardSettings], verdict: str | None) -> Rewards:
        """Return the functions together.  Raises what was found wrong."""
        with self._wrong.of("verdict"):
            verdict = verdict_of(settings, verdict)
            if verdict is not None and verdict not in self._names:
                raise ConfigError(
                    f"verdict: there is no reward {verdict!r}; the rewards are"
                    f" {', '.join(self._names)}"
                )
        self._wrong.settle()
        return Rewards(self._rewards, self._columns, self._files, verdict, self._live)


def file_of(spec: str) -> str:
    """The file or module of a function."""
    return spec.rpartition(":")[0]


def _entry(reward: RewardSettings | LiveReward | Callable[..., Any], place: int) -> _Entry:
    key = f"rewards.{place}"
    if isinstance(reward, RewardSettings):
        live: LiveReward | None = object_of(reward.function, f"{key}.function")
        if live is None:
            return _Entry(key=key, settings=reward, live=None)
        live = replace(
            live,
            weight=reward.weight,
            name=reward.name or live.name,
            args=reward.args,
            timeout=reward.timeout,
        )
    elif isinstance(reward, LiveReward):
        live = reward
    else:
        live = LiveReward(function=reward)
    return _Entry(key=key, settings=live.settings(), live=live)


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
        live = live or {}
        self._hosts = _hosts(self._rewards, dict(files or {}), live)
        """Where functions run that do not run in this process, by name."""
        self._thread: threads.Thread | None = None
        """The thread of functions that run here: always the same, and never the main one."""
        here = {spec: one.function for spec, one in live.items() if one.runs == "here"}
        self._functions = Functions(here)
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
        """True if some function needs one of these by name."""
        for reward in self._rewards:
            needed = set(reward.signature.named) - set(reward.signature.optional)
            if needed.intersection(names):
                return True
        return False

    @property
    def golds(self) -> dict[str, str]:
        """The functions that compare with a gold answer, by name, each with the data's column that
        holds it.
        """
        columns: dict[str, str] = {}
        for reward in self._rewards:
            if reward.gold is not None:
                columns[reward.name] = reward.gold
                continue
            for column in GOLD_COLUMNS:
                if column in reward.signature.named:
                    columns[reward.name] = column
                    break
        return columns

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
        for reward in self._rewards:
            if reward.spec in (CODE, JUDGE) and reward.function is not None:
                reward.function.close()
        # A later call has another thread, and does not wait for a function that hangs.
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def reach_servers(self) -> None:
        """Raise ConfigError if the server of a judge does not answer."""
        for reward in self._rewards:
            if reward.spec == JUDGE and reward.function is not None:
                reward.function.reach_server()

    def plan(self) -> Iterator[str]:
        """Yield each function with where it runs, and what happens to a call that does not end."""
        for reward in self._rewards:
            if reward.name in self._hosts:
                yield f"{reward.name}: in a worker process; {_limit_in_words(reward)}"
            else:
                yield f"{reward.name}: in this process"

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
        outcomes = self._outcomes(completions_of(rollouts, self._columns))
        values = [outcome.values for outcome in outcomes]
        metrics, columns = self._logged(outcomes)
        rewards = self.matrix(values)
        combined = combine(rewards, self.weights)
        process = self._process(rollouts, values)
        scored, end = [], 0
        for group in groups:
            begin, end = end, end + len(group)
            signals = {}
            if process is not None:
                signals["process"] = tuple(process[begin:end])
            extra = {name: tuple(column[begin:end]) for name, column in columns.items()}
            scored.append(
                RolloutGroup(
                    rollouts=tuple(group),
                    names=self.names,
                    rewards=rewards[begin:end],
                    reward=combined[begin:end],
                    weights=self.weights,
                    signals=signals,
                    logged=metrics,
                    extra=extra,
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
            ended = self._called(batch)
            for reward in self._rewards:
                outcome = ended[reward.name]
                self.seconds[reward.name] = outcome.seconds
                self._count_late(reward, outcome, batch)
            return [ended[name] for name in self.names]

    def _logged(self, outcomes: Sequence[Outcome]) -> tuple[dict[str, float], dict[str, list[Any]]]:
        """Return the metrics and columns of all functions.  Raises RewardError for a column that
        two of them log.
        """
        logged: dict[str, list[float]] = {}
        columns: dict[str, list[Any]] = {}
        for name, outcome in zip(self.names, outcomes, strict=True):
            for metric, values in outcome.notes.get("metrics", {}).items():
                logged.setdefault(metric, []).extend(filter(math.isfinite, values))
            for column, values in outcome.notes.get("columns", {}).items():
                if column in columns:
                    raise RewardError(
                        f"the reward function {name!r} logs the column {column!r}, which another"
                        " one logs, too"
                    )
                columns[column] = values
        metrics = {}
        for metric, values in logged.items():
            metrics[metric] = float(np.mean(values)) if values else math.nan
        return metrics, columns

    def _called(self, batch: Completions) -> dict[str, Outcome]:
        """Return what each function gave, by name.  The first failure ends all calls: their answers
        would be taken for those of the next.
        """
        work = self._work(batch)
        here = work.pop(None, [])
        ended: dict[str, Outcome] = {}
        made: list[tuple[RewardCall, Outcome]] = []
        running: dict[Future[list[Outcome]], Host] = {}
        stop = threading.Event()
        try:
            for host, some in work.items():
                assert host is not None
                begun = threads.begin(partial(host.run, some, stop), "groupwise-rewards")
                running[begun] = host
            beside = self._in_thread(here) if here else None
            for reward in self._rewards:
                if reward.function is not None:
                    ended[reward.name] = _in_this_process(reward, batch, self.state)
            if beside is not None:
                made += zip(here, beside.result(), strict=True)
            for future in as_completed(running):
                made += zip(work[running[future]], future.result(), strict=True)
        except BaseException:  # Ctrl-C among others
            stop.set()
            _kill_until_ended(running)
            raise
        for reward in self._rewards:
            if reward.function is None:
                of_reward = [pair for pair in made if pair[0].reward is reward]
                ended[reward.name] = calls.all_together(of_reward)
        return ended

    def _work(self, batch: Completions) -> dict[Host | None, list[RewardCall]]:
        """Return the calls of each process in their order; None: of the thread of this process."""
        work: dict[Host | None, list[RewardCall]] = {}
        for reward in self._rewards:
            if reward.function is None:
                made = _calls(reward, batch, self.state)
                work.setdefault(self._hosts.get(reward.name), []).extend(made)
        for some in work.values():
            some.sort(key=calls.order_of)
        return work

    def _in_thread(self, some: Sequence[RewardCall]) -> Future[list[Outcome]]:
        if self._thread is None:
            self._thread = threads.Thread("groupwise-rewards")
        return self._thread.begin(partial(self._run_here, some))

    def _run_here(self, some: Sequence[RewardCall]) -> list[Outcome]:
        return calls.outcomes_of(some, list(self._functions.run(some)))

    def reach(self, step: int, last: int) -> None:
        """Note for functions that ask for `trainer_state` how many steps are done, and the number
        of the last.
        """
        self.state = TrainerState(global_step=step, max_steps=last)

    def matrix(self, values: Sequence[Sequence[Any]]) -> np.ndarray:
        """Return what `call` returned as float64 (N, K): None as NaN, steps as their sum."""
        return np.stack(list(map(_column, self._rewards, values)), axis=1)

    def _count_late(self, reward: Reward, outcome: Outcome, batch: Completions) -> None:
        """A failure is not a wrong answer: scoring it 0 would teach the policy to fail, so it ends
        the run.  Only a call that ran out of its own time says nothing (None), as long as such
        calls are few.  Raises RewardError.
        """
        single = reward.signature.single
        self._calls[reward.name] += len(batch) if single else 1
        if not outcome.late:
            return
        self._late[reward.name] += len(outcome.late) if single else 1
        late = [batch.labels[place] for place in outcome.late]
        without, every = self._late[reward.name], self._calls[reward.name]
        message = (
            f"{without} of {every} calls of the reward function {reward.name!r} had no result"
            f" within {reward.timeout:g} s; the last on {described(late)}"
        )
        if without > max(1.0, LATE_SHARE * every):
            raise RewardError(f"{message}; give it more time (timeout:) or make it faster")
        log.warning("%s; they count as None", message)

    def _process(
        self, rollouts: Sequence[Rollout], values: Sequence[Sequence[Any]]
    ) -> list[np.ndarray] | None:
        """Return for each completion (n,) the weighted step rewards at the tokens that end a step,
        summed over the process functions, else NaN; None without such a function.
        """
        if not self.process:
            return None
        weights = [reward.weight for reward in self._rewards if reward.signature.process]
        signals = []
        for index, rollout in enumerate(rollouts):
            parts = []
            for reward, column in zip(self._rewards, values, strict=True):
                if reward.signature.process:
                    steps = column[index]
                    parts.append(step_signal(reward.name, steps, len(rollout), rollout.place))
            signals.append(combine(np.stack(parts, axis=1), weights))
        return signals


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


def _column(reward: Reward, values: Sequence[Any]) -> np.ndarray:
    """Return the results of a function as numbers (N,): None as NaN, steps as their sum."""
    numbers = np.full(len(values), np.nan)
    for place, value in enumerate(values):
        if reward.signature.process:
            value = sum(step_reward for _, step_reward in value) if value else None
        if value is not None:
            numbers[place] = value
    return numbers


def _limit_in_words(reward: Reward) -> str:
    """Say how long a call may take, and what happens then."""
    call = "a completion" if reward.signature.single else "a call"
    if reward.timeout is not None:
        return f"{reward.timeout:g} s for {call}, then None"
    seconds = f"{calls.DEFAULT_SECONDS:g} s"
    if not reward.signature.single:
        seconds += f", or {calls.SECONDS_EACH:g} s a completion,"
    return f"{call} that takes {seconds} ends the run"


def _kill_until_ended(running: Mapping[Future[list[Outcome]], Host]) -> None:
    """Kill processes until the threads that wait for them have ended."""
    unfinished = wait(running, timeout=0.0).not_done
    while unfinished:
        for future in unfinished:
            running[future].kill()
        wait(unfinished, timeout=0.05)
        unfinished = wait(running, timeout=0.0).not_done


class _Fork:
    """Makes what answers the calls of a live function, in a fork of this process."""

    def __init__(self, spec: str, function: Callable[..., Any]) -> None:
        self._spec, self._function = spec, function

    def __call__(self) -> Callable[..., Any]:
        return Functions({self._spec: self._function}).answer


def _hosts(
    rewards: Sequence[Reward], files: dict[str, Host], live: Mapping[str, LiveReward]
) -> dict[str, Host]:
    """Start the process of each function that has one; return them by name.

    files: processes that can be used, by file.
    """
    hosts: dict[str, Host] = {}
    shared: dict[str, Host] = {}
    for reward in rewards:
        if reward.function is not None:
            continue
        if reward.spec in live:
            if live[reward.spec].runs == "fork":
                hosts[reward.name] = Host(_Fork(reward.spec, live[reward.spec].function))
            continue
        file = file_of(reward.spec)
        alone = reward.timeout is not None and not reward.signature.asynchronous
        host = None if alone else shared.get(file)
        host = host or files.pop(file, None) or Host()
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
    excerpts = []
    for prompt, text in zip(batch.prompt_texts, batch.texts, strict=True):
        excerpts.append(Excerpt(prompt=prompt[-200:], completion=text[:200]))
    call = partial(RewardCall, reward=reward, state=state, chat=batch.chat)
    if not reward.signature.single:
        return [call(labels=list(batch.labels), excerpts=excerpts, pickled=pickled)]
    made = []
    for label, excerpt, row in zip(batch.labels, excerpts, pickled, strict=True):
        made.append(call(labels=[label], excerpts=[excerpt], pickled=[row]))
    return made


def _in_this_process(reward: Reward, batch: Completions, state: TrainerState) -> Outcome:
    assert reward.function is not None
    began, starting = time.monotonic(), Pool.starting
    notes = Notes(len(batch))
    asks = [name for name in reward.signature.asks if name in RUN_PARAMETERS]
    keywords = reward.keywords(batch) | notes.parameters(asks, state)
    try:
        values = reward.function(**keywords, **reward.arguments)
        values = reward.checked(values, batch.labels)
    except Exception as error:  # whatever it is, it names the function
        raise calls.raised(reward, batch.labels, process_main.described(error)) from error
    seconds = time.monotonic() - began - (Pool.starting - starting)
    return Outcome(values=values, notes=notes.as_json(), seconds=max(0.0, seconds))
