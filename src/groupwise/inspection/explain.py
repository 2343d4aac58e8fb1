"""`groupwise explain`: one step in numbers, from rewards to the gradient.

Credit, weights, ratio, surrogate and KL are the functions that training calls.  Of a run the group
is the recorded one, with the log-probs that the run recorded.  Without a run the policy is a toy:
every token has a parameter z of its own and p = sigmoid(z), so that a gradient step moves the log-
prob of this token and nothing else, and can be followed by hand.

N trained tokens, one completion after the other
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from groupwise.algorithms import diagnostics
from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.parts import describe, is_built_in, name_of, options, with_options
from groupwise.algorithms.table import ALGORITHMS
from groupwise.config.objectives import DATASET, is_online
from groupwise.config.resolve import resolve
from groupwise.config.settings import GroupSettings, Recipe
from groupwise.data import vocabulary
from groupwise.errors import ConfigError
from groupwise.records import Finish, Prompt, Rollout, RolloutGroup, Sample, Sampling, Step
from groupwise.runs.origin import run_of
from groupwise.runs.rollout_files import TOKENS, list_rollouts, read_step
from groupwise.runs.rollout_table import bounded_table
from groupwise.runs.run_files import RunFiles
from groupwise.runs.trust import demand_trust
from groupwise.training.recorded_loss import RecordedLoss
from groupwise.training.samples import minibatches, weigh
from groupwise.utils.spelling import counted
from groupwise.utils.terminal import escaped

REWARDS = (1.0, 0.0, 0.5)
"""Rewards of the made-up completions where none are named."""
PROBABILITIES = (0.5, 0.8, 0.6, 0.9, 0.3, 0.7)
"""Probabilities that the toy policy gave to the tokens, in turn."""
REFERENCE = (0.55, 0.7, 0.6, 0.9, 0.4, 0.65)
"""Probabilities of the tokens under the reference of the toy policy, in turn."""
VALUES = (0.4, 0.5, 0.6, 0.5, 0.3, 0.2)
"""Values that the toy critic gave to the tokens, in turn."""
EOS = 0
SURE = 16.0
"""The z of a token that was sampled with certainty: one of infinity could not be moved."""
MOST_PASSES = 100
STEP_SIZE = 5.0
"""Size of a gradient step on the toy policy."""
LONGEST = 8
"""Tokens of a completion that the toy policy can sample."""
COMPLETIONS, TOKENS_SHOWN = 8, 4
"""Completions of a recorded group that are shown, and tokens of each in the tables."""
MADE_UP = "Made up: lengths, log-probs"
TEXT = 60
"""Characters of a text that are shown."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pass:
    """The loss of all tokens at one update; every column is (N,)."""

    title: str
    logp: np.ndarray
    """Log-probs under the policy at this update, nats."""
    ratio: np.ndarray
    """Ratio to the policy that sampled, at the algorithm's level."""
    kl: np.ndarray | None
    """KL to the reference; None without a KL in the loss."""
    loss: np.ndarray
    """Loss of each token before its weight."""
    gradient: np.ndarray
    """Gradient of the loss with respect to each log-prob."""
    clipped: np.ndarray
    """bool: it has an advantage, and the surrogate cuts its gradient."""
    total: float
    """The loss: sum(weight x loss)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WorkedExample:
    """A group worked through."""

    algorithm: Algorithm
    group: RolloutGroup
    advantages: list[np.ndarray]
    samples: list[Sample]
    """The completions that have tokens to train, weights final."""
    passes: tuple[Pass, ...]
    recorded: bool = False
    """True for a group of a run, of which texts and the first tokens of completions are shown."""
    pieces: vocabulary.Vocabulary | None = None
    """The texts of token ids, where the run recorded them."""

    def column(self, name: str) -> np.ndarray:
        """Return a column of the samples (N,): `weight`, `advantage` or `behavior_logp`."""
        columns = [getattr(sample, name)[sample.weight != 0] for sample in self.samples]
        return np.concatenate(columns)


# ---------------------------------------------------------------- a toy policy


def work(
    rewards: Sequence[float | None] = REWARDS,
    lengths: Sequence[int] | None = None,
    *,
    preset: str = "grpo",
    mu: int = 2,
    beta: float | None = None,
    lr: float = STEP_SIZE,
    longest: int = LONGEST,
    group: GroupSettings | None = None,
) -> WorkedExample:
    """Work a step of an algorithm through, on one made-up group and a toy policy.

    rewards: one for each completion, None = unscorable.
    lengths: tokens of each completion, EOS included; default 2, 3, 4 and so on in turn.
    preset: the algorithm.
    mu: passes over the rollout, each with a gradient step on the toy policy.
    beta: weight of the KL, default the preset's.   lr: size of a gradient step.
    longest: the token limit, by which Dr. GRPO divides.
    group: further settings, of which `mu`, `beta` and the number of rewards take precedence.
    Raises ConfigError for what the algorithm refuses, and for lengths that do not fit.
    """
    if lengths is None:
        lengths = (2 + np.arange(len(rewards)) % 3).tolist()
    _check_numbers(rewards, lengths, mu, beta, lr, longest)
    settings = replace(
        group or GroupSettings(),
        group_size=len(rewards),
        updates_per_rollout=mu,
        minibatches=1,
    )
    if beta is not None:
        settings = replace(settings, beta=beta)
    if preset in DATASET:
        raise ConfigError(
            f"{preset!r} learns from a data set; explain is for what samples completions: grpo,"
            " dapo, rloo ..."
        )
    algorithm = resolve(preset, settings, longest)
    _check_explainable(algorithm)
    made_up = _group(rewards, lengths, longest)
    advantages = algorithm.advantages([made_up])[0]
    samples = weigh([made_up], [advantages], algorithm)
    return WorkedExample(
        algorithm=algorithm,
        group=made_up,
        advantages=advantages,
        samples=samples,
        passes=_toy_passes(algorithm, samples, mu, lr),
    )


def _check_numbers(
    rewards: Sequence[float | None],
    lengths: Sequence[int],
    mu: int,
    beta: float | None,
    lr: float,
    longest: int,
) -> None:
    if len(lengths) != len(rewards) or min(lengths) < 1 or max(lengths) > longest:
        raise ConfigError(
            f"{len(rewards)} rewards need as many lengths, each 1 to {longest}, got"
            f" {', '.join(map(str, lengths))}"
        )
    if not 1 <= mu <= MOST_PASSES:
        raise ConfigError(f"mu must be at least 1 and at most {MOST_PASSES}, got {mu}")
    if not 0 < lr < np.inf:
        raise ConfigError(f"lr must be a finite number greater than 0, got {lr:g}")
    if beta is not None and not beta >= 0:
        raise ConfigError(f"beta must be at least 0, got {beta:g}")
    for reward in rewards:
        if reward is not None and not np.isfinite(reward):
            raise ConfigError(f"a reward is a finite number or none, got {reward}")


def _check_explainable(algorithm: Algorithm) -> None:
    if algorithm.needs.forking:
        raise ConfigError(
            "group.entropy_quantile asks for the entropies of a whole step, which stand in no"
            " table: explain --preset NAME"
        )
    if algorithm.divergence is not None:
        raise ConfigError(
            f"{algorithm.name!r} learns from whole distributions, which do not fit a table of"
            " tokens: explain distill_sampled"
        )


def _group(rewards: Sequence[float | None], lengths: Sequence[int], longest: int) -> RolloutGroup:
    """Make a group up."""
    prompt = Prompt(id="example", tokens=np.array([1, 2]), text="")
    rollouts, references, values = [], [], []
    begin = 0
    for index, n in enumerate(lengths):
        places = np.arange(begin, begin + n)
        begin += n
        tokens = np.arange(1, n + 1)
        tokens[-1] = EOS
        rollout = Rollout(
            prompt=prompt,
            index=index,
            tokens=tokens,
            behavior_logp=np.log(_in_turn(PROBABILITIES, places)),
            finish=Finish.EOS,
            eos_ids=(EOS,),
            sampling=Sampling(max_new_tokens=longest),
            text="",
        )
        rollouts.append(rollout)
        references.append(np.log(_in_turn(REFERENCE, places)))
        values.append(_in_turn(VALUES, places))
    reward = np.array(rewards, dtype=np.float64)  # None becomes NaN
    signals = {
        "reference_logp": tuple(references),
        "value": tuple(values),
        "teacher_logp": tuple(references),
    }
    return RolloutGroup(
        rollouts=tuple(rollouts),
        names=("reward",),
        rewards=reward[:, None],
        reward=reward,
        signals=signals,
    )


def _in_turn(numbers: Sequence[float], places: np.ndarray) -> np.ndarray:
    return np.array(numbers)[places % len(numbers)]


def _toy_passes(
    algorithm: Algorithm, samples: Sequence[Sample], mu: int, lr: float
) -> tuple[Pass, ...]:
    """Compute `mu` passes, and move the toy policy by a gradient step after each."""
    if not samples:
        return ()
    behavior_N = np.concatenate([sample.behavior_logp for sample in samples])
    sizes = [sample.weight.size for sample in samples]
    z_N = torch.logit(torch.from_numpy(behavior_N).double().exp()).clamp(max=SURE)
    passes = []
    for number in range(1, mu + 1):
        title = "the policy is still the one that sampled: every ratio is 1"
        if number > 1:
            title = f"after {counted(number - 1, 'gradient step')} of size {lr:g}"
        logp_N = logsigmoid(z_N)
        logp = [column.numpy() for column in logp_N.split(sizes)]
        passes.append(_pass(algorithm, samples, logp, f"Pass {number}: {title}"))
        gradient_N = torch.from_numpy(passes[-1].gradient)
        z_N = z_N - lr * gradient_N * (1 - logp_N.exp())  # d log sigmoid(z) / dz = 1 - p
    return tuple(passes)


def _pass(
    algorithm: Algorithm, samples: Sequence[Sample], logp: Sequence[np.ndarray], title: str
) -> Pass:
    """Compute the loss of samples whose log-probs are `logp`, without a row's further terms."""
    algorithm = replace(algorithm, extra=())
    recorded = RecordedLoss(algorithm, samples, logp)
    total, gradient_N = recorded.gradient()
    terms = recorded.terms
    kl_N = None
    if algorithm.loss_beta and terms.reference_logp_M is not None:
        log_ratio_N = terms.logp_M - terms.old_logp_M
        kl_N = algorithm.kl(terms.logp_M, terms.reference_logp_M, log_ratio_N).numpy()
    return Pass(
        title=title,
        logp=terms.logp_M.numpy(),
        ratio=algorithm.log_ratio(terms).exp().numpy(),
        kl=kl_N,
        loss=algorithm.loss(terms).numpy(),
        gradient=gradient_N.numpy(),
        clipped=algorithm.cut(terms).numpy(),
        total=total,
    )


