"""Replaying a recorded step from its run folder alone: the same numbers again, or another algorithm on the same completions.

Without a model: rewards -> advantages -> weights -> loss and its gradient with respect to every log-prob.  With the weights before
the step, which come from the newest checkpoint before it and the recorded steps between: everything that the step computed, by the
loop that trains (`online.train_online`), given the recorded completions in place of new ones.

Nothing is sampled, no reward function is called, nothing in the run folder is changed.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.algorithms.resolve import resolve
from groupwise.algorithms.table import Algorithm
from groupwise.config.recipes import parse_recorded
from groupwise.config.settings import Recipe, is_online, positions_of
from groupwise.config.validation import STAGE
from groupwise.errors import CheckpointError, ConfigError, DataError, RunError
from groupwise.models.saving import save_to_resume
from groupwise.records import Scored, Step
from groupwise.rewards.compose import combine
from groupwise.rollout.dynamic_sampling import Collected
from groupwise.runs import checkpoint
from groupwise.runs.engines import sampled_elsewhere
from groupwise.runs.folder import CONFIG, FINAL, LARGEST_CONFIG, Origin
from groupwise.runs.job import Learner, make_learner
from groupwise.runs.prepare import blueprint_of, modelled
from groupwise.runs.recorded import read_step
from groupwise.runs.run_files import RunFiles
from groupwise.runs.saving import REFERENCE, check_reference, reader
from groupwise.runs.starts import ENVIRONMENT, attempts_of, environment
from groupwise.runs.trust import demand_trust
from groupwise.training.closed_form import ClosedForm, Tokens, closed_form
from groupwise.training.groups import COMPUTED, RecordedRollouts
from groupwise.training.mismatch import diagnose
from groupwise.training.online import train_online
from groupwise.training.samples import minibatches, weigh
from groupwise.utils import files
from groupwise.utils.spelling import near_path

Columns = list[list[np.ndarray]]
"""Of each group and each of its completions, a number per token; empty where nothing was computed."""

ROUNDING = 1e-5
"""Share of `ClosedForm.scale` by which a recorded loss, a sum in float32, may differ from the same sum in float64."""
ELSEWHERE = 1e-3
"""Largest difference on another machine, relative to numbers above 1, where the model computes in float32."""
ELSEWHERE_LOW = 0.25
"""The same where products are in bfloat16."""
REACH = 20
"""Recorded steps that are trained again, at most, on the way to the weights before a step."""
MISMATCH, MISMATCH_LOW = 1e-4, 0.05
"""Mean difference of sampled and scored log-probs (nats) that rounding explains, in float32 and with bfloat16 products."""
TIMES = (
    *("tokens/per_second", "flops/per_second", "tokens/shared", "tokens/dead", "tokens/recomputed", "tokens/discarded"),
    *("ranks/", "prompts/"),
)
"""Metrics that say how a step was computed, not what."""
FIXED = ("group.group_size", "group.prompts_per_step", "group.max_refills", "group.reference_refresh", "group.reference_mix")


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

    recipe: Recipe
    algorithm: Algorithm
    groups: list[Scored]
    advantages: Columns
    weights: Columns
    """Of the loss; empty for completions that are not trained."""
    parts: list[ClosedForm]
    """The optimizer steps of the first pass; none if `without` says why."""
    last: list[ClosedForm] = field(default_factory=list)
    """Those of the last pass, by the log-probs that its updates saw; empty where there was but one, or they were not recorded."""
    without: str | None = None
    step: Step | None = None
    """What the training loop said of it; None without a model."""
    learner: Learner | None = None
    """As the step left it."""
    routed: bool = False
    """A mixture of experts: the loss that training reports has a part that no log-prob decides."""

    @property
    def loss(self) -> float:
        """Mean over the optimizer steps of the first pass."""
        return float(np.mean([part.loss for part in self.parts])) if self.parts else math.nan

    def column(self, name: str, *, last: bool = False) -> Columns:
        """`gradient` or `ratio` of the first pass, in the order of the groups.   last: of the last pass, if it is known."""
        merged: dict[tuple[str, int], np.ndarray] = {}
        for part in (last and self.last) or self.parts:
            merged |= getattr(part, name)
        return _in_order(self.groups, merged)

    @property
    def gradient(self) -> list[float]:
        """Sum of |dLoss / dlog-prob| over the tokens of each group, first pass."""
        return [float(sum(np.abs(column).sum() for column in group)) for group in self.column("gradient")]


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
    """The step whose weights the replay began with, 0 for the model that the run began with; None without a model."""
    apart: str | None
    """Why bit-for-bit sameness cannot be asked for; None if it is."""
    notes: list[str] = field(default_factory=list)
    """What could not be computed, and why."""
    mismatch: str | None = None
    """What the mismatch meter says, where sampled and scored log-probs differ by more than rounding explains."""
    changed: ReplayedStep | None = None
    """With the changes that were asked for."""

    @property
    def same(self) -> bool:
        """True if every number that could be computed again is the recorded one."""
        return all(figure.same for figure in self.figures)


def replay(folder: Path | str, number: int, changes: Sequence[str] = (), *, model: bool = True, reach: int = REACH) -> Replay:
    """Compute a recorded step again, and with `changes` (overrides, `group.surrogate.high=0.28`) a second time.

    model: False leaves out what needs the weights.   reach: recorded steps that are trained again, at most, on the way from the
    nearest checkpoint to the weights before the step.   Raises DataError for a step that is not there or damaged, ConfigError for a
    run without completions and for changes of what was sampled, CheckpointError if the weights cannot be had although `changes`
    need them.
    """
    folder = Path(folder)
    recipe, algorithm = _configured(folder, ())
    given = _configured(folder, changes) if changes else None
    recorded = read_recorded(folder, number)
    apart, threads = _apart(folder, number, recorded)
    notes: list[str] = []
    begun: int | None = None
    threads_now = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        if model:
            begun, wrong = _beginning(folder, number, reach)
            notes += [] if wrong is None else [wrong]
        again = _outcome(folder, recipe, algorithm, recorded, begun)
        figures = [
            *_closed_figures(recorded, again, apart),
            *(_figures(folder, recorded, again, apart) if begun is not None else ()),
        ]
        if again.step is not None:
            lost = [name for name in recorded.metrics.keys() - again.step.metrics.keys() if not name.startswith(TIMES)]
            notes += [f"{', '.join(sorted(lost))}: no metrics that a replay computes"] if lost else []
        if again.without:
            notes.append(f"loss and gradient of every log-prob: {again.without}")
        mismatch = None if begun is None else _mismatch(folder, recipe, algorithm, again, begun)
        changed = None if given is None else _outcome(folder, *given, recorded, begun, beside=again)
    finally:
        torch.set_num_threads(threads_now)
    return Replay(
        folder=folder,
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


# ---------------------------------------------------------------- what the folder says


def read_recorded(folder: Path, number: int) -> Step:
    """A recorded step with all that a replay needs.  Raises DataError with what is missing."""
    step = read_step(folder, number)
    if "loss" not in step.metrics:
        raise DataError(f"metrics.jsonl of {folder} has no line of step {number}: there is nothing to compare with")
    if len(step.advantages) != len(step.groups) or any(
        len(mine) != len(group.rollouts) for mine, group in zip(step.advantages, step.groups, strict=True)
    ):
        raise DataError(f"step {number} of {folder}: the recorded completions have no advantages")
    return step


def _configured(folder: Path, changes: Sequence[str]) -> tuple[Recipe, Algorithm]:
    """The recipe of a run folder and its algorithm, with changes."""
    if not RunFiles(folder).has(CONFIG):
        raise ConfigError(f"{folder} is no run folder{near_path(folder)}: it has no {CONFIG}")
    text = RunFiles(folder).text(CONFIG, LARGEST_CONFIG)
    for change in changes:
        key = change.partition("=")[0].strip()
        weight = key.startswith("rewards.") and key.endswith(".weight")
        if key in FIXED or not (weight or key == "objective" or key.partition(".")[0] in ("group", "optimizer")):
            raise ConfigError(
                f"--set {key}: the completions are those that were recorded, so only what is computed from them can change: "
                f"objective, rewards.N.weight, optimizer.* and group.* without {', '.join(key.partition('.')[2] for key in FIXED)}"
            )
    demand_trust(
        Origin(folder=folder, recipe=parse_recorded(text, str(folder / CONFIG))), ("objective", "model", "group", "rollout")
    )
    recipe = parse_recorded(text, str(folder / CONFIG), changes)
    if not is_online(recipe.objective):
        raise ConfigError(f"replay is for runs that sample completions, not for {recipe.objective!r}")
    path = recipe.model.path
    if path is not None and path.startswith(STAGE):  # the stages of a run lie side by side, wherever that was moved
        recipe = replace(recipe, model=replace(recipe.model, path=str(folder.parent / path.removeprefix(STAGE) / FINAL)))
    algorithm = resolve(recipe.objective, recipe.group, recipe.rollout.max_new_tokens, recipe.critic)
    for needs, what in ((algorithm.needs_value, "a critic"), (algorithm.needs_teacher, "a teacher")):
        if needs:
            raise ConfigError(
                f"{algorithm.name} learns from {what}, whose part in a step cannot be computed again yet: replay takes runs of "
                "algorithms that need none (`groupwise view` shows what was recorded)"
            )
    return recipe, sampled_elsewhere(algorithm, recipe.rollout)


def _beginning(folder: Path, number: int, reach: int) -> tuple[int | None, str | None]:
    """The step whose weights a replay can begin with, and what was wrong with nearer ones."""
    found: list[str] = []
    names = [path.name for path in (folder / checkpoint.CHECKPOINTS).glob("[0-9]*")]
    saved = sorted((int(name) for name in names if name.isdigit() and int(name) < number), reverse=True)
    for step in [*saved, 0]:
        if step and (wrong := checkpoint.damage(checkpoint.place(folder, step))):
            found.append(f"from checkpoint {step}, which is damaged: {wrong}")
            continue
        if number - 1 - step > reach:
            found.append(f"the weights before the step: {number - 1 - step} steps behind step {step}, farther than --reach {reach}")
            break
        try:
            for between in range(step + 1, number):
                read_recorded(folder, between)
        except DataError as error:
            found.append(f"the weights before the step: from step {step} on, {error}")
            break
        return step, "; ".join(found) or None
    return None, "; ".join(found)


def _apart(folder: Path, number: int, recorded: Step) -> tuple[str | None, int]:
    """What differs between the machine that took a step and this one, and the threads it took it with."""
    try:
        then = next(attempt for attempt in reversed(attempts_of(RunFiles(folder))) if attempt["after_step"] < number)
        versions = dict(then["versions"])
    except (RunError, ValueError, KeyError, TypeError, StopIteration):
        return f"{ENVIRONMENT} does not say where the step was taken", torch.get_num_threads()
    now = environment()
    different = [
        f"{name} {versions.get(name)} then, {now['versions'][name]} now"
        for name in ("groupwise", "torch", "transformers", "numpy")
        if versions.get(name) != now["versions"][name]
    ]
    different += [
        f"{name} {then.get(name)} then, {now.get(name)} now"
        for name in ("cpu", "gpus", "kernels")
        if then.get(name) != now.get(name)
    ]
    if now["gpus"]:
        different.append("a GPU adds up in an order of its own")
    if any(name.startswith("ranks/") for name in recorded.metrics):
        different.append("several processes shared the step")
    threads = then.get("torch_threads")
    return "; ".join(different) or None, threads if isinstance(threads, int) and threads > 0 else torch.get_num_threads()


# ---------------------------------------------------------------- computing


def _outcome(
    folder: Path, recipe: Recipe, algorithm: Algorithm, recorded: Step, begun: int | None, beside: ReplayedStep | None = None
) -> ReplayedStep:
    """The step by a configuration.  beside: the recorded one's, where this is another."""
    groups = _weighted(recorded.groups, recipe) if beside is not None else list(recorded.groups)
    step, learner = None, None
    if begun is not None:
        step, learner = _trained(folder, recipe, algorithm, recorded, begun, groups if beside is not None else None)
        groups = list(step.groups)
    elif algorithm.needs_reference and any("reference_logp" not in group.signals for group in groups):
        raise CheckpointError(
            f"{algorithm.name} with beta {algorithm.beta:g} needs log-probs of a reference, which the run did not record: "
            "that takes the weights before the step"
        )
    advantages = algorithm.advantages(groups)
    steps = [
        weigh([groups[i] for i in part], [advantages[i] for i in part], algorithm) for part in minibatches(groups, recipe.group)
    ]
    current = _by_name(groups, (step or recorded).current_logp)
    parts, last, without = [], [], None
    seen = _by_name(groups, (step or recorded).columns.get("last_logp", ()))
    entropy = _by_name(groups, (step or recorded).columns.get("entropy", ()))  # at the first pass
    try:
        parts = [closed_form(algorithm, samples, current, entropy or None) for samples in steps]
        last = [closed_form(algorithm, samples, seen) for samples in steps] if seen and not algorithm.needs_entropy else []
    except DataError as error:
        without = str(error)
    weights = {(sample.group, sample.index): sample.weight for samples in steps for sample in samples}
    return ReplayedStep(
        recipe=recipe,
        algorithm=algorithm,
        groups=groups,
        advantages=advantages,
        weights=_in_order(groups, weights),
        parts=parts,
        last=last,
        without=without,
        step=step,
        learner=learner,
        routed=_routed(folder, recipe),
    )


