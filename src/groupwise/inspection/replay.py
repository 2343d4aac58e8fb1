"""Replaying a recorded step from its run folder alone: the same numbers again, or another algorithm
on the same completions.

Without a model: rewards -> advantages -> weights -> loss and its gradient with respect to every
    log-prob.  With the weights before the step, which come from the newest checkpoint before it and
    the recorded steps between: everything that the step computed, by the loop that trains
    (`online.train_online`), which gets the recorded groups.

Nothing is sampled, no reward function is called, nothing in the run folder is changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.algorithms.algorithm import Algorithm
from groupwise.config.objectives import is_online
from groupwise.config.settings import Recipe, positions_of
from groupwise.config.validation import STAGE
from groupwise.errors import CheckpointError, ConfigError, DataError, RunError
from groupwise.inspection.closed_form import ClosedForm, Tokens, closed_form
from groupwise.records import RolloutGroup, Step
from groupwise.rewards.compose import combine
from groupwise.runs import checkpoint
from groupwise.runs.final_model import check_reference
from groupwise.runs.folder import FINAL, REFERENCE
from groupwise.runs.inputs import with_start
from groupwise.runs.job import Learner, make_learner
from groupwise.runs.origin import overridden, run_of
from groupwise.runs.prepared import algorithm_of, modelled
from groupwise.runs.rollout_files import read_step
from groupwise.runs.run_files import RunFiles
from groupwise.runs.run_models import blueprint_of, hold
from groupwise.runs.starts import ENVIRONMENT, attempts_of, environment
from groupwise.runs.trust import demand_trust
from groupwise.training.groups import Collected
from groupwise.training.online import train_online
from groupwise.training.recorded_rollouts import COMPUTED, RecordedRollouts
from groupwise.training.samples import minibatches, weigh
from groupwise.utils.spelling import counted

Columns = list[list[np.ndarray]]
"""A number per token of each group and completion; empty where nothing was computed."""

ROUNDING = 1e-5
"""Share of `ClosedForm.scale` by which a recorded loss, a sum in float32, may differ from the same
sum in float64.
"""
CLOSED_ELSEWHERE = 1e-9
"""Largest difference on another machine of what numpy computes in float64."""
ELSEWHERE, ELSEWHERE_LOW = 1e-3, 0.25
"""Largest difference on another machine, relative to numbers above 1, in float32 and where products
are in bfloat16.
"""
MISMATCH, MISMATCH_LOW = 1e-4, 0.05
"""Mean difference of sampled and scored log-probs (nats) that rounding explains, in float32 and
with bfloat16 products.
"""
REACH = 20
"""Recorded steps that are trained again, at most, on the way to the weights before a step."""
TIMES = (
    "tokens/per_second",
    "flops/per_second",
    "tokens/shared",
    "tokens/dead",
    "tokens/recomputed",
    "tokens/discarded",
    "ranks/",
    "prompts/",
)
"""Metrics that say how a step was computed, not what."""
FIXED = (
    "group.group_size",
    "group.prompts_per_step",
    "group.reference_refresh",
    "group.reference_mix",
)
"""Keys of `group` that say what is sampled, or which weights it is compared with."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A recorded quantity and the same one computed again."""

    name: str
    recorded: float
    """A number, or the mean of many."""
    replayed: float
    difference: float
    """The largest |difference|; NaN if one is a number and the other is not."""
    limit: float
    """The largest difference that is allowed."""

    @property
    def same(self) -> bool:
        """True if the difference is within its limit."""
        return self.difference <= self.limit


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplayedStep:
    """A step on recorded completions, by one configuration."""

    algorithm: Algorithm
    groups: Sequence[RolloutGroup]
    advantages: Columns
    parts: list[ClosedForm]
    """The optimizer steps of a pass, by the log-probs that its updates saw; none if `without` says
    why.
    """
    which: str
    """The pass: `last`; `first` if the last one's log-probs were not recorded, or a loss reads
    entropies, which are the first's.
    """
    without: str | None
    step: Step | None
    """What the training loop yielded; None without a model."""
    learner: Learner | None
    """Policy and optimizer after the step."""

    @property
    def loss(self) -> float:
        """Mean over the optimizer steps of the pass."""
        if not self.parts:
            return math.nan
        return float(np.mean([part.loss for part in self.parts]))

    def column(self, name: str) -> Columns:
        """`gradient` or `ratio`, in the order of the groups."""
        merged: dict[tuple[str, int], np.ndarray] = {}
        for part in self.parts:
            merged |= getattr(part, name)
        nothing = np.zeros(0)
        columns = []
        for group in self.groups:
            column = []
            for rollout in group.rollouts:
                column.append(merged.get((group.prompt.id, rollout.index), nothing))
            columns.append(column)
        return columns

    @property
    def gradient(self) -> list[float]:
        """Sum of |dLoss / dlog-prob| over the tokens of each group."""
        return [float(np.abs(np.concatenate(column)).sum()) for column in self.column("gradient")]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replay:
    """A step that was recorded, computed again."""

    folder: Path
    number: int
    recorded: Step
    again: ReplayedStep
    """With the recorded configuration."""
    figures: list[Figure]
    begun: int | None
    """The step whose weights the replay began with, 0 for the model that the run began with; None
    without a model.
    """
    apart: str | None
    """Why bit-for-bit sameness cannot be asked for; None if it is."""
    notes: list[str] = field(default_factory=list)
    """What could not be computed, and why."""
    mismatch: str | None = None
    """What to do where sampled and scored log-probs differ by more than rounding explains."""
    changed: ReplayedStep | None = None
    """With the changes that were asked for."""

    @property
    def same(self) -> bool:
        """True if every number that could be computed again is the recorded one."""
        return all(figure.same for figure in self.figures)