# ---------------------------------------------------------------- a recorded group


def work_of_run(
    path: str,
    step: int | None = None,
    *,
    rewards: Sequence[float | None] | None = None,
    lengths: Sequence[int] | None = None,
    preset: str | None = None,
    mu: int | None = None,
    beta: float | None = None,
    lr: float | None = None,
) -> tuple[str, WorkedExample]:
    """Work the first group of a recorded step whose rewards differ through, and say which it is.

    Rewards, lengths, log-probs, advantages and weights are those that the run recorded.  `preset`
    and `beta` take another algorithm to the same completions.  With `rewards`, `lengths`, `mu` or
    `lr` a step is made up with the run's algorithm, see `work`; the rewards are the group's unless
    they are given.

    step: default the newest.   Raises ConfigError, DataError.
    """
    origin = run_of(path, "; groupwise explain --preset NAME works a made-up step through")
    demand_trust(origin, ("objective", "group"))
    recipe = origin.recipe
    if preset is None and not is_online(recipe.objective):
        raise ConfigError(
            f"{path} was trained by {recipe.objective!r}, which has no rollouts: groupwise explain"
            " --preset NAME"
        )
    objective, settings = recipe.objective, recipe.group
    if preset is not None:
        objective, settings = preset, GroupSettings(group_size=recipe.group.group_size)
    about = f"{origin.folder}: {recipe.objective}"
    toy: dict[str, Any] = {
        "preset": objective,
        "mu": recipe.group.updates_per_rollout,
        "beta": beta,
        "longest": max(LONGEST, recipe.rollout.max_new_tokens),
        "group": settings,
    }
    if mu is not None:
        toy["mu"] = mu
    if lr is not None:
        toy["lr"] = lr
    if rewards is not None:
        return f"{about}\n{MADE_UP}", work(rewards, lengths, **toy)
    steps = list_rollouts(origin.folder)
    if not steps:
        raise ConfigError(f"{origin.folder} has recorded no rollouts: give --rewards")
    if step is None:
        step = steps[-1]
    recorded = read_step(origin.folder, step)
    differing = [i for i, group in enumerate(recorded.groups) if not group.equal_rewards]
    place = (differing or [0])[0]
    group = recorded.groups[place]
    about += f", the group of {group.prompt.place} in step {step}"
    if len(group.rollouts) > COMPLETIONS:
        about += f", its first {COMPLETIONS} completions"
    about += f" (recorded are steps {steps[0]} to {steps[-1]}"
    if not differing:
        about += "; all groups have equal rewards"
    about += ")"
    if lengths is not None or mu is not None or lr is not None:
        shown = _rewards(group)[:COMPLETIONS]
        return f"{about}\n{MADE_UP}", work(shown, lengths, **toy)
    if beta is not None:
        settings = replace(settings, beta=beta)
    changed = preset is not None or beta is not None
    recipe = replace(recipe, objective=objective, group=settings)
    example = _as_recorded(recipe, recorded, place, changed=changed)
    return about, replace(example, pieces=_pieces(origin.folder))