def _routed(folder: Path, recipe: Recipe) -> bool:
    """True if a model has experts whose load its loss balances."""
    for place in (folder / FINAL, Path(str(recipe.model.path)), *(folder / checkpoint.CHECKPOINTS).glob("*/policy")):
        with suppress(RunError):
            if isinstance(config := RunFiles(place).json("config.json"), dict):
                return bool(config.get("output_router_logits") and config.get("router_aux_loss_coef"))
    return False


def _weighted(groups: Sequence[Scored], recipe: Recipe) -> list[Scored]:
    """Groups with the rewards added up by a recipe's weights."""
    named = tuple(reward.weight for reward in recipe.rewards)
    # What an environment brings stands before what the recipe names.
    weights = (*groups[0].weights[: len(groups[0].names) - len(named)], *named) if groups else named
    if all(group.weights == weights for group in groups):
        return list(groups)
    if any("process" in group.signals for group in groups):
        raise ConfigError(
            "--set rewards.N.weight: the rewards of steps were recorded as their weighted sum; it cannot be taken apart"
        )
    return [replace(group, weights=weights, reward=combine(group.rewards, weights)) for group in groups]


def _trained(
    folder: Path, recipe: Recipe, algorithm: Algorithm, recorded: Step, begun: int, instead: Sequence[Scored] | None
) -> tuple[Step, Learner]:
    """The last of the steps from `begun` on, trained on what was recorded.

    instead: the groups of that step, where its configuration is not the recorded one; the steps before it are taken as they were.
    """
    before = begun
    learner = None
    if instead is not None and recorded.number - 1 > begun:
        own, plain = _configured(folder, ())
        learner = _learner(folder, own, plain, begun)
        for _ in _steps(folder, own, plain, learner, range(begun + 1, recorded.number)):
            pass
        before = recorded.number - 1
    learner = _learner(folder, recipe, algorithm, begun, learner)
    (*_, last) = _steps(folder, recipe, algorithm, learner, range(before + 1, recorded.number + 1), instead)
    return last, learner