def replay(
    folder: Path | str,
    number: int,
    changes: Sequence[str] = (),
    *,
    model: bool = True,
    reach: int = REACH,
) -> Replay:
    """Compute a recorded step again, and with `changes` (overrides, `group.surrogate.high=0.28`) a
    second time.

    model: False leaves out what needs the weights.   reach: recorded steps that are trained again,
        at most, on the way from the nearest checkpoint to the weights before the step.   Raises
        DataError for a step that is not there or damaged, ConfigError for a run without completions
        and for changes of what was sampled, CheckpointError if the weights cannot be had although
        `changes` need them.
    """
    run = RecordedRun.of(Path(folder))
    first = run.algorithm.needs.entropy
    change, changed = None, None
    if changes:
        change = RecordedRun.of(run.folder, changes)
        first = first or change.algorithm.needs.entropy
    recorded = read_recorded(run.folder, number)
    apart, threads = _apart(run, number, recorded)
    begun, notes = None, []
    if model:
        begun, reasons = _beginning(run.folder, number, reach)
        if reasons:
            notes.append("; ".join(reasons))
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        again = _computed(run, recorded, begun, first=first)
        figures = [
            *_closed_figures(run, recorded, again, apart),
            *_figures(run, recorded, again, apart),
        ]
        mismatch = _mismatch(run, again)
        if change is not None:
            changed = _computed(change, recorded, begun, run, first=first)
    finally:
        torch.set_num_threads(threads_before)
    if again.step is not None:
        missing = sorted(recorded.metrics.keys() - again.step.metrics.keys())
        lost = [name for name in missing if not name.startswith(TIMES)]
        if lost:
            notes.append(f"{', '.join(lost)}: no metrics that a replay computes")
    if again.without:
        notes.append(f"loss and gradient of every log-prob: {again.without}")
    return Replay(
        folder=run.folder,
        number=number,
        recorded=recorded,
        again=again,
        figures=figures,
        begun=begun,
        apart=apart,
        notes=notes,
        mismatch=mismatch,
        changed=changed,
    )


# ---------------------------------------------------------------- what the folder holds


