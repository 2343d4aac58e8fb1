"""`groupwise check`: are sampled and scored log-probs equal?  A minute of real sampling and scoring
before hours of it.

Every check looks at the user's own model, tokenizer, data and rewards, reports a result, and what
to do if it is wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from groupwise.config.settings import VERDICTS, Recipe, is_online, positions_of
from groupwise.data.encoding import visit
from groupwise.data.order import Order
from groupwise.data.templates import Template
from groupwise.data.turns import Turns
from groupwise.environments.procedural import rows_of
from groupwise.environments.runtime import EnvironmentBroken
from groupwise.environments.schemas import name_of
from groupwise.environments.tool_episodes import ToolWorld
from groupwise.errors import ConfigError, DataError, GroupwiseError
from groupwise.models.loading import embedding_rows
from groupwise.models.policy import Policy
from groupwise.proof.passes import model_pass
from groupwise.records import Finish, Prompt, Rollout, RolloutGroup, Sampling
from groupwise.rewards.accuracy import as_text, check_gold
from groupwise.rewards.compose import Rewards, prompt_of
from groupwise.runs.inputs import resolved
from groupwise.runs.job import Job, make_job
from groupwise.runs.policies import fit_threads
from groupwise.runs.prepared import sampling_of
from groupwise.training.mismatch import diagnose
from groupwise.training.passes import score
from groupwise.training.samples import sample_of, unbranched
from groupwise.utils.spelling import counted

PROMPTS, COMPLETIONS, TOKENS = 8, 4, 96
"""Size of the sample that is looked at: first prompts that training draws, completions of each,
longest completion in tokens.
"""
WHOLE = 4
"""Prompts that are completed up to the recipe's own length, where TOKENS say too little about
endings.
"""
FEW = 0.5
"""Share of completions that end, below which a recipe wastes most of what it samples."""
ENTRIES = 64
"""Of a procedural data set, whose scorers are looked at."""
GOLDS, PROBED = 64, 16
"""Rows whose gold answers are held against the rewards, and prompts that are given as their own
answers.
"""
TAIL = 40
"""Characters of a prompt's end that are shown."""
QUESTION: Mapping[str, Any] = {"prompt": [{"role": "user", "content": "1 + 1?"}]}
"""A row that stands for the prompts of an objective that learns from data."""
GAP = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of a log-prob, nats, that rounding explains, by the type in which products
run.
"""


Lines = Callable[[], AbstractContextManager[None]]
"""Adds to an error that is raised within where the recipe's file has its key."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    good: bool | None
    """None: nothing wrong, but something to know."""
    says: str


def check_stage(recipe: Recipe, lines: Lines = nullcontext) -> Iterator[Finding]:
    """The findings of one run.  An error that would stop the run becomes the last finding.

    lines: adds to an error where the recipe's file has its key.
    """
    try:
        try:
            recipe = resolved(recipe)
        except ConfigError as error:
            yield Finding("model", None, f"{error}; the later checks need it: run that stage first")
            return
        with lines():
            job = make_job(recipe)
        recipe, rewards = job.recipe, job.prepared.rewards
    except GroupwiseError as error:
        yield Finding("recipe", False, str(error))
        return
    threads = torch.get_num_threads()
    fit_threads(job.policy, recipe.threads)
    try:
        for label, text in job.plan:
            if label in ("read", "data", "in all", "memory", "warning"):
                yield Finding(label, None, text)
            elif label.startswith("proven"):
                yield Finding("model", True, f"{label}: {text}")
        yield from _tokenizer(job.policy)
        yield from _template(recipe, job)
        if job.engine is None or not is_online(recipe.objective):
            return
        yield from _procedural(recipe)
        assert rewards is not None
        if isinstance(job.prepared.world, ToolWorld):
            yield from _world(recipe, job.prepared.world, job.prompts)
        episodes = rewards.asks("environments", "environment_rewards")  # a gold answer has none
        if rewards.golds and not episodes:
            graded = {
                one.name or one.function for one in recipe.rewards if one.function in VERDICTS
            } | {rewards.verdict}
            yield from _golds(rewards, graded, job.prompts)
            yield from _restated(rewards, job.prompts)
        order = Order(len(job.prompts), recipe.seed, recipe.data.shuffle)
        yield from _samples(
            recipe,
            job,
            rewards,
            [visit(job.prompts[row], epoch) for epoch, row in order.take(PROMPTS)],
        )
    except GroupwiseError as error:
        kind = (
            ConfigError if isinstance(error, ConfigError) else type(error)
        )  # Problems are several of them
        yield Finding(kind.__name__, False, str(error))
    finally:
        job.close()
        torch.set_num_threads(threads)


