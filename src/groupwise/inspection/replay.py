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

from groupwise.algorithms.table import Algorithm
from groupwise.config.settings import Recipe, is_online, positions_of
from groupwise.config.validation import STAGE
from groupwise.errors import CheckpointError, ConfigError, DataError, RunError
from groupwise.records import RolloutGroup, Step
from groupwise.rewards.compose import combine
from groupwise.runs import checkpoint
from groupwise.runs.final_model import check_reference
from groupwise.runs.folder import FINAL, REFERENCE
from groupwise.runs.job import Learner, make_learner
from groupwise.runs.origin import overridden, run_of
from groupwise.runs.prepared import algorithm_of, modelled
from groupwise.runs.rollout_files import read_step
from groupwise.runs.run_files import RunFiles
from groupwise.runs.run_models import blueprint_of, hold
from groupwise.runs.starts import ENVIRONMENT, attempts_of, environment
from groupwise.runs.trust import demand_trust
from groupwise.training.closed_form import ClosedForm, Tokens, closed_form
from groupwise.training.groups import COMPUTED, Collected, RecordedRollouts
from groupwise.training.online import train_online
from groupwise.training.samples import minibatches, weigh
from groupwise.utils.spelling import counted

Columns = list[list[np.ndarray]]
"""A number per token of each group and completion; empty where nothing was computed."""

ROUNDING = 1e-5
"""Share of `ClosedForm.scale` by which a recorded loss, a sum in float32, may differ from the same
sum in float64.
"""
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
        return float(np.mean([part.loss for part in self.parts])) if self.parts else math.nan

    def column(self, name: str) -> Columns:
        """`gradient` or `ratio`, in the order of the groups."""
        merged: dict[tuple[str, int], np.ndarray] = {}
        for part in self.parts:
            merged |= getattr(part, name)
        nothing = np.zeros(0)
        columns = []
        for group in self.groups:
            keys = [(group.prompt.id, rollout.index) for rollout in group.rollouts]
            columns.append([merged.get(key, nothing) for key in keys])
        return columns

    @property
    def gradient(self) -> list[float]:
        """Sum of |dLoss / dlog-prob| over the tokens of each group."""
        sizes = []
        for columns in self.column("gradient"):
            sizes.append(float(sum(np.abs(column).sum() for column in columns)))
        return sizes


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
    change = RecordedRun.of(run.folder, changes) if changes else None
    recorded = read_recorded(run.folder, number)
    apart, threads = _apart(run.folder, number, recorded)
    begun, reasons = _beginning(run.folder, number, reach) if model else (None, [])
    first = any(one.algorithm.needs.entropy for one in (run, change) if one is not None)
    notes = ["; ".join(reasons)] if reasons else []
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        again = _computed(run, recorded, begun, first=first)
        figures = [
            *_closed_figures(run, recorded, again, apart),
            *_figures(run, recorded, again, apart),
        ]
        mismatch = _mismatch(run, again)
        changed = None if change is None else _computed(change, recorded, begun, run, first=first)
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
    if [len(one) for one in step.advantages] != [len(group.rollouts) for group in step.groups]:
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
        for change in changes:
            key = change.partition("=")[0].strip()
            weight = key.startswith("rewards.") and key.endswith(".weight")
            if key in FIXED or not (
                weight or key == "objective" or key.partition(".")[0] in ("group", "optimizer")
            ):
                raise ConfigError(
                    f"--set {key}: the completions are those that were recorded, so only what is"
                    " computed from them can change: objective, rewards.N.weight, optimizer.* and"
                    f" group.* without {', '.join(key.partition('.')[2] for key in FIXED)}"
                )
        demand_trust(origin, ("objective", "model", "group", "rollout"))
        folder, recipe = origin.folder, overridden(origin, changes).recipe
        if not is_online(recipe.objective):
            raise ConfigError(
                f"replay is for runs that sample completions, not for {recipe.objective!r}"
            )
        path = recipe.model.path
        if path is not None and path.startswith(
            STAGE
        ):  # the stages of a run lie side by side, wherever that was moved
            recipe = replace(
                recipe,
                model=replace(
                    recipe.model, path=str(folder.parent / path.removeprefix(STAGE) / FINAL)
                ),
            )
        algorithm = algorithm_of(recipe)
        if algorithm.needs.critic or algorithm.needs.teacher:
            other = "a critic" if algorithm.needs.critic else "a teacher"
            raise ConfigError(
                f"{algorithm.name} learns from {other}, whose part in a step cannot be computed"
                " again yet: replay takes runs of algorithms that need none (`groupwise view`"
                " shows what was recorded)"
            )
        return cls(folder, recipe, algorithm)

    def learner(self, step: int) -> Learner:
        """Policy, reference and optimizer after a step whose checkpoint is there; 0: before the
        first.
        """
        saved = checkpoint.place(self.folder, step) if step else None
        resume, before = None if saved is None else saved / "policy", self.folder / REFERENCE
        recipe, blueprint = modelled(self.recipe, resume)
        check_reference(self.folder)
        reference = before if before.is_dir() else None
        learner = make_learner(
            recipe, blueprint, self.algorithm, reference=reference, resume=resume
        )
        if (
            learner.reference is not None
            and recipe.model.lora is None
            and reference is None
            and saved is not None
        ):
            # The run kept none, because it needed none: the weights that it began with.
            learner.reference = hold(recipe, blueprint_of(recipe, None))
            learner.reference.model.requires_grad_(False)
        if saved is not None:
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
        for place in (
            self.folder / FINAL,
            Path(str(self.recipe.model.path)),
            *_checkpoints(self.folder, "*/policy"),
        ):
            with suppress(RunError):
                if isinstance(config := RunFiles(place).json("config.json"), dict):
                    return bool(
                        config.get("output_router_logits") and config.get("router_aux_loss_coef")
                    )
        return False