def read_recorded(folder: Path, number: int) -> Step:
    """A recorded step with all that a replay needs.  Raises DataError with what is missing."""
    step = read_step(folder, number)
    if "loss" not in step.metrics:
        raise DataError(
            f"metrics.jsonl of {folder} has no line of step {number}: there is nothing to compare"
            " with"
        )
    if list(map(len, step.advantages)) != [len(group.rollouts) for group in step.groups]:
        raise DataError(f"step {number} of {folder}: the recorded completions have no advantages")
    return step


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run folder with its recipe, as it was or with changes."""

    folder: Path
    recipe: Recipe
    algorithm: Algorithm

    @classmethod
    def of(cls, folder: Path, changes: Sequence[str] = ()) -> RecordedRun:
        """Raises ConfigError for what is no run, is not trusted, or cannot be replayed, and for
        changes of what was sampled.
        """
        origin = run_of(folder)
        _check_changes(changes)
        demand_trust(origin, ("objective", "model", "group", "rollout"))
        folder, recipe = origin.folder, overridden(origin, changes).recipe
        if not is_online(recipe.objective):
            raise ConfigError(
                f"replay is for runs that sample completions, not for {recipe.objective!r}"
            )
        path = recipe.model.path
        if path is not None and path.startswith(STAGE):
            # The stages of a run lie side by side, wherever the run was moved.
            path = str(folder.parent / path.removeprefix(STAGE) / FINAL)
            recipe = replace(recipe, model=replace(recipe.model, path=path))
        recipe = replace(recipe, model=with_start(recipe.model, folder.parent))
        algorithm = algorithm_of(recipe)
        if algorithm.needs.critic or algorithm.needs.teacher:
            source = "a critic" if algorithm.needs.critic else "a teacher"
            raise ConfigError(
                f"{algorithm.name} learns from {source}, whose part in a step cannot be computed"
                " again yet: replay takes runs of algorithms that need none (`groupwise view`"
                " shows what was recorded)"
            )
        return cls(folder, recipe, algorithm)

    def learner(self, step: int) -> Learner:
        """Policy, reference and optimizer after a step whose checkpoint is there; 0: before the
        first.
        """
        check_reference(self.folder)
        reference = None
        if (self.folder / REFERENCE).is_dir():
            reference = self.folder / REFERENCE
        if not step:
            recipe, blueprint = modelled(self.recipe, None)
            return make_learner(recipe, blueprint, self.algorithm, reference=reference)
        saved = checkpoint.path_of(self.folder, step)
        resume = saved / "policy"
        recipe, blueprint = modelled(self.recipe, resume)
        learner = make_learner(
            recipe, blueprint, self.algorithm, reference=reference, resume=resume
        )
        if learner.reference is not None and reference is None and recipe.model.lora is None:
            # The run kept none, because it needed none: the weights that it began with.
            learner.reference = hold(recipe, blueprint_of(recipe, None))
            learner.reference.model.requires_grad_(False)
        learner.restore(checkpoint.load(saved, verify=False), checkpoint.reader(saved))
        return learner

    def steps(
        self, learner: Learner, numbers: range, groups: Sequence[RolloutGroup] | None = None
    ) -> Iterator[Step]:
        """Train a learner on recorded steps.   groups: in place of the recorded ones."""

        def read(number: int) -> Collected:
            step = read_recorded(self.folder, number)
            return list(groups or step.groups), int(step.metrics.get("prompts", len(step.groups)))

        return train_online(
            learner.policy,
            self.algorithm,
            RecordedRollouts(read, numbers),
            learner.optimizer,
            group=self.recipe.group,
            max_tokens_per_microbatch=positions_of(learner.recipe),
            reference=learner.reference,
            checkpointing=self.recipe.model.gradient_checkpointing,
        )

    @property
    def routed(self) -> bool:
        """True if the model has experts whose load its loss balances: a part of the loss that no
        log-prob decides.
        """
        policies = (self.folder / checkpoint.CHECKPOINTS).glob("*/policy")
        for place in (self.folder / FINAL, Path(str(self.recipe.model.path)), *policies):
            with suppress(RunError):
                config = RunFiles(place).json("config.json")
                if isinstance(config, dict):
                    coefficient = config.get("router_aux_loss_coef")
                    return bool(config.get("output_router_logits") and coefficient)
        return False


def _check_changes(changes: Sequence[str]) -> None:
    """Raise ConfigError for an override of what was sampled."""
    for change in changes:
        key = change.partition("=")[0].strip()
        section = key.partition(".")[0]
        computed = section in ("objective", "group", "optimizer") and key not in FIXED
        weight = section == "rewards" and key.endswith(".weight")
        if not computed and not weight:
            raise ConfigError(
                f"--set {key}: the completions are those that were recorded, so only what is"
                " computed from them can change: objective, rewards.N.weight, optimizer.* and"
                f" group.* without {', '.join(FIXED)}"
            )


def _saved_before(folder: Path, number: int) -> list[int]:
    """Steps before `number` that have a checkpoint, the newest first."""
    saved = []
    for place in (folder / checkpoint.CHECKPOINTS).glob("[0-9]*"):
        if place.name.isdigit() and int(place.name) < number:
            saved.append(int(place.name))
    return sorted(saved, reverse=True)


def _beginning(folder: Path, number: int, reach: int) -> tuple[int | None, list[str]]:
    """The step whose weights a replay can begin with, and what was wrong with nearer ones."""
    step, reasons = 0, []
    for saved in _saved_before(folder, number):
        wrong = checkpoint.damage(checkpoint.path_of(folder, saved))
        if not wrong:
            step = saved
            break
        reasons.append(f"from checkpoint {saved}, which is damaged: {wrong}")
    between = range(step + 1, number)
    if len(between) > reach:
        far = f"{counted(len(between), 'step')} behind step {step}, farther than --reach {reach}"
        return None, [*reasons, f"the weights before the step: {far}"]
    try:
        for recorded in between:
            read_recorded(folder, recorded)
    except DataError as error:
        return None, [*reasons, f"the weights before the step: from step {step} on, {error}"]
    return step, reasons


def _reason(fact: object) -> str:
    """Return a fact about a machine without the remedy that follows a colon."""
    return str(fact).partition(":")[0]


def _apart(run: RecordedRun, number: int, recorded: Step) -> tuple[str | None, int]:
    """What differs between the machine that took a step and this one, and the threads it took it
    with.
    """
    now = environment()
    here = _machine(now)
    try:
        attempts = [one for one in attempts_of(RunFiles(run.folder)) if one["after_step"] < number]
        then = attempts[-1]
        there = _machine(then)
    except (RunError, ValueError, KeyError, TypeError, IndexError):
        return f"{ENVIRONMENT} does not say where the step was taken", torch.get_num_threads()
    different = []
    for name, value in here.items():
        if there[name] != value:
            different.append(f"{name} {_reason(there[name])} then, {_reason(value)} now")
    if now["gpus"]:
        different.append("a GPU adds up in an order of its own")
    if run.recipe.model.compile != "off":
        different.append("blocks may have been compiled (model.compile), and are not now")
    if any(name.startswith("ranks/") for name in recorded.metrics):
        different.append("several processes shared the step")
    threads = then.get("torch_threads")
    if not isinstance(threads, int) or threads <= 0:
        threads = torch.get_num_threads()
    return "; ".join(different) or None, threads


def _machine(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides how an attempt of a run computes: versions and devices, by name."""
    machine = {}
    for name in ("groupwise", "torch", "transformers", "numpy"):
        machine[name] = dict(attempt["versions"]).get(name)
    for name in ("cpu", "gpus", "kernels"):
        machine[name] = attempt.get(name)
    return machine