def _steps(
    folder: Path,
    recipe: Recipe,
    algorithm: Algorithm,
    learner: Learner,
    numbers: range,
    instead: Sequence[Scored] | None = None,
) -> Iterator[Step]:
    def read(number: int) -> Collected:
        step = read_recorded(folder, number)
        groups = step.groups if instead is None else instead
        return list(groups), int(step.metrics.get("prompts", len(step.groups)))

    return train_online(
        learner.policy,
        algorithm,
        RecordedRollouts(read, numbers),
        learner.optimizer,
        group=recipe.group,
        budget=positions_of(learner.recipe),
        reference=learner.reference,
        checkpointing=recipe.model.gradient_checkpointing,
    )


def _learner(folder: Path, recipe: Recipe, algorithm: Algorithm, begun: int, trained: Learner | None = None) -> Learner:
    """Policy, reference and optimizer after step `begun` of a run, or as another configuration's training has left them."""
    saved = checkpoint.place(folder, begun) if begun else None
    resume = None if saved is None else saved / "policy"
    recipe, blueprint = modelled(recipe, resume)
    kept = folder / REFERENCE
    check_reference(folder)
    anchored = not algorithm.needs_reference or recipe.model.lora is not None or kept.is_dir() or saved is None
    learner = make_learner(
        recipe,
        blueprint,
        algorithm if anchored else replace(algorithm, beta=0.0),
        reference=kept if kept.is_dir() else None,
        resume=resume,
    )
    if not anchored:  # the run needed none; what it began with is what it would have been
        learner.reference = make_learner(recipe, blueprint_of(recipe, None), replace(algorithm, beta=0.0)).policy
        learner.reference.model.requires_grad_(False)
    if saved is not None:
        learner.restore(checkpoint.load(saved, verify=False), reader(saved))
    if trained is not None:
        _copy(trained, learner)
    return learner


