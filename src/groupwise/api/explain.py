"""One step worked through in numbers: rewards -> advantages -> weights -> ratios -> loss ->
gradient, by what training calls.

No formula stands here: credit, weights, ratio level, surrogate and KL are the ones that training
calls.  What is made up is the
policy: every token has one of its own, one number z with p = sigmoid(z), so that a gradient step
    moves its log-prob and nothing else, and can be followed by hand.  So are the completions, where
    none of a run's fit into a table.

M trained tokens, one completion after the other   K reward functions (here 1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from groupwise.algorithms import diagnostics
from groupwise.algorithms.parts import describe, is_built_in, name_of, options, with_options
from groupwise.algorithms.table import ALGORITHMS, Algorithm
from groupwise.config.resolve import resolve
from groupwise.config.settings import DATASET, GroupSettings, is_online
from groupwise.errors import ConfigError
from groupwise.records import Finish, Prompt, Rollout, RolloutGroup, Sample, Sampling
from groupwise.runs.folder import run_of
from groupwise.runs.recorded import list_rollouts, read_step
from groupwise.runs.trust import demand_trust
from groupwise.training.closed_form import RecordedLoss
from groupwise.training.samples import weigh
from groupwise.utils.spelling import counted

PROBABILITIES = (0.5, 0.8, 0.6, 0.9, 0.3, 0.7)
"""What the policy that sampled gave to the first token, the second, ... of all completions; then
again from the first.
"""
REFERENCE = (0.55, 0.7, 0.6, 0.9, 0.4, 0.65)
"""The same under the reference."""
VALUES = (0.4, 0.5, 0.6, 0.5, 0.3, 0.2)
"""What a critic said of the first token, the second, ...; then again from the first."""
EOS = 0
SURE = 16.0
"""The z of a token that was sampled with certainty: one of infinity could not be moved."""
MOST_PASSES = 100
"""More than anyone reads."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pass:
    """One visit of all tokens; every column is (M,)."""

    logp: np.ndarray
    """Under the policy as it is now."""
    ratio: np.ndarray
    """To the policy that sampled, at the algorithm's level."""
    kl: np.ndarray | None
    """To the reference; None without a KL in the loss."""
    loss: np.ndarray
    """Before the weight."""
    gradient: np.ndarray
    """Of the step's loss, with respect to each log-prob."""
    clipped: np.ndarray
    """bool: it has an advantage, and the surrogate cuts its gradient."""
    total: float
    """The step's loss: sum(weight x loss)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WorkedExample:
    """A step worked through."""

    algorithm: Algorithm
    group: RolloutGroup
    advantages: list[np.ndarray]
    samples: list[Sample]
    """Of every completion that has tokens to train, weights final."""
    passes: tuple[Pass, ...]
    lr: float

    def column(self, name: str) -> np.ndarray:
        """A column of the samples over all M tokens: `weight`, `advantage`, `behavior_logp`."""
        return np.concatenate([getattr(sample, name) for sample in self.samples])


def work(
    rewards: Sequence[float | None] | None = None,
    lengths: Sequence[int] | None = None,
    *,
    preset: str | None = None,
    mu: int | None = None,
    beta: float | None = None,
    lr: float = 5.0,
    longest: int = 8,
    group: GroupSettings | None = None,
) -> WorkedExample:
    """Work a step of `preset` (default grpo) through, on one group.

    rewards: one per completion, None = unscorable; default 1, 0, 0.5.   lengths: tokens of each,
        EOS included; default 2, 3, 4 and so on in turn.   mu: passes over the rollout (default 2),
        each with a gradient step of size `lr` on the toy policy.
    beta: weight of the KL.
    longest: what Dr. GRPO divides by.   group: further settings of the algorithm, of which `mu`,
        `beta` and the rewards take precedence.   Raises ConfigError for what the algorithm refuses,
        and for lengths that do not fit.
    """
    rewards = (1.0, 0.0, 0.5) if rewards is None else rewards
    preset, mu = "grpo" if preset is None else preset, 2 if mu is None else mu
    sizes = tuple(lengths) if lengths is not None else tuple(2 + i % 3 for i in range(len(rewards)))
    if len(sizes) != len(rewards) or not all(1 <= n <= longest for n in sizes):
        raise ConfigError(
            f"{len(rewards)} rewards need as many lengths, each 1 to {longest}, got"
            f" {', '.join(map(str, sizes))}"
        )
    if not 1 <= mu <= MOST_PASSES:
        raise ConfigError(f"mu must be at least 1 and at most {MOST_PASSES}, got {mu}")
    if not 0 < lr < np.inf:
        raise ConfigError(f"lr must be a finite number greater than 0, got {lr:g}")
    if beta is not None and not beta >= 0:
        raise ConfigError(f"beta must be at least 0, got {beta:g}")
    if any(reward is not None and not np.isfinite(reward) for reward in rewards):
        raise ConfigError(
            f"a reward is a finite number or none, got {', '.join(map(str, rewards))}"
        )
    known = group or GroupSettings()
    settings = replace(
        known,
        group_size=len(rewards),
        updates_per_rollout=mu,
        minibatches=1,
        beta=known.beta if beta is None else beta,
    )
    if preset in DATASET:
        raise ConfigError(
            f"{preset!r} learns from a data set; explain is for what samples completions: grpo,"
            " dapo, rloo ..."
        )
    algorithm = resolve(preset, settings, longest)
    if algorithm.needs_forking:
        raise ConfigError(
            "group.entropy_quantile asks for entropies, which a made-up policy does not have:"
            " explain --preset NAME"
        )
    if algorithm.divergence is not None:
        raise ConfigError(
            f"{preset!r} learns from whole distributions, which do not fit a table of tokens:"
            " explain distill_sampled"
        )
    return _worked(algorithm, _group(rewards, sizes, longest), None, mu, lr)


def _worked(
    algorithm: Algorithm,
    group: RolloutGroup,
    advantages: list[np.ndarray] | None,
    mu: int,
    lr: float,
) -> WorkedExample:
    """advantages: as a run gave them; None: those of this group alone."""
    per_token = algorithm.advantages([group])[0] if advantages is None else advantages
    samples = weigh([group], [per_token], algorithm)
    return WorkedExample(
        algorithm=algorithm,
        group=group,
        advantages=per_token,
        samples=samples,
        passes=_passes(algorithm, samples, mu, lr),
        lr=lr,
    )


SHOWN, LONGEST = 8, 8
"""Completions of a recorded group that are worked through, and tokens of the longest that a table
has room for.
"""


def work_of_run(
    path: str,
    step: int | None = None,
    *,
    rewards: Sequence[float | None] | None = None,
    lengths: Sequence[int] | None = None,
    preset: str | None = None,
    mu: int | None = None,
    beta: float | None = None,
    lr: float = 5.0,
) -> tuple[str, WorkedExample]:
    """The same with a run's algorithm, on the first group of a recorded step whose rewards differ;
    and what of it was recorded.

    What is given takes the place of the run's.  step: default the newest.  A group that fits into a
    table is worked through as it was recorded, with its log-probs, what reference, critic and
    teacher said, and its advantages; of any other only the rewards are the run's.   Raises
    ConfigError, DataError.
    """
    origin = run_of(path, "; groupwise explain --preset NAME works a made-up step through")
    demand_trust(origin, ("objective", "group"))
    recipe = origin.recipe
    if preset is None and not is_online(recipe.objective):
        raise ConfigError(
            f"{path} was trained by {recipe.objective!r}, which has no rollouts: groupwise explain"
            " --preset NAME"
        )
    says, mu = f"{origin.folder}: {recipe.objective}", mu or recipe.group.updates_per_rollout
    settings = recipe.group if preset is None else None
    chosen, recorded = None, None
    if rewards is None:
        steps = list_rollouts(origin.folder)
        if not steps:
            raise ConfigError(f"{origin.folder} has recorded no rollouts: give --rewards")
        recorded = read_step(origin.folder, steps[-1] if step is None else step)
        place = next((i for i, group in enumerate(recorded.groups) if not group.equal_rewards), 0)
        chosen = recorded.groups[place]
        rewards = [None if np.isnan(reward) else float(reward) for reward in chosen.reward[:SHOWN]]
        cut = f", its first {SHOWN} completions" if len(chosen.reward) > SHOWN else ""
        dead = "; all groups have equal rewards" if chosen.equal_rewards else ""
        says += f", the group of {chosen.prompt.place} in step {recorded.number}{cut}"
        says += f" (recorded are steps {steps[0]} to {steps[-1]}{dead})"
        if lengths is None and max(len(rollout) for rollout in chosen.rollouts[:SHOWN]) <= LONGEST:
            lengths = [len(rollout) for rollout in chosen.rollouts[:SHOWN]]
    example = work(
        rewards, lengths, preset=preset or recipe.objective, mu=mu, beta=beta, lr=lr,
        longest=LONGEST if chosen is None else max(LONGEST, recipe.rollout.max_new_tokens), group=settings,
    )  # fmt: skip
    if chosen is None or recorded is None:
        return says, example
    shown = chosen.rollouts[:SHOWN]
    whole = all(
        rollout.episode is None and rollout.trained.all() for rollout in shown
    )  # of an episode a part is the policy's
    fits = whole and lengths == [len(rollout) for rollout in shown]
    if fits and all(name in chosen.signals for name in _signals_of(example.algorithm)):
        as_it_was = preset is None and beta is None and len(recorded.advantages) > place
        advantages = list(recorded.advantages[place])[:SHOWN] if as_it_was else None
        known = ["log-probs", *_signals_of(example.algorithm).values()] + ["advantages"] * as_it_was
        alone = "" if as_it_was else "; advantages are those of this group alone"
        says += (
            f"\nAs recorded: rewards, {', '.join(known)}{alone}; weights and loss are those of"
            " these completions alone"
        )
        return says, _worked(example.algorithm, _cut(chosen), advantages, mu, lr)
    made_up = [
        "log-probs",
        *(["lengths"] if not fits else []),
        *_signals_of(example.algorithm).values(),
    ]
    return (
        f"{says}\nMade up: {', '.join(made_up)}; advantages are those of this group alone",
        example,
    )


def _signals_of(algorithm: Algorithm) -> dict[str, str]:
    """Columns that an algorithm reads beside the tokens, and their names in a message."""
    columns = (
        (algorithm.needs_reference, "reference_logp", "those of the reference"),
        (algorithm.needs_value, "value", "the critic's values"),
        (algorithm.reads_teacher, "teacher_logp", "those of the teacher"),
    )
    return {column: name for needed, column, name in columns if needed}


def _cut(group: RolloutGroup) -> RolloutGroup:
    """Its first completions."""
    signals = {name: tuple(columns[:SHOWN]) for name, columns in group.signals.items()}
    rollouts, rewards, reward = group.rollouts[:SHOWN], group.rewards[:SHOWN], group.reward[:SHOWN]
    return replace(
        group, rollouts=rollouts, rewards=rewards, reward=reward, signals=signals, extra={}
    )


def _group(rewards: Sequence[float | None], lengths: Sequence[int], longest: int) -> RolloutGroup:
    prompt = Prompt(id="example", tokens=np.array([1, 2]), text="")
    rollouts, references, values, begin = [], [], [], 0
    for index, n in enumerate(lengths):
        tokens = np.arange(1, n + 1)
        tokens[-1] = EOS
        places = range(begin, begin := begin + n)
        rollouts.append(
            Rollout(
                prompt=prompt,
                index=index,
                tokens=tokens,
                behavior_logp=np.log(
                    [PROBABILITIES[place % len(PROBABILITIES)] for place in places]
                ),
                finish=Finish.EOS,
                eos_ids=(EOS,),
                sampling=Sampling(max_new_tokens=longest),
                text="",
            )
        )
        references.append(np.log([REFERENCE[place % len(REFERENCE)] for place in places]))
        values.append(np.array([VALUES[place % len(VALUES)] for place in places]))
    reward = np.array([np.nan if r is None else r for r in rewards], dtype=np.float64)
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


def _passes(
    algorithm: Algorithm, samples: Sequence[Sample], mu: int, lr: float
) -> tuple[Pass, ...]:
    """Visits of all tokens.  Further terms of a row's loss are left out."""
    algorithm = replace(algorithm, extra=())
    if not samples:
        return ()
    old_M = torch.from_numpy(np.concatenate([sample.behavior_logp for sample in samples])).double()
    z_M = torch.logit(old_M.exp()).clamp(max=SURE)
    passes = []
    for _ in range(mu):
        logp_M = logsigmoid(z_M)
        logp = [
            column.numpy() for column in logp_M.split([sample.weight.size for sample in samples])
        ]
        recorded = RecordedLoss(algorithm, samples, logp)
        total, gradient_M = recorded.gradient()
        terms, weight_M = recorded.terms, recorded.column([sample.weight for sample in samples])
        reference_M = terms.reference_logp_M if algorithm.loss_beta else None
        kl_M = None if reference_M is None else algorithm.kl(logp_M, reference_M, logp_M - old_M)
        passes.append(
            Pass(
                logp=logp_M.numpy(),
                ratio=algorithm.log_ratio(terms).exp().numpy(),
                kl=None if kl_M is None else kl_M.numpy(),
                loss=algorithm.loss(terms).numpy(),
                gradient=gradient_M.numpy(),
                clipped=(algorithm.cut(terms) & (weight_M != 0)).numpy(),
                total=total,
            )
        )
        z_M = z_M - lr * gradient_M * (1 - logp_M.exp())  # d log sigmoid(z) / dz = 1 - p
    return tuple(passes)