def _rewards(group: RolloutGroup) -> list[float | None]:
    """Return the reward of each completion, None where there is none."""
    rewards: list[float | None] = []
    for reward in group.reward:
        rewards.append(None if np.isnan(reward) else float(reward))
    return rewards


def _as_recorded(recipe: Recipe, recorded: Step, place: int, *, changed: bool) -> WorkedExample:
    """Work a recorded group through.

    changed: True if the recipe is not the run's, whose advantages are then computed again.
    """
    # This imports transformers, which an example without a run does not need.
    from groupwise.runs.prepared import algorithm_of

    algorithm = algorithm_of(recipe)
    _check_explainable(algorithm)
    group = recorded.groups[place]
    for name, words in _signals_of(algorithm):
        if name not in group.signals:
            raise ConfigError(
                f"{algorithm.name} reads {words}, which the run did not record: leave --preset"
                " and --beta out, or make a step up by groupwise explain --preset NAME"
            )
    advantages = list(recorded.advantages)
    if changed or len(advantages) != len(recorded.groups):
        advantages = list(algorithm.advantages(recorded.groups))
    first = _of_group(recorded.current_logp, place)
    samples = []
    for part in minibatches(recorded.groups, recipe.group):
        groups = [recorded.groups[i] for i in part]
        for sample in weigh(groups, [advantages[i] for i in part], algorithm):
            here = sample.group == group.prompt.id and sample.index < COMPLETIONS
            if here and first[sample.index].size == sample.completion.size:
                samples.append(sample)
    passes = []
    if samples:
        logp = [first[sample.index] for sample in samples]
        passes.append(_pass(algorithm, samples, logp, "The step's first update, as recorded"))
    last = _of_group(recorded.columns.get("last_logp", ()), place)
    if samples and last and recipe.group.updates_per_rollout > 1:
        logp = [last[sample.index] for sample in samples]
        passes.append(_pass(algorithm, samples, logp, "The step's last update, as recorded"))
    return WorkedExample(
        algorithm=algorithm,
        group=_first_completions(group),
        advantages=list(advantages[place])[:COMPLETIONS],
        samples=samples,
        passes=tuple(passes),
        recorded=True,
    )