def _tokenizer(policy: Policy) -> Iterator[Finding]:
    tokenizer = policy.tokenizer
    rows = embedding_rows(policy.model)
    names = ", ".join(
        f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in policy.eos_ids
    )
    yield Finding(
        "EOS",
        True,
        f"a completion ends with {names}; it is sampled, scored and trained like every other token",
    )
    pad = tokenizer.pad_token_id
    state = (
        "has no PAD"
        if pad is None
        else "uses EOS as PAD"
        if pad in policy.eos_ids
        else f"has PAD {pad}"
    )
    yield Finding("PAD", True, f"the tokenizer {state}: no difference, nothing is ever padded")
    if rows > policy.vocabulary:
        text = (
            f"{rows - policy.vocabulary} embedding rows belong to no token: they are never sampled"
            " and never scored"
        )
        yield Finding("vocabulary", None, text)


def _template(recipe: Recipe, job: Job) -> Iterator[Finding]:
    """What the chat template does to the first prompt once it is answered; nothing where prompts
    are strings.

    Where no prompts are drawn, a question stands for them.
    """
    data, policy = recipe.data, job.policy
    if (data.path is None and not data.chat) or not (data.chat or policy.tokenizer.chat_template):
        return
    template = Template.build(data, policy.tokenizer)
    if job.prompts:
        row, where = job.prompts[0].row, f"{job.prompts[0].place} and an answer"
    else:
        template, row, where = replace(template, format=None), QUESTION, "a question and an answer"
    if isinstance(template.content(row), str):
        return
    if data.chat_template_kwargs:
        yield _variables(template, row, where)
    several = recipe.environment.talks or recipe.environment.asks
    here = (
        "no difference here: the policy has one turn"
        if job.prompts
        else "`read` counts the rows for which this matters"
    )
    try:
        stable = template.is_stable(row, "The answer is 2.", where)
    except DataError as error:
        yield Finding("template", None, str(error) if several else f"{error}; {here}")
    else:
        yield _prefix(stable, None if several else here)
    yield _turns(policy)


def _variables(template: Template, row: Mapping[str, Any], where: str) -> Finding:
    """What the recipe's variables make of a prompt: where it becomes another, and how it ends."""
    try:
        (rendered,), (plain,) = (
            one.ask([one.read(row, where)]) for one in (template, replace(template, variables={}))
        )
    except DataError as error:
        return Finding("variables", False, str(error))
    names = ", ".join(f"{name}: {value!r}" for name, value in template.variables.items())
    if rendered.text == plain.text:
        return Finding("variables", None, f"{{{names}}}: the prompt is the same without")
    ends = f"the prompt ends in {rendered.text[-TAIL:]!r}, without in {plain.text[-TAIL:]!r}"
    return Finding(
        "variables",
        True,
        f"{{{names}}}:"
        f" {ends if rendered.text[-TAIL:] != plain.text[-TAIL:] else 'the prompt is another'}",
    )


def _prefix(stable: bool, harmless: str | None) -> Finding:
    """harmless: why it does not matter; None where conversations have several turns of the policy."""
    if stable:
        return Finding("template", True, "the prompt's ids begin the ids of the whole conversation")
    says = "the chat template writes a prompt otherwise once it is answered"
    if harmless is not None:
        return Finding("template", None, f"{says}; {harmless}")
    remedy = "use a template whose generation prompt is a prefix"
    return Finding(
        "template",
        False,
        f"{says}: several turns would be scored on other ids than were sampled; {remedy}",
    )


def _turns(policy: Policy) -> Finding:
    """What the template does to the past when a conversation continues."""
    try:
        proofs = Turns(tokenizer=policy.tokenizer, eos_ids=policy.eos_ids).prove()
    except DataError as error:
        return Finding("turns", None, f"a next turn cannot follow: {error}")
    rewriting = [proof for proof in proofs if proof.verdict == "rewrites"]
    cases = ", ".join(f"{proof.case}: {proof.verdict}" for proof in proofs)
    if all(proof.verdict == "refuses" for proof in proofs):
        return Finding(
            "turns", None, f"the template refuses every next turn behind a lone question ({cases})"
        )
    if not rewriting:
        return Finding("turns", True, f"a next turn leaves the past as it was sampled ({cases})")
    return Finding(
        "turns",
        None,
        f"the template writes the past otherwise once a conversation continues ({cases});"
        f" {rewriting[0]}",
    )