# ---------------------------------------------------------------- as text


def render(example: WorkedExample) -> str:
    """A worked example as plain text."""
    algorithm = example.algorithm
    lines = [
        *_head(algorithm),
        *_left_out(algorithm),
        "",
        "1. Rewards of one group",
        _row("reward", ["None" if np.isnan(r) else f"{r:g}" for r in example.group.reward]),
        _row("tokens", [str(len(rollout)) for rollout in example.group.rollouts]),
        "",
        f"2. Advantages: {describe(algorithm.credit)}",
        *_advantage_rows(example),
        "",
        f"3. Weight of each token: {describe(algorithm.weights)}",
        _row("weight", _weights(example)),
    ]
    for number, seen in enumerate(example.passes, 1):
        lines += ["", *_pass(example, number, seen)]
    if not example.passes:
        lines += ["", "Nothing is left to train."]
    return "\n".join(lines)


def _head(algorithm: Algorithm) -> list[str]:
    """Name, parts and equation.  A row made of another one, with a part changed, still has the
    other one's equation.
    """
    parts, equation = (
        _parts(algorithm),
        f"  loss = {algorithm.equation}"
        + (f"  (arXiv {algorithm.paper})" if algorithm.paper else ""),
    )
    names, rows = (
        list(map(name_of, parts)),
        [row for row in ALGORITHMS.values() if row.equation == algorithm.equation],
    )
    line = f"  {' x '.join(map(describe, parts))}"
    if not rows or names in [list(map(name_of, _parts(row))) for row in rows]:
        return [f"{algorithm.name}: {algorithm.summary}", line, equation]
    return [f"{algorithm.name}: {rows[0].name} with other parts", line]