def _copy(one: Learner, other: Learner) -> None:
    """Bring weights and optimizer of a learner to where another's are."""
    with torch.no_grad():
        for new, old in zip(other.policy.model.parameters(), one.policy.model.parameters(), strict=True):
            new.copy_(old)
        kept = {name: tensor.clone() for name, tensor in one.tensors().items()}

        def read(into: Mapping[str, Tensor]) -> None:
            for name in into.keys() & kept.keys():
                into[name].copy_(kept[name])

        other.restore({"optimizer": one.optimizer.numbers()}, read)


def _by_name(groups: Sequence[Scored], columns: Sequence[Sequence[np.ndarray]]) -> Tokens:
    return {
        (group.prompt.id, rollout.index): values
        for group, column in zip(groups, columns, strict=False)
        for rollout, values in zip(group.rollouts, column, strict=False)
    }


def _in_order(groups: Sequence[Scored], tokens: Tokens) -> Columns:
    nothing = np.zeros(0)
    return [[tokens.get((group.prompt.id, rollout.index), nothing) for rollout in group.rollouts] for group in groups]


# ---------------------------------------------------------------- comparing


def _closed_figures(recorded: Step, again: ReplayedStep, apart: str | None) -> Iterator[Figure]:
    limit = 0.0 if apart is None else 1e-9
    rewards = [combine(group.rewards, group.weights) for group in recorded.groups]
    yield _figure("rewards, added up", [group.reward for group in recorded.groups], rewards, limit)
    # By what was recorded of a reference, not by what a model says now.
    advantages = again.algorithm.advantages(recorded.groups)
    yield _figure("advantages", _flat(recorded.advantages), _flat(advantages), limit)
    if again.parts and again.recipe.group.updates_per_rollout == 1 and not again.routed:
        allowed = ROUNDING * max(part.scale for part in again.parts)
        yield _figure("loss, closed form", [np.array([recorded.metrics["loss"]])], [np.array([again.loss])], allowed)