def _procedural(recipe: Recipe) -> Iterator[Finding]:
    """Can the scorers of a procedural data set be believed?"""
    settings = recipe.environment
    if settings.reasoning_gym is not None:
        _, health = rows_of(settings.reasoning_gym, settings.args, ENTRIES, recipe.seed)
        good = False if not health.believable else None if health.faults else True
        yield Finding("scorer", good, f"{settings.reasoning_gym}: {health}")


def _world(recipe: Recipe, world: ToolWorld, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """What the policy can do, and one episode in which it does next to nothing."""
    seconds = recipe.environment.tool_timeout
    for kind in world.runtime.kinds.values():
        name = kind.name or kind.title
        for schema in kind.schemas:
            names = ", ".join((schema["function"].get("parameters") or {}).get("properties") or ())
            yield Finding(
                "tool",
                True,
                f"{name_of(schema)}({names}):"
                f" {schema['function'].get('description') or 'no description'}",
            )
        if not kind.resets:
            continue
        prompt = next(
            (one for one in prompts if world.runtime.kind_of(one.row, one.place) == kind), None
        )
        if prompt is None:
            yield Finding("environment", None, f"{name}: no row asks for it")
            continue
        environment, began = world.runtime.make(kind), time.monotonic()
        try:
            greeting = environment.reset(prompt.row, seed=recipe.seed, seconds=seconds)
            says = (
                f"{name}: reset() says {greeting!r:.80}"
                if greeting
                else f"{name}: reset() says nothing"
            )
            if kind.steps:
                observation, reward, done = environment.step("", seconds=seconds)
                says += (
                    f"; to an empty turn it answers {observation!r:.80}, reward {reward}, done"
                    f" {done}"
                )
            reward, _ = environment.end(True, seconds=seconds)
            says += (
                f"; reward of an episode without actions: {reward}"
                if not kind.steps and kind.rewarded
                else ""
            )
            yield Finding("environment", True, f"{says} ({time.monotonic() - began:.2f} s)")
        except EnvironmentBroken as broken:
            yield Finding("environment", False, f"{name}: {broken}")
        finally:
            environment.kill()


def _golds(
    rewards: Rewards, graded: Collection[str | None], prompts: Sequence[Prompt]
) -> Iterator[Finding]:
    """Does the gold answer earn the reward it should?  In the forms in which models write answers.

    graded: the functions that give 1 to what is right; what others give is only shown.
    """
    for name, column in rewards.golds.items():
        held = [
            prompt
            for prompt in prompts
            if as_text(prompt.row.get(column)) or prompt.row.get(column) == ""
        ]
        looked = held[:GOLDS]
        if not looked:
            good = False if name in graded else None
            yield Finding(
                "gold", good, f"no row has an answer in the column {column!r}: {name} gives None"
            )
            continue
        earned = _earned(rewards, looked, [as_text(prompt.row[column]) for prompt in looked])[
            :, rewards.names.index(name)
        ]
        first = f"the gold answers of the first {counted(len(looked), 'prompt')} earn {name} ="
        without = (
            f"; {len(prompts) - len(held)} of {counted(len(prompts), 'row')} have none"
            if len(held) < len(prompts)
            else ""
        )
        if name not in graded:
            yield Finding("gold", None, f"{first} {_mean(earned)}{without}")
            continue
        missed = [prompt for prompt, value in zip(looked, earned, strict=True) if not value >= 1.0]
        says = f"{first} 1{without}"
        if missed:
            gold = as_text(missed[0].row[column])
            (problem,) = check_gold([gold]) if name == "accuracy" else [None]
            why = f" ({problem})" if problem else ""
            says = (
                f"{len(missed)} of {len(looked)} gold answers do not earn {name} = 1, the first in"
                f" row {missed[0].id}: {gold[:80]!r}{why}; no completion can be right there: look"
                " at `groupwise score` or drop these rows"
            )
        yield Finding("gold", not missed, says)


def _restated(rewards: Rewards, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """What the prompt itself would earn as a completion, and each half of the equation that ends
    the gold's derivation.
    """
    golds = rewards.golds
    probes: dict[str, list[tuple[Prompt, str]]] = {
        "the prompt itself": [],
        "the left half": [],
        "the right half": [],
    }
    for prompt in prompts[:PROBED]:
        question = prompt_of(prompt)
        probes["the prompt itself"].append(
            (prompt, question if isinstance(question, str) else str(question[-1].get("content")))
        )
        derivation = next(
            (text for column in golds.values() if (text := as_text(prompt.row.get(column)))), ""
        )
        for half, text in zip(
            ("the left half", "the right half"), halves(derivation), strict=False
        ):
            probes[half].append((prompt, text))
    says, paid = [], False
    for what, pairs in probes.items():
        if pairs:
            earned = _earned(rewards, [prompt for prompt, _ in pairs], [text for _, text in pairs])
            says.append(
                f"{what} earns "
                + ", ".join(
                    f"{name} {_mean(earned[:, rewards.names.index(name)])}" for name in golds
                )
            )
            paid |= what != "the right half" and any(
                (earned[:, rewards.names.index(name)] >= 1.0).any() for name in golds
            )
    of = "; of the gold's derivation " if len(says) > 1 else ""
    yield Finding(
        "restated", None if paid else True, f"as a completion {says[0]}{of}{', '.join(says[1:])}"
    )


def halves(derivation: str) -> tuple[str, ...]:
    """Both sides of the last equation of a worked solution; nothing where there is none.

    >>> halves("He has 48/2 = <<48/2=24>>24 left.\\n#### 24"), halves("24")
    (('48/2', '24'), ())
    """
    equations = re.findall(r"([^=<>\n]{1,200})=([^=<>\n]{1,200})", derivation)
    return tuple(side.strip(" .$") for side in equations[-1]) if equations else ()


def _earned(rewards: Rewards, prompts: Sequence[Prompt], texts: Sequence[str]) -> np.ndarray:
    """(N, K): the best that each text earns in the forms in which models write answers; NaN where
    it is not judged.
    """
    best = np.full((len(prompts), len(rewards.names)), np.nan)
    for form in ("{}", "\\boxed{{{}}}", "#### {}"):
        groups = [
            (_written(prompt, form.format(text)),)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        best = np.fmax(best, [group.rewards[0] for group in rewards.score(groups)])
    return best


def _mean(values: np.ndarray) -> str:
    return "None" if np.isnan(values).all() else f"{np.nanmean(values):.2g}"


def _written(prompt: Prompt, text: str) -> Rollout:
    """A completion that was never sampled, for the reward functions to look at."""
    nothing = np.zeros(0, dtype=np.int64)
    return Rollout(
        prompt=prompt,
        index=0,
        tokens=nothing,
        behavior_logp=np.zeros(0),
        finish=Finish.STOP,
        eos_ids=(),
        sampling=Sampling(),
        text=text,
    )  # fmt: skip


def _samples(
    recipe: Recipe, job: Job, rewards: Rewards, prompts: Sequence[Prompt]
) -> Iterator[Finding]:
    """Sample a little with the recipe's own settings, and score it in every way that must agree."""
    policy, engine = job.policy, job.engine
    assert engine is not None
    sampling = replace(
        sampling_of(recipe.rollout), max_new_tokens=min(recipe.rollout.max_new_tokens, TOKENS)
    )
    groups = list(
        engine.generate(prompts, group_size=COMPLETIONS, sampling=sampling, seed=recipe.seed)
    )
    rollouts = [rollout for group in groups for rollout in group]
    samples = [sample_of(rollout) for rollout in rollouts]
    max_tokens_per_microbatch = positions_of(job.recipe)
    scored = score(policy, samples, max_tokens_per_microbatch=max_tokens_per_microbatch).logp
    limit = GAP.get(torch.bfloat16 if policy.autocast else policy.dtype, 0.25)
    how = f"temperature {sampling.temperature:g}" + (
        ", over the truncated support" if sampling.truncates else ""
    )
    behavior = [sample.behavior_logp for sample in samples]
    agreed = _agree(
        "log-probs",
        behavior,
        scored,
        limit,
        f"sampled = scored at {how}",
        "the engine and the scorer",
    )
    if not agreed.good:
        agreed = replace(agreed, says=f"{agreed.says}; {diagnose(policy, rollouts, scored)}")
    yield agreed
    alone = [
        score(policy, [sample], max_tokens_per_microbatch=max_tokens_per_microbatch).logp[0]
        for sample in samples
    ]
    yield _agree(
        "batching",
        alone,
        scored,
        limit,
        "scores do not depend on what else is in the batch",
        "batched and single scores",
    )
    unshared = (
        score(
            replace(policy, attention="packed"),
            samples,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
        ).logp
        if policy.attention == "shared"
        else alone
    )
    yield _agree(
        "packing",
        unshared,
        scored,
        limit,
        "shared prompts = repeated prompts",
        "shared and repeated prompts",
    )
    own_pass = [_own_forward(policy, rollout) for rollout in rollouts[:PROMPTS]]
    yield _agree(
        "positions",
        own_pass,
        scored,
        limit,
        "= the model's own forward pass",
        "the packed and the model's own forward pass",
    )
    yield _endings(recipe, job, prompts, rollouts)
    yield from _spread(rewards.score(groups)) if rewards.names else ()


def _endings(
    recipe: Recipe, job: Job, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
) -> Finding:
    """How many completions end by themselves within the recipe's own length.

    A shorter sample that ends is enough; else a few prompts are completed up to that length.
    """
    length = recipe.rollout.max_new_tokens
    within = min(length, TOKENS)
    share = float(np.mean([not rollout.truncated for rollout in rollouts]))
    if within < length and share < FEW:
        assert job.engine is not None
        sampling = sampling_of(recipe.rollout)
        groups = list(
            job.engine.generate(prompts[:WHOLE], group_size=1, sampling=sampling, seed=recipe.seed)
        )
        rollouts, within = [rollout for group in groups for rollout in group], length
        share = float(np.mean([not rollout.truncated for rollout in rollouts]))
    says = f"{share:.0%} of {counted(len(rollouts), 'completion')} ended within {within} tokens"
    says += (
        " (rollout.max_new_tokens)"
        if within == length
        else f" (rollout.max_new_tokens is {length})"
    )
    if share == 0:
        return Finding(
            "endings", False, f"{says}: warm the model up with SFT, or raise rollout.max_new_tokens"
        )
    if share < FEW:
        return Finding(
            "endings",
            None,
            f"{says}: the others are truncated; raise rollout.max_new_tokens, or ask for shorter"
            " answers",
        )
    return Finding("endings", True, says)


def _agree(
    name: str,
    scored: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    limit: float,
    says: str,
    what: str,
) -> Finding:
    gaps = np.concatenate(
        [np.abs(a - b) for a, b in zip(scored, expected, strict=False)] or [np.zeros(1)]
    )
    gap = float(gaps.max(initial=0.0))
    if gap <= limit:
        return Finding(
            name,
            True,
            f"{says} (largest difference {gap:.1e} nats over {counted(gaps.size, 'token')})",
        )
    return Finding(
        name,
        False,
        f"{what} differ by up to {gap:.2g} nats, more than rounding ({limit:g}): do not train;"
        " report it",
    )


def _own_forward(policy: Policy, rollout: Rollout) -> np.ndarray:
    """Log-probs by the model's own pass in the distribution that was sampled; 0 where nothing is
    trained.
    """
    logp_N = np.zeros(len(rollout))
    if not len(rollout):  # an episode that failed before its first turn
        return logp_N
    samples = [sample_of(part) for part in unbranched(rollout)]
    values = model_pass(policy, samples, gradients=False).values
    logp_N[np.concatenate([sample.weight > 0 for sample in samples])] = np.concatenate(values)
    return logp_N


def _spread(groups: Sequence[RolloutGroup]) -> Iterator[Finding]:
    rewards = np.concatenate([group.reward for group in groups])
    dead = sum(group.equal_rewards for group in groups)
    if np.isnan(rewards).all():
        yield Finding(
            "rewards",
            False,
            "no completion can be scored: each reward function returned None for all of them",
        )
        return
    spread = (
        f"mean {np.nanmean(rewards):.3f}, from {np.nanmin(rewards):.3g} to {np.nanmax(rewards):.3g}"
    )
    says = f"{spread}; {dead} of {counted(len(groups), 'group')} without differences"
    if dead == len(groups):
        says += (
            ": nothing to learn from them; use easier (or harder) prompts, a better start, a larger"
            " group_size, or a finer reward"
        )
    yield Finding("rewards", None if dead == len(groups) else True, says)