def _of_group(columns: Sequence[Sequence[np.ndarray]], place: int) -> Sequence[np.ndarray]:
    """Return a group's column, and none where the step has none."""
    if len(columns) <= place:
        return ()
    return columns[place]


def _signals_of(algorithm: Algorithm) -> list[tuple[str, str]]:
    """List the signals that an algorithm reads beside the tokens, and their names in a message."""
    signals = []
    if algorithm.needs.reference:
        signals.append(("reference_logp", "log-probs of the reference"))
    if algorithm.needs.critic:
        signals.append(("value", "a critic's values"))
    if algorithm.needs.teacher_logp:
        signals.append(("teacher_logp", "log-probs of the teacher"))
    return signals


def _first_completions(group: RolloutGroup) -> RolloutGroup:
    signals = {name: tuple(columns[:COMPLETIONS]) for name, columns in group.signals.items()}
    return replace(
        group,
        rollouts=group.rollouts[:COMPLETIONS],
        rewards=group.rewards[:COMPLETIONS],
        reward=group.reward[:COMPLETIONS],
        signals=signals,
        extra={},
    )


def _pieces(folder: Path) -> vocabulary.Vocabulary | None:
    run = RunFiles(folder)
    if not run.has(TOKENS):
        return None
    return vocabulary.from_table(bounded_table(run.read(TOKENS)))