def _parts(algorithm: Algorithm) -> tuple[Callable[..., Any], ...]:
    return algorithm.credit, algorithm.ratio, algorithm.surrogate, algorithm.weights


def _left_out(algorithm: Algorithm) -> list[str]:
    """What of a row's loss stands in no table: terms of one's own."""
    terms = [describe(term) for term in algorithm.extra if not is_built_in(term)]
    return [f"  left out: {', '.join(terms)}, which the run adds to this loss"] if terms else []


def _row(label: str, cells: Sequence[str]) -> str:
    return f"  {label:<22}" + "".join(f"{cell:>10}" for cell in cells)


def _number(value: float) -> str:
    return f"{value + 0.0:+.4f}" if abs(value) >= 5e-5 else "0"


def _advantage_rows(example: WorkedExample) -> list[str]:
    """One number per completion, or where its tokens differ the first and the last."""

    def shown(advantages: Sequence[np.ndarray]) -> list[str]:
        return [_number(a[0]) if np.ptp(a) == 0 else f"{_number(a[0])}.." for a in advantages]

    rows = [_row("advantage", shown(example.advantages))]
    known = options(example.algorithm.credit)
    alone = example.algorithm.advantages([example.group])[0]
    if known.get("ddof") == 1 and all(
        map(np.allclose, alone, example.advantages)
    ):  # otherwise they are those of a whole rollout
        other = with_options(example.algorithm.credit, {"ddof": 0, "eps": 0.0})
        rows.append(_row("with ddof 0, eps 0", shown(other([example.group])[0])))
    if any(np.ptp(a) > 0 for a in example.advantages):
        rows.append("  (.. = the first token's; those of later tokens differ and stand below)")
    return rows