# ---------------------------------------------------------------- computing


def _computed(
    run: RecordedRun,
    recorded: Step,
    begun: int | None,
    was: RecordedRun | None = None,
    *,
    first: bool,
) -> ReplayedStep:
    """The step by a configuration.   was: the recorded one, where this is another.   first: its
    first pass, else its last.
    """
    algorithm = run.algorithm
    groups = recorded.groups
    if was is not None:
        groups = _weighted(groups, run.recipe)
    step, learner = None, None
    if begun is not None:
        learner = run.learner(begun)
        if was is None:
            *_, step = run.steps(learner, range(begun + 1, recorded.number + 1))
        else:
            _train_to(was, begun, recorded.number - 1, learner)
            (step,) = run.steps(learner, range(recorded.number, recorded.number + 1), groups)
        groups = step.groups
    elif algorithm.needs.reference and not _recorded_of(groups, "reference_logp"):
        raise CheckpointError(
            f"{algorithm.name} with beta {algorithm.beta:g} needs log-probs of a reference, which"
            " the run did not record: that takes the weights before the step"
        )
    advantages, seen = algorithm.advantages(groups), step or recorded
    steps = []
    for part in minibatches(groups, run.recipe.group):
        samples = weigh([groups[i] for i in part], [advantages[i] for i in part], algorithm)
        steps.append(samples)
    which, seen_logp = "first", seen.current_logp
    last_logp = seen.columns.get("last_logp", ())
    if last_logp and not first:
        which, seen_logp = "last", last_logp
    elif run.recipe.group.updates_per_rollout == 1:
        which = "last"
    logp = _by_name(groups, seen_logp)
    entropy = _by_name(groups, seen.columns.get("entropy", ()))
    parts, without = [], None
    try:
        parts = [closed_form(algorithm, samples, logp, entropy or None) for samples in steps]
    except DataError as error:
        without = str(error)
    return ReplayedStep(
        algorithm=algorithm,
        groups=groups,
        advantages=advantages,
        parts=parts,
        which=which,
        without=without,
        step=step,
        learner=learner,
    )