def _checkpoints(folder: Path, pattern: str = "[0-9]*") -> Iterator[Path]:
    return (folder / checkpoint.CHECKPOINTS).glob(pattern)


def _saved_before(folder: Path, number: int) -> list[int]:
    """Steps before `number` that have a checkpoint, the newest first."""
    saved = (int(path.name) for path in _checkpoints(folder) if path.name.isdigit())
    return sorted((step for step in saved if step < number), reverse=True)


def _beginning(folder: Path, number: int, reach: int) -> tuple[int | None, list[str]]:
    """The step whose weights a replay can begin with, and what was wrong with nearer ones."""
    reasons: list[str] = []
    for step in [*_saved_before(folder, number), 0]:
        if step and (wrong := checkpoint.damage(checkpoint.place(folder, step))):
            reasons.append(f"from checkpoint {step}, which is damaged: {wrong}")
            continue
        if number - 1 - step > reach:
            far = (
                f"{counted(number - 1 - step, 'step')} behind step {step}, farther than --reach"
                f" {reach}"
            )
            return None, [*reasons, f"the weights before the step: {far}"]
        try:
            for between in range(step + 1, number):
                read_recorded(folder, between)
        except DataError as error:
            return None, [*reasons, f"the weights before the step: from step {step} on, {error}"]
        return step, reasons
    raise AssertionError("step 0 is always there")


def _apart(folder: Path, number: int, recorded: Step) -> tuple[str | None, int]:
    """What differs between the machine that took a step and this one, and the threads it took it
    with.
    """
    try:
        then = next(
            attempt
            for attempt in reversed(attempts_of(RunFiles(folder)))
            if attempt["after_step"] < number
        )
        versions = dict(then["versions"])
    except (RunError, ValueError, KeyError, TypeError, StopIteration):
        return f"{ENVIRONMENT} does not say where the step was taken", torch.get_num_threads()
    now = environment()
    facts = [
        (name, versions.get(name), now["versions"][name])
        for name in ("groupwise", "torch", "transformers", "numpy")
    ]
    facts += [(name, then.get(name), now.get(name)) for name in ("cpu", "gpus", "kernels")]
    different = []
    for name, before, after in facts:
        if before != after:
            different.append(f"{name} {before} then, {after} now")
    if now["gpus"]:
        different.append("a GPU adds up in an order of its own")
    if any(name.startswith("ranks/") for name in recorded.metrics):
        different.append("several processes shared the step")
    threads = then.get("torch_threads")
    if not isinstance(threads, int) or threads <= 0:
        threads = torch.get_num_threads()
    return "; ".join(different) or None, threads


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
    groups = recorded.groups if was is None else _weighted(recorded.groups, run.recipe)
    step, learner = None, None
    if begun is not None:
        learner = run.learner(begun)
        if was is None:
            *_, step = run.steps(learner, range(begun + 1, recorded.number + 1))
        else:
            _train_to(was, begun, recorded.number - 1, learner)
            (step,) = run.steps(learner, range(recorded.number, recorded.number + 1), groups)
        groups = step.groups
    elif algorithm.needs.reference and any(
        "reference_logp" not in group.signals for group in groups
    ):
        raise CheckpointError(
            f"{algorithm.name} with beta {algorithm.beta:g} needs log-probs of a reference, which"
            " the run did not record: that takes the weights before the step"
        )
    advantages, seen = algorithm.advantages(groups), step or recorded
    steps = []
    for part in minibatches(groups, run.recipe.group):
        samples = weigh([groups[i] for i in part], [advantages[i] for i in part], algorithm)
        steps.append(samples)
    last = () if first else seen.columns.get("last_logp", ())
    logp = _by_name(groups, last or seen.current_logp)
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
        which="last" if last or run.recipe.group.updates_per_rollout == 1 else "first",
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
    tensors = {name: tensor.clone() for name, tensor in learner.tensors().items()}

    def read(into: Mapping[str, Tensor]) -> None:
        for name in into.keys() & tensors.keys():
            into[name].copy_(tensors[name])

    with torch.no_grad():
        for new, old in zip(
            other.policy.model.parameters(), learner.policy.model.parameters(), strict=True
        ):
            new.copy_(old)
        other.restore({"optimizer": learner.optimizer.numbers()}, read)