# ---------------------------------------------------------------- as text


def render(example: WorkedExample) -> str:
    """Write a worked example as plain text."""
    algorithm = example.algorithm
    lines = [*_head(algorithm), *_left_out(algorithm), "", "1. Rewards of one group"]
    if example.recorded:
        lines += _texts(example)
    weights = {sample.index: float(sample.weight.max()) for sample in example.samples}
    rewards, tokens, weight = [], [], []
    for reward, rollout in zip(example.group.reward, example.group.rollouts, strict=True):
        rewards.append("None" if np.isnan(reward) else f"{reward:g}")
        tokens.append(str(len(rollout)))
        weight.append(f"{weights.get(rollout.index, 0.0):.4f}")
    lines += [
        _row("reward", rewards),
        _row("tokens", tokens),
        "",
        f"2. Advantages: {describe(algorithm.credit)}",
        *_advantage_rows(example),
        "",
        f"3. Weight of each token: {describe(algorithm.weights)}",
        _row("weight", weight),
    ]
    for number, seen in enumerate(example.passes, 1):
        lines += ["", f"{number + 3}. {seen.title}"]
        if number == 1:
            lines.append("  (old, l: log-prob when it was sampled, and now; A: advantage)")
        lines += [*_token_rows(example, seen), *_sums(example, seen)]
    if not example.passes:
        lines += ["", "Nothing is left to train."]
    return "\n".join(lines)


def _head(algorithm: Algorithm) -> list[str]:
    """Name the algorithm, its parts and its equation.

    A row made of another one, with a part changed, still has the other one's equation, which is
    then left out.
    """
    line = f"  {' x '.join(map(describe, _parts(algorithm)))}"
    rows = [row for row in ALGORITHMS.values() if row.equation == algorithm.equation]
    if rows and _names(algorithm) not in map(_names, rows):
        return [f"{algorithm.name}: {rows[0].name} with other parts", line]
    equation = f"  loss = {algorithm.equation}"
    if algorithm.paper:
        equation += f"  (arXiv {algorithm.paper})"
    return [f"{algorithm.name}: {algorithm.summary}", line, equation]


def _parts(algorithm: Algorithm) -> tuple[Callable[..., Any], ...]:
    return algorithm.credit, algorithm.ratio, algorithm.surrogate, algorithm.weights


def _names(algorithm: Algorithm) -> list[str]:
    return list(map(name_of, _parts(algorithm)))


def _left_out(algorithm: Algorithm) -> list[str]:
    """Name the terms of a row's loss that stand in no table."""
    terms = [describe(term) for term in algorithm.extra if not is_built_in(term)]
    if not terms:
        return []
    return [f"  left out: {', '.join(terms)}, which the run adds to this loss"]


def _texts(example: WorkedExample) -> list[str]:
    """Show the prompt and the completions of a recorded group."""
    prompt = example.group.rollouts[0].prompt_text.strip()
    lines = [f"  prompt      {_line(prompt, end=True)}"]
    for rollout in example.group.rollouts:
        lines.append(f"  {rollout.index + 1:>10}  {_line(rollout.text)}")
    return lines