def _train_to(run: RecordedRun, begun: int, step: int, other: Learner) -> None:
    """Bring a learner to where a run's steps from `begun` to `step` have led."""
    if step == begun:
        return
    learner = run.learner(begun)
    for _ in run.steps(learner, range(begun + 1, step + 1)):
        pass
    trained = learner.tensors()

    def read(into: Mapping[str, Tensor]) -> None:
        for name in into.keys() & trained.keys():
            into[name].copy_(trained[name])

    parameters = learner.policy.model.parameters()
    with torch.no_grad():
        for new, old in zip(other.policy.model.parameters(), parameters, strict=True):
            new.copy_(old)
        other.restore({"optimizer": learner.optimizer.numbers()}, read)


def _weighted(groups: Sequence[RolloutGroup], recipe: Recipe) -> Sequence[RolloutGroup]:
    """Groups with the rewards added up by a recipe's weights."""
    named = tuple(reward.weight for reward in recipe.rewards)
    weighted = []
    for group in groups:
        # What an environment brings stands before what the recipe names.
        weights = (*group.weights[: len(group.names) - len(named)], *named)
        if weights != group.weights:
            if "process" in group.signals:
                raise ConfigError(
                    "--set rewards.N.weight: the rewards of steps were recorded as their weighted"
                    " sum; it cannot be taken apart"
                )
            reward = combine(group.rewards, weights)
            group = replace(group, weights=weights, reward=reward)
        weighted.append(group)
    return weighted


def _recorded_of(groups: Sequence[RolloutGroup], signal: str) -> bool:
    """Return whether every group has a signal."""
    return all(signal in group.signals for group in groups)


def _by_name(groups: Sequence[RolloutGroup], columns: Sequence[Sequence[np.ndarray]]) -> Tokens:
    by_name = {}
    for group, column in zip(groups, columns, strict=False):
        for rollout, values in zip(group.rollouts, column, strict=False):
            by_name[group.prompt.id, rollout.index] = values
    return by_name


# ---------------------------------------------------------------- comparing


def _closed_figures(
    run: RecordedRun, recorded: Step, again: ReplayedStep, apart: str | None
) -> Iterator[Figure]:
    limit = 0.0
    if apart is not None:
        limit = CLOSED_ELSEWHERE
    then, now = [], []
    for group in recorded.groups:
        then.append(group.reward)
        now.append(combine(group.rewards, group.weights))
    yield _figure("rewards, added up", then, now, limit)
    # By what was recorded of a reference, not by what a model says now.
    advantages = run.algorithm.advantages(recorded.groups)
    yield _figure("advantages", flat(recorded.advantages), flat(advantages), limit)
    if again.parts and run.recipe.group.updates_per_rollout == 1 and not run.routed:
        allowed = ROUNDING * max(part.scale for part in again.parts)
        yield _number("loss, closed form", recorded.metrics["loss"], again.loss, allowed)