def _figures(folder: Path, recorded: Step, again: ReplayedStep, apart: str | None) -> Iterator[Figure]:
    """The figures that need a model."""
    step, learner = again.step, again.learner
    assert step is not None and learner is not None
    low = learner.policy.autocast or learner.policy.dtype == torch.bfloat16
    limit = 0.0 if apart is None else ELSEWHERE_LOW if low else ELSEWHERE
    yield _figure("log-probs", _flat(recorded.current_logp), _flat(step.current_logp), limit)
    for name in COMPUTED:
        if any(name in group.signals for group in recorded.groups):
            then, now = ([c for group in found.groups for c in group.signals.get(name, ())] for found in (recorded, step))
            yield _figure(name, then, now, limit)
    for name, value in recorded.metrics.items():
        if not name.startswith(TIMES) and name in step.metrics:
            yield _figure(name, [np.array([value])], [np.array([step.metrics[name]])], limit * max(1.0, abs(value)))
    saved = checkpoint.place(folder, recorded.number)
    if saved.is_dir() and not checkpoint.damage(saved):
        kept_weights, own_weights = _weights(saved, learner)
        yield _figure("weights after the step", kept_weights, own_weights, limit)
        tensors = learner.tensors()
        kept = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        reader(saved)(kept)
        then, now = ([some[name].float().flatten().cpu().numpy() for name in sorted(kept)] for some in (kept, tensors))
        yield _figure("optimizer after the step", then, now, limit)