def _line(text: str, *, end: bool = False) -> str:
    """Show the beginning, or the end, of a text on one line."""
    text = escaped(" ".join(text.split()))
    if len(text) <= TEXT:
        return text
    if end:
        return f"... {text[-TEXT:]}"
    return f"{text[:TEXT]} ..."


def _row(label: str, cells: Sequence[str]) -> str:
    return f"  {label:<22}{_cells(cells)}"


def _cells(texts: Iterable[str]) -> str:
    """Write texts as columns of a table."""
    return "".join(f"{text:>10}" for text in texts)


def _number(value: float) -> str:
    return f"{value + 0.0:+.4f}" if abs(value) >= 5e-5 else "0"


def _advantage_rows(example: WorkedExample) -> list[str]:
    """Show a number for each completion, or where its tokens differ the first."""
    credit = example.algorithm.credit
    rows = [_row("advantage", _advantages(example.advantages))]
    alone = example.algorithm.advantages([example.group])[0]
    of_group = all(map(np.allclose, alone, example.advantages))
    if options(credit).get("ddof") == 1 and of_group:
        by_g = with_options(credit, {"ddof": 0, "eps": 0.0})
        rows.append(_row("with ddof 0, eps 0", _advantages(by_g([example.group])[0])))
    if any(advantage.size and np.ptp(advantage) > 0 for advantage in example.advantages):
        rows.append("  (.. = the first token's; those of later tokens differ and stand below)")
    return rows


def _advantages(advantages: Sequence[np.ndarray]) -> list[str]:
    cells = []
    for advantage in advantages:
        if not advantage.size:
            cells.append("-")
        elif np.ptp(advantage) == 0:
            cells.append(_number(advantage[0]))
        else:
            cells.append(f"{_number(advantage[0])}..")
    return cells


def _token_rows(example: WorkedExample, seen: Pass) -> list[str]:
    """Write a row for each token of a pass; of a run, for the first tokens of each completion."""
    columns = {
        "old": example.column("behavior_logp"),
        "l": seen.logp,
        "ratio": seen.ratio,
        "A": example.column("advantage"),
    }
    if seen.kl is not None:
        columns["KL"] = seen.kl
    columns |= {
        "loss": seen.loss,
        "weight": example.column("weight"),
        "dloss/dl": seen.gradient,
    }
    lines = [f"  completion token{_cells(columns)}"]
    row = 0
    for sample in example.samples:
        trained = np.flatnonzero(sample.weight)
        shown = trained
        if example.recorded:
            shown = trained[:TOKENS_SHOWN]
        for n, token in enumerate(shown, row):
            cells = _cells(_number(column[n]) for column in columns.values())
            text = _token_text(example, sample, int(token))
            if seen.clipped[n]:
                text += "  clipped"
            lines.append(f"  {sample.index + 1:>10} {token + 1:>5}{cells}{text}")
        if trained.size > shown.size:
            lines.append(f"  {'':>10}   ... {trained.size - shown.size} more")
        row += trained.size
    return lines


def _token_text(example: WorkedExample, sample: Sample, place: int) -> str:
    if example.pieces is None:
        return ""
    texts = example.pieces.texts(sample.completion[: place + 1].tolist())
    return f"  {texts[place]!r}"


def _sums(example: WorkedExample, seen: Pass) -> list[str]:
    """Add a pass up: the loss, and shares of clipped tokens."""
    logp_N, advantage_N = torch.from_numpy(seen.logp), torch.from_numpy(example.column("advantage"))
    log_ratio_N, clipped_N = torch.from_numpy(np.log(seen.ratio)), torch.from_numpy(seen.clipped)
    figures = diagnostics.ratio(log_ratio_N, clipped_N)
    figures |= diagnostics.progress(logp_N, advantage_N)
    shown = []
    for name in ("clip/low", "clip/high", "progress"):
        if name in figures:
            shown.append(f"{name} {figures[name]:.4f}")
    loss = "loss = sum(weight x loss)"
    if example.recorded:
        loss = "these completions' part of the loss = sum(weight x loss)"
    lines = [f"  {loss} = {_number(seen.total)};  {', '.join(shown)}"]
    if "progress" in figures and seen is example.passes[0]:
        lines.append("  (progress: mean of A x l, which the update raises; no share of anything)")
    return lines