def _figures(
    run: RecordedRun, recorded: Step, again: ReplayedStep, apart: str | None
) -> Iterator[Figure]:
    """The figures that need a model."""
    step, learner = again.step, again.learner
    if step is None or learner is None:
        return
    limit = 0.0
    if apart is not None:
        limit = ELSEWHERE_LOW if _is_low(learner) else ELSEWHERE
    yield _figure("log-probs", flat(recorded.current_logp), flat(step.current_logp), limit)
    for name in COMPUTED:
        then, now = _signal(recorded.groups, name), _signal(step.groups, name)
        if then:
            yield _figure(name, then, now, limit)
    for name, value in recorded.metrics.items():
        if not name.startswith(TIMES) and name in step.metrics:
            yield _number(name, value, step.metrics[name], limit * max(1.0, abs(value)))
    saved = checkpoint.path_of(run.folder, recorded.number)
    if saved.is_dir() and not checkpoint.damage(saved):
        written = run.learner(recorded.number)
        then = _numbers(dict(written.policy.model.named_parameters()))
        now = _numbers(dict(learner.policy.model.named_parameters()))
        yield _figure("weights after the step", then, now, limit)
        then, now = _numbers(written.tensors()), _numbers(learner.tensors())
        yield _figure("optimizer after the step", then, now, limit)


def _is_low(learner: Learner) -> bool:
    """True if products run in bfloat16."""
    return learner.policy.autocast or learner.policy.dtype == torch.bfloat16


def _numbers(tensors: Mapping[str, Tensor]) -> list[np.ndarray]:
    return [tensors[name].detach().float().flatten().cpu().numpy() for name in sorted(tensors)]


def _mismatch(run: RecordedRun, again: ReplayedStep) -> str | None:
    """Say that sampled and scored log-probs differ by more than rounding explains, if they do."""
    if again.step is None or again.learner is None:
        return None
    limit = MISMATCH_LOW if _is_low(again.learner) else MISMATCH
    mean = again.step.metrics.get("mismatch/mean", 0.0)
    if mean <= limit:
        return None
    return (
        f"sampled and scored log-probs differ by {mean:.2g} nats on average, more than rounding"
        f" explains ({limit:g}): run groupwise check {run.folder}"
    )


def _signal(groups: Sequence[RolloutGroup], name: str) -> list[np.ndarray]:
    """Return a signal of all completions; of groups without it nothing."""
    return flat([group.signals.get(name, ()) for group in groups])


def flat(columns: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Return the arrays of all completions, one group after the other."""
    arrays: list[np.ndarray] = []
    for group in columns:
        arrays += group
    return arrays


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the numbers of all arrays in one, float64 (N,)."""
    return np.concatenate([np.zeros(0), *arrays]).astype(np.float64)


def _number(name: str, recorded: float, replayed: float, limit: float) -> Figure:
    return _figure(name, [np.array([recorded])], [np.array([replayed])], limit)


def _figure(
    name: str, recorded: Sequence[np.ndarray], replayed: Sequence[Any], limit: float
) -> Figure:
    """Compare many numbers.  Those that are not finite must be the same."""
    then_N, now_N = joined(recorded), joined(replayed)
    difference = math.nan
    if list(map(len, recorded)) == list(map(len, replayed)):
        same_N = (then_N == now_N) | (np.isnan(then_N) & np.isnan(now_N))
        with np.errstate(invalid="ignore"):
            gap_N = np.where(same_N, 0.0, np.abs(then_N - now_N))
        difference = float(gap_N.max(initial=0.0))
    return Figure(name, _mean(then_N), _mean(now_N), difference, limit)


def _mean(values_N: np.ndarray) -> float:
    known_N = values_N[~np.isnan(values_N)]
    return float(known_N.mean()) if known_N.size else math.nan