def _weighted(groups: Sequence[RolloutGroup], recipe: Recipe) -> Sequence[RolloutGroup]:
    """Groups with the rewards added up by a recipe's weights."""
    named = tuple(reward.weight for reward in recipe.rewards)
    # What an environment brings stands before what the recipe names.
    weights = (*groups[0].weights[: len(groups[0].names) - len(named)], *named) if groups else named
    if all(group.weights == weights for group in groups):
        return groups
    if any("process" in group.signals for group in groups):
        raise ConfigError(
            "--set rewards.N.weight: the rewards of steps were recorded as their weighted sum; it"
            " cannot be taken apart"
        )
    return [
        replace(group, weights=weights, reward=combine(group.rewards, weights)) for group in groups
    ]


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
    limit = 0.0 if apart is None else 1e-9
    rewards = [combine(group.rewards, group.weights) for group in recorded.groups]
    yield _figure("rewards, added up", [group.reward for group in recorded.groups], rewards, limit)
    # By what was recorded of a reference, not by what a model says now.
    yield _figure(
        "advantages",
        _flat(recorded.advantages),
        _flat(run.algorithm.advantages(recorded.groups)),
        limit,
    )
    if again.parts and run.recipe.group.updates_per_rollout == 1 and not run.routed:
        allowed = ROUNDING * max(part.scale for part in again.parts)
        yield _figure(
            "loss, closed form",
            [np.array([recorded.metrics["loss"]])],
            [np.array([again.loss])],
            allowed,
        )


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
    yield _figure("log-probs", _flat(recorded.current_logp), _flat(step.current_logp), limit)
    for name in COMPUTED:
        if any(name in group.signals for group in recorded.groups):
            then = _flat([group.signals.get(name, ()) for group in recorded.groups])
            now = _flat([group.signals.get(name, ()) for group in step.groups])
            yield _figure(name, then, now, limit)
    for name, value in recorded.metrics.items():
        if not name.startswith(TIMES) and name in step.metrics:
            yield _figure(
                name,
                [np.array([value])],
                [np.array([step.metrics[name]])],
                limit * max(1.0, abs(value)),
            )
    saved = checkpoint.place(run.folder, recorded.number)
    if saved.is_dir() and not checkpoint.damage(saved):
        written = run.learner(recorded.number)
        then = _numbers(dict(written.policy.model.named_parameters()))
        now = _numbers(dict(learner.policy.model.named_parameters()))
        yield _figure("weights after the step", then, now, limit)
        yield _figure(
            "optimizer after the step",
            _numbers(written.tensors()),
            _numbers(learner.tensors()),
            limit,
        )


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


def _flat(columns: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    flat: list[np.ndarray] = []
    for group in columns:
        flat += group
    return flat


def _figure(
    name: str, recorded: Sequence[np.ndarray], replayed: Sequence[Any], limit: float
) -> Figure:
    """Compare many numbers.  Those that are not finite must be the same."""
    if [len(column) for column in recorded] != [len(column) for column in replayed]:
        return Figure(name, _mean(recorded), _mean(replayed), math.nan, limit)
    one = np.concatenate([np.zeros(0), *recorded]).astype(np.float64)
    other = np.concatenate([np.zeros(0), *replayed]).astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(one - other))
    return Figure(name, _mean(recorded), _mean(replayed), float(gap.max(initial=0.0)), limit)


def _mean(columns: Sequence[np.ndarray]) -> float:
    values = np.concatenate([np.zeros(0), *columns]).astype(np.float64)
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else math.nan