def _weights(example: WorkedExample) -> list[str]:
    weights = {id(sample.completion): float(sample.weight.max()) for sample in example.samples}
    return [f"{weights.get(id(rollout.tokens), 0.0):.4f}" for rollout in example.group.rollouts]


def _pass(example: WorkedExample, number: int, seen: Pass) -> list[str]:
    weight, advantage, old = (
        example.column(name) for name in ("weight", "advantage", "behavior_logp")
    )
    first = "the policy is still the one that sampled: every ratio is 1"
    moved = f"after {counted(number - 1, 'gradient step')} of size {example.lr:g}"
    names = [
        "old",
        "l",
        "ratio",
        "A",
        *(["KL"] if seen.kl is not None else []),
        "loss",
        "weight",
        "dloss/dl",
    ]
    lines = [
        f"{number + 3}. Pass {number}: {first if number == 1 else moved}",
        *(
            ["  (old, l: log-prob when it was sampled, and now; A: advantage)"]
            if number == 1
            else []
        ),
        "  completion token" + "".join(f"{name:>10}" for name in names),
    ]
    owners = [(i, t) for i, sample in enumerate(example.samples) for t in range(sample.weight.size)]
    places = {id(rollout.tokens): rollout.index + 1 for rollout in example.group.rollouts}
    for m, (i, t) in enumerate(owners):
        values = [old[m], seen.logp[m], seen.ratio[m], advantage[m]]
        values += [] if seen.kl is None else [seen.kl[m]]
        values += [seen.loss[m], weight[m], seen.gradient[m]]
        cells = "".join(f"{_number(value):>10}" for value in values)
        lines.append(
            f"  {places[id(example.samples[i].completion)]:>10} {t + 1:>5}{cells}"
            + ("  clipped" if seen.clipped[m] else "")
        )
    advantage_M = torch.from_numpy(advantage)
    figures = diagnostics.ratio(
        torch.from_numpy(np.log(seen.ratio)), torch.from_numpy(seen.clipped)
    )
    figures |= diagnostics.progress(torch.from_numpy(seen.logp), advantage_M)
    shown = [
        f"{name} {figures[name]:.4f}"
        for name in ("clip/low", "clip/high", "progress")
        if name in figures
    ]
    lines.append(f"  loss = sum(weight x loss) = {_number(seen.total)};  " + ", ".join(shown))
    return lines