def _weights(saved: Path, learner: Learner) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What a checkpoint holds of a policy, and what it would hold of the learner's."""
    from safetensors.torch import load_file

    temporary = files.temporary_folder("replay")
    try:
        save_to_resume(learner.policy, temporary)
        both: list[dict[str, Tensor]] = []
        for folder in (saved / "policy", temporary):
            both.append({name: t for path in sorted(folder.rglob("*.safetensors")) for name, t in load_file(str(path)).items()})
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    names = sorted(both[0].keys() | both[1].keys())
    nothing = torch.zeros(0)
    one, other = ([found.get(name, nothing).float().flatten().numpy() for name in names] for found in both)
    return one, other


def _mismatch(folder: Path, recipe: Recipe, algorithm: Algorithm, again: ReplayedStep, begun: int) -> str | None:
    """The mismatch meter's word, by the weights before the step; None if all is well."""
    step, after = again.step, again.learner
    assert step is not None and after is not None
    low = after.policy.autocast or after.policy.dtype == torch.bfloat16
    if not step.metrics.get("mismatch/mean", 0.0) > (MISMATCH_LOW if low else MISMATCH):
        return None
    if begun != step.number - 1:
        return f"sampled and scored log-probs differ; where from, only a checkpoint of step {step.number - 1} can tell"
    before = _learner(folder, recipe, algorithm, begun)
    saved = [int(path.name) for path in (folder / checkpoint.CHECKPOINTS).glob("[0-9]*") if path.name.isdigit()]
    usable = [n for n in sorted(saved, reverse=True) if n < begun and not checkpoint.damage(checkpoint.place(folder, n))]
    older = {f"those after step {n}": _learner(folder, recipe, algorithm, n).policy for n in usable}
    if begun:
        older["those that the run began with"] = _learner(folder, recipe, algorithm, 0).policy
    taken = before.optimizer.taken
    pairs = [
        (rollout, logp)
        for group, columns in zip(step.groups, step.current_logp, strict=True)
        for rollout, logp in zip(group.rollouts, columns, strict=True)
        if logp.size and (rollout.version == taken).all()
    ]
    found = diagnose(before.policy, [r for r, _ in pairs], [logp for _, logp in pairs], older=older)
    return None if found is None else str(found)


def _flat(columns: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    return [column for group in columns for column in group]


def _figure(name: str, recorded: Sequence[np.ndarray], replayed: Sequence[Any], limit: float) -> Figure:
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
