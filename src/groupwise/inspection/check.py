"""`groupwise check`: try model, tokenizer, data and rewards of a recipe before hours of training.

Loading the model proves it (`proof`): scoring, training and sampling give what the model's own
forward and backward pass gives.  Then a few completions are sampled and scored with the recipe's
own settings.  Each check says what it saw, and what to do if it is wrong.

K reward functions
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from groupwise.config.objectives import is_online
from groupwise.config.settings import (
    VERDICTS,
    Recipe,
    positions_of,
)
from groupwise.data.encoding import visit
from groupwise.data.order import Order
from groupwise.data.templates import Template
from groupwise.data.turns import Turns
from groupwise.environments.harness_episodes import HarnessEnvironment
from groupwise.environments.procedural import rows_of
from groupwise.environments.runtime import EnvironmentBroken, EnvironmentKind
from groupwise.environments.schemas import name_of
from groupwise.environments.tool_episodes import ToolEnvironment
from groupwise.errors import ConfigError, DataError, GroupwiseError
from groupwise.inspection.agents import try_agent
from groupwise.inspection.samplers import (
    SamplingWork,
    compare_on_cpu,
    compare_on_gpu,
    copy_bandwidth,
)
from groupwise.inspection.servers import look_at_servers
from groupwise.models.loading import embedding_rows
from groupwise.models.policy import Policy
from groupwise.models.shape import Shape
from groupwise.proof.passes import model_pass
from groupwise.records import Finish, Prompt, Rollout, RolloutGroup, Sampling
from groupwise.rewards.accuracy import as_text, check_gold
from groupwise.rewards.completions import prompt_of
from groupwise.rewards.compose import Rewards
from groupwise.rewards.registry import CODE, JUDGE
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.inputs import resolved
from groupwise.runs.job import Job, make_job
from groupwise.runs.plan import prepared_weights
from groupwise.runs.prepared import sampling_of
from groupwise.runs.run_models import fit_threads
from groupwise.sandbox.attacks import Verdict, prove, prove_tools
from groupwise.sandbox.isolation import ISOLATIONS, Isolation
from groupwise.sandbox.tools import SANDBOX_TOOLS
from groupwise.training.branches import unbranched
from groupwise.training.passes import score
from groupwise.training.samples import sample_of
from groupwise.utils.spelling import counted

PROMPTS, COMPLETIONS, TOKENS = 8, 4, 96
"""Size of the sample: first prompts that training draws, completions of each, and their tokens."""
WHOLE = 4
"""Prompts that are completed up to the recipe's own length, where TOKENS say too little."""
FEW = 0.5
"""Share of completions that end, below which a recipe wastes most of what it samples."""
ENTRIES = 64
"""Entries of a procedural data set whose scorers are tried."""
GOLDS, PROBED = 64, 16
"""Rows whose gold answers are scored, and prompts that are given as their own answers."""
TAIL = 40
"""Characters of a prompt's end that are shown."""
QUESTION: Mapping[str, Any] = {"prompt": [{"role": "user", "content": "1 + 1?"}]}
"""A row that stands for the prompts of an objective that learns from data."""
GAP = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of a log-prob, nats, that rounding explains, by the type of products."""
PLANNED = ("read", "data", "in all", "memory", "warning")
"""Lines of a run's plan that are shown."""

Lines = Callable[[], AbstractContextManager[None]]
"""Adds to an error that is raised within where the recipe's file has its key."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    good: bool | None
    """None: nothing wrong, but something to know."""
    text: str


def _good(name: str, text: str) -> Finding:
    return Finding(name, True, text)


def _wrong(name: str, text: str) -> Finding:
    return Finding(name, False, text)


def _note(name: str, text: str) -> Finding:
    return Finding(name, None, text)


def check_stage(recipe: Recipe, lines: Lines = nullcontext) -> Iterator[Finding]:
    """Check one run.  An error that would stop the run becomes the last finding.

    lines: adds to an error where the recipe's file has its key.
    """
    try:
        recipe = resolved(recipe)
    except ConfigError as error:
        yield _note("model", f"{error}; the later checks need it: run that stage first")
        return
    except GroupwiseError as error:
        yield _wrong("recipe", str(error))
        return
    try:
        with lines():
            job = make_job(recipe)
    except GroupwiseError as error:
        yield _wrong("recipe", str(error))
        return
    threads = torch.get_num_threads()
    fit_threads(job.policy, job.recipe.threads)
    try:
        yield from _check_job(job)
    except ConfigError as error:  # `Problems` is several of them
        yield _wrong("ConfigError", str(error))
    except GroupwiseError as error:
        yield _wrong(type(error).__name__, str(error))
    finally:
        job.close()
        torch.set_num_threads(threads)


def _check_job(job: Job) -> Iterator[Finding]:
    recipe, rewards = job.recipe, job.prepared.rewards
    for label, text in job.plan:
        if label in PLANNED:
            yield _note(label, text)
        elif label.startswith("proven"):
            yield _good("model", f"{label}: {text}")
    yield from _tokenizer(job.policy)
    yield from _template(recipe, job)
    if job.engine is None or not is_online(recipe.objective):
        return
    yield from _procedural(recipe)
    assert rewards is not None
    if any(reward.function == JUDGE for reward in recipe.rewards):
        rewards.reach_servers()
        yield _good("judge", "its server answers")
    if isinstance(job.prepared.environment, ToolEnvironment):
        yield from _environments(recipe, job.prepared.environment, job.prompts)
    if recipe.environment.agent is not None:
        environment = job.prepared.environment
        assert isinstance(environment, HarnessEnvironment)
        policy = job.policy
        yield _good(
            "agent",
            try_agent(environment, job.prompts[0], policy.tokenizer, policy.eos_ids[0]),
        )
    episodes = rewards.asks("environments", "environment_rewards")  # a gold answer has none
    if rewards.golds and not episodes:
        graded: set[str | None] = {rewards.verdict}
        for one in recipe.rewards:
            if one.function in VERDICTS:
                graded.add(one.name or one.function)
        yield from _golds(rewards, graded, job.prompts)
        yield _restated(rewards, job.prompts)
    if any(reward.function == CODE for reward in recipe.rewards):
        yield from _sandboxes(prove)
    if set(recipe.environment.tools) & set(SANDBOX_TOOLS):
        yield from _sandboxes(prove_tools)
    if recipe.rollout.engine.servers:
        states = look_at_servers(recipe.rollout.engine.servers, job.policy)
        for state in states:
            yield Finding("servers", state.good, state.text)
        if not any(state.good for state in states[1:]):
            return
    order = Order(len(job.prompts), recipe.seed, recipe.data.shuffle)
    prompts = [visit(job.prompts[row], epoch) for epoch, row in order.take(PROMPTS)]
    yield from _samples(recipe, job, rewards, prompts)


def _sandboxes(prove_one: Callable[[Isolation], Verdict]) -> Iterator[Finding]:
    """Run all attacks on the sandboxes of this machine."""
    for isolation in ISOLATIONS:
        verdict = prove_one(isolation)
        if verdict.broken:
            yield _wrong("sandbox", str(verdict))
        elif verdict.holds:
            yield _good("sandbox", str(verdict))
        else:
            yield _note("sandbox", str(verdict))


# ---------------------------------------------------------------- tokenizer and chat template


def _tokenizer(policy: Policy) -> Iterator[Finding]:
    tokenizer = policy.tokenizer
    names = []
    for token in policy.eos_ids:
        names.append(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})")
    yield _good(
        "EOS",
        f"a completion ends with {', '.join(names)}; it is sampled, scored and trained like every"
        " other token",
    )
    pad = tokenizer.pad_token_id
    state = f"has PAD {pad}"
    if pad is None:
        state = "has no PAD"
    elif pad in policy.eos_ids:
        state = "uses EOS as PAD"
    yield _good("PAD", f"the tokenizer {state}: no difference, nothing is ever padded")
    unused = embedding_rows(policy.model) - policy.vocabulary
    if unused > 0:
        yield _note(
            "vocabulary",
            f"{unused} embedding rows belong to no token: they are never sampled and never scored",
        )


def _template(recipe: Recipe, job: Job) -> Iterator[Finding]:
    """Check how the chat template writes the first prompt once it is answered.

    Prompts that are strings have no template.  A question stands for prompts with images, and where
    no prompts are drawn.
    """
    data, policy = recipe.data, job.policy
    if not data.chat and (data.path is None or not policy.tokenizer.chat_template):
        return
    template = Template.build(data, policy.tokenizer)
    if job.prompts and job.prompts[0].images is None:
        row, where = job.prompts[0].row, f"{job.prompts[0].place} and an answer"
        harmless = "no difference here: the policy has one turn"
    elif job.prompts:
        template, row, where = replace(template, format=None), QUESTION, "a question and an answer"
        harmless = "no difference here: the policy has one turn"
    else:
        template, row, where = replace(template, format=None), QUESTION, "a question and an answer"
        harmless = "`read` counts the rows for which this matters"
    if isinstance(template.content(row), str):
        return
    if data.chat_template_kwargs:
        yield _variables(template, row, where)
    several_turns = recipe.environment.talks or recipe.environment.asks
    try:
        stable = template.is_stable(row, "The answer is 2.", where)
    except DataError as error:
        yield _note("template", str(error) if several_turns else f"{error}; {harmless}")
    else:
        yield _prefix(stable, None if several_turns else harmless)
    yield _turns(policy)


def _variables(template: Template, row: Mapping[str, Any], where: str) -> Finding:
    """Check what the recipe's variables of the template change in a prompt."""
    unset = replace(template, variables={})
    try:
        (rendered,) = template.ask([template.read(row, where)])
        (plain,) = unset.ask([unset.read(row, where)])
    except DataError as error:
        return _wrong("variables", str(error))
    names = ", ".join(f"{name}: {value!r}" for name, value in template.variables.items())
    if rendered.text == plain.text:
        return _note("variables", f"{{{names}}}: the prompt is the same without")
    end, plain_end = rendered.text[-TAIL:], plain.text[-TAIL:]
    if end == plain_end:
        return _good("variables", f"{{{names}}}: the prompt is another")
    return _good("variables", f"{{{names}}}: the prompt ends in {end!r}, without in {plain_end!r}")


def _prefix(stable: bool, harmless: str | None) -> Finding:
    """Say whether the prompt's ids begin those of the whole conversation.

    harmless: why it does not matter; None where conversations have several turns of the policy.
    """
    if stable:
        return _good("template", "the prompt's ids begin the ids of the whole conversation")
    text = "the chat template writes a prompt otherwise once it is answered"
    if harmless is not None:
        return _note("template", f"{text}; {harmless}")
    return _wrong(
        "template",
        f"{text}: several turns would be scored on other ids than were sampled; use a template"
        " whose generation prompt is a prefix",
    )


def _turns(policy: Policy) -> Finding:
    """Check what the template does to the past when a conversation continues."""
    try:
        proofs = Turns(tokenizer=policy.tokenizer, eos_ids=policy.eos_ids).prove()
    except DataError as error:
        return _note("turns", f"a next turn cannot follow: {error}")
    rewriting = [proof for proof in proofs if proof.verdict == "rewrites"]
    cases = ", ".join(f"{proof.case}: {proof.verdict}" for proof in proofs)
    if all(proof.verdict == "refuses" for proof in proofs):
        return _note(
            "turns", f"the template refuses every next turn behind a lone question ({cases})"
        )
    if not rewriting:
        return _good("turns", f"a next turn leaves the past as it was sampled ({cases})")
    return _note(
        "turns",
        f"the template writes the past otherwise once a conversation continues ({cases});"
        f" {rewriting[0]}",
    )


# ---------------------------------------------------------------- environments


def _procedural(recipe: Recipe) -> Iterator[Finding]:
    """Check whether the scorers of a procedural data set can be believed."""
    settings = recipe.environment
    if settings.reasoning_gym is None:
        return
    _, health = rows_of(settings.reasoning_gym, settings.args, ENTRIES, recipe.seed)
    text = f"{settings.reasoning_gym}: {health}"
    if not health.believable:
        yield _wrong("scorer", text)
    elif health.faults:
        yield _note("scorer", text)
    else:
        yield _good("scorer", text)


def _environments(
    recipe: Recipe, environment: ToolEnvironment, prompts: Sequence[Prompt]
) -> Iterator[Finding]:
    """Show the tools, and try each environment for an episode in which the policy does nothing."""
    for kind in environment.runtime.kinds.values():
        for schema in kind.schemas:
            function = schema["function"]
            properties = (function.get("parameters") or {}).get("properties") or ()
            described = function.get("description") or "no description"
            yield _good("tool", f"{name_of(schema)}({', '.join(properties)}): {described}")
        if not kind.resets:
            continue
        asking = [one for one in prompts if environment.runtime.kind_of(one.row, one.place) == kind]
        if asking:
            yield _try_environment(recipe, environment, kind, asking[0])
        else:
            yield _note("environment", f"{kind.name or kind.title}: no row asks for it")


def _try_environment(
    recipe: Recipe, environment: ToolEnvironment, kind: EnvironmentKind, prompt: Prompt
) -> Finding:
    name, seconds = kind.name or kind.title, recipe.environment.tool_timeout
    instance = environment.runtime.make(kind)
    began = time.monotonic()
    try:
        greeting = instance.reset(prompt.row, seed=recipe.seed, seconds=seconds)
        text = f"{name}: reset() says nothing"
        if greeting:
            text = f"{name}: reset() says {greeting!r:.80}"
        if kind.steps:
            observation, reward, done = instance.step("", seconds=seconds)
            text += f"; to an empty turn it answers {observation!r:.80}, reward {reward}"
            text += f", done {done}"
        reward, _ = instance.end(True, seconds=seconds)
        if not kind.steps and kind.rewarded:
            text += f"; reward of an episode without actions: {reward}"
        return _good("environment", f"{text} ({time.monotonic() - began:.2f} s)")
    except EnvironmentBroken as broken:
        return _wrong("environment", f"{name}: {broken}")
    finally:
        instance.kill()


# ---------------------------------------------------------------- rewards


def _golds(
    rewards: Rewards, graded: Collection[str | None], prompts: Sequence[Prompt]
) -> Iterator[Finding]:
    """Check whether gold answers earn what they should, in the forms in which models write answers.

    graded: the functions that give 1 to what is right; what others give is only shown.
    """
    for name, column in rewards.golds.items():
        held = []
        for prompt in prompts:
            if as_text(prompt.row.get(column)) or prompt.row.get(column) == "":
                held.append(prompt)
        looked = held[:GOLDS]
        if not looked:
            good = False if name in graded else None
            text = f"no row has an answer in the column {column!r}: {name} gives None"
            yield Finding("gold", good, text)
            continue
        answers = [as_text(prompt.row[column]) for prompt in looked]
        earned = _earned(rewards, looked, answers)[:, rewards.names.index(name)]
        text = f"the gold answers of the first {counted(len(looked), 'prompt')} earn {name} ="
        without = ""
        if len(held) < len(prompts):
            lack = len(prompts) - len(held)
            without = f"; {lack} of {counted(len(prompts), 'row')} have none"
        missed = np.flatnonzero(~(earned >= 1.0))
        if name not in graded:
            yield _note("gold", f"{text} {_mean(earned)}{without}")
        elif not missed.size:
            yield _good("gold", f"{text} 1{without}")
        else:
            first = int(missed[0])
            problem = check_gold([answers[first]])[0] if name == "accuracy" else None
            why = f" ({problem})" if problem else ""
            yield _wrong(
                "gold",
                f"{missed.size} of {len(looked)} gold answers do not earn {name} = 1, the first in"
                f" row {looked[first].id}: {answers[first][:80]!r}{why}; no completion can be right"
                " there: look at `groupwise score` or drop these rows",
            )


def _restated(rewards: Rewards, prompts: Sequence[Prompt]) -> Finding:
    """Check what the prompt itself would earn as a completion, and each half of the equation that
    ends the gold's derivation.
    """
    probes: dict[str, list[tuple[Prompt, str]]] = {
        "the prompt itself": [],
        "the left half": [],
        "the right half": [],
    }
    for prompt in prompts[:PROBED]:
        question = prompt_of(prompt)
        if not isinstance(question, str):
            question = str(question[-1].get("content"))
        probes["the prompt itself"].append((prompt, question))
        golds = [as_text(prompt.row.get(column)) for column in rewards.golds.values()]
        sides = halves(next(filter(None, golds), ""))
        if sides:
            probes["the left half"].append((prompt, sides[0]))
            probes["the right half"].append((prompt, sides[1]))
    texts, paid = [], False
    for probe, pairs in probes.items():
        if not pairs:
            continue
        earned = _earned(rewards, [prompt for prompt, _ in pairs], [text for _, text in pairs])
        figures = []
        for name in rewards.golds:
            column = earned[:, rewards.names.index(name)]
            figures.append(f"{name} {_mean(column)}")
            if probe != "the right half" and (column >= 1.0).any():
                paid = True
        texts.append(f"{probe} earns {', '.join(figures)}")
    text = f"as a completion {texts[0]}"
    if len(texts) > 1:
        text += f"; of the gold's derivation {', '.join(texts[1:])}"
    return _note("restated", text) if paid else _good("restated", text)


def halves(derivation: str) -> tuple[str, ...]:
    """Return both sides of the last equation of a worked solution; nothing where there is none.

    >>> halves("He has 48/2 = <<48/2=24>>24 left.\\n#### 24"), halves("24")
    (('48/2', '24'), ())
    """
    equations = re.findall(r"([^=<>\n]{1,200})=([^=<>\n]{1,200})", derivation)
    if not equations:
        return ()
    left, right = equations[-1]
    return left.strip(" .$"), right.strip(" .$")


def _earned(rewards: Rewards, prompts: Sequence[Prompt], texts: Sequence[str]) -> np.ndarray:
    """Return (N, K): the best that each text earns in the forms in which models write answers.

    NaN where it is not judged.
    """
    best = np.full((len(prompts), len(rewards.names)), np.nan)
    for form in ("{}", "\\boxed{{{}}}", "#### {}"):
        groups = []
        for prompt, text in zip(prompts, texts, strict=True):
            groups.append((_written(prompt, form.format(text)),))
        best = np.fmax(best, [group.rewards[0] for group in rewards.score(groups)])
    return best


def _mean(values: np.ndarray) -> str:
    return "None" if np.isnan(values).all() else f"{np.nanmean(values):.2g}"


def _written(prompt: Prompt, text: str) -> Rollout:
    """Make a completion that was never sampled, for the reward functions to look at."""
    return Rollout(
        prompt=prompt,
        index=0,
        tokens=np.zeros(0, dtype=np.int64),
        behavior_logp=np.zeros(0),
        finish=Finish.STOP,
        eos_ids=(),
        sampling=Sampling(),
        text=text,
    )


# ---------------------------------------------------------------- completions


def _samples(
    recipe: Recipe, job: Job, rewards: Rewards, prompts: Sequence[Prompt]
) -> Iterator[Finding]:
    """Sample a little with the recipe's own settings, and score it."""
    policy, engine = job.policy, job.engine
    assert engine is not None
    sampling = sampling_of(recipe.rollout)
    sampling = replace(sampling, max_new_tokens=min(recipe.rollout.max_new_tokens, TOKENS))
    begin = time.perf_counter()
    groups = list(
        engine.generate(prompts, group_size=COMPLETIONS, sampling=sampling, seed=recipe.seed)
    )
    seconds = time.perf_counter() - begin
    rollouts = [rollout for group in groups for rollout in group]
    samples = [sample_of(rollout) for rollout in rollouts]
    scored = score(policy, samples, max_tokens_per_microbatch=positions_of(job.recipe)).logp
    yield _agreement(policy, rollouts, scored)
    yield _endings(recipe, job, prompts, rollouts)
    yield _sampler(recipe, job, rollouts, seconds)
    if rewards.names:
        yield _spread(rewards.score(groups))


def _agreement(
    policy: Policy, rollouts: Sequence[Rollout], scored: Sequence[np.ndarray]
) -> Finding:
    """Check that the engine's log-probs are those of the scorer, and say which of them is wrong."""
    sampled = [sample_of(rollout).behavior_logp for rollout in rollouts]
    gap, tokens = _gap(sampled, scored)
    limit = GAP.get(torch.bfloat16 if policy.autocast else policy.dtype, 0.25)
    sampling = rollouts[0].sampling
    where = f"temperature {sampling.temperature:g}"
    if sampling.restricts:
        where += ", over the truncated support"
    if gap <= limit:
        return _good(
            "log-probs",
            f"sampled = scored at {where} (largest difference {gap:.1e} nats over"
            f" {counted(tokens, 'token')})",
        )
    exact = [_own_forward(policy, rollout) for rollout in rollouts]
    engine_gap, _ = _gap(sampled, exact)
    scorer_gap, _ = _gap(scored, exact)
    return _wrong(
        "log-probs",
        f"sampled and scored log-probs differ by up to {gap:.2g} nats at {where}, more than"
        f" rounding ({limit:g}): do not train. From the model's own forward pass the engine's"
        f" log-probs differ by up to {engine_gap:.2g} nats, the scorer's by up to {scorer_gap:.2g}",
    )


def _gap(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> tuple[float, int]:
    """Return the largest difference of two columns, and how many numbers they have."""
    differences = [np.abs(a - b) for a, b in zip(one, other, strict=True)]
    flat = np.concatenate([np.zeros(0), *differences])
    return float(flat.max(initial=0.0)), flat.size


def _own_forward(policy: Policy, rollout: Rollout) -> np.ndarray:
    """Return log-probs (n,) by the model's own pass, in the distribution that was sampled.

    0 where nothing is trained.
    """
    logp_n = np.zeros(len(rollout))
    if not len(rollout):  # an episode that failed before its first turn
        return logp_n
    samples = [sample_of(part) for part in unbranched(rollout)]
    values = model_pass(policy, samples, gradients=False).values
    weighted_n = np.concatenate([sample.weight > 0 for sample in samples])
    logp_n[weighted_n] = np.concatenate(values)
    return logp_n


def _endings(
    recipe: Recipe, job: Job, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
) -> Finding:
    """Check how many completions end by themselves within the recipe's own length.

    A shorter sample that ends is enough; else a few prompts are completed up to that length.
    """
    length = recipe.rollout.max_new_tokens
    within = min(length, TOKENS)
    share = _ended(rollouts)
    if within < length and share < FEW:
        assert job.engine is not None
        sampling = sampling_of(recipe.rollout)
        groups = job.engine.generate(
            prompts[:WHOLE], group_size=1, sampling=sampling, seed=recipe.seed
        )
        rollouts = [rollout for group in groups for rollout in group]
        within = length
        share = _ended(rollouts)
    text = f"{share:.0%} of {counted(len(rollouts), 'completion')} ended within {within} tokens"
    if within == length:
        text += " (rollout.max_new_tokens)"
    else:
        text += f" (rollout.max_new_tokens is {length})"
    if share == 0:
        return _wrong(
            "endings", f"{text}: warm the model up with SFT, or raise rollout.max_new_tokens"
        )
    if share < FEW:
        return _note(
            "endings",
            f"{text}: the others are truncated; raise rollout.max_new_tokens, or ask for shorter"
            " answers",
        )
    return _good("endings", text)


def _sampler(recipe: Recipe, job: Job, rollouts: Sequence[Rollout], seconds: float) -> Finding:
    """Say which sampler would be the fastest on this machine.   seconds: of these rollouts."""
    policy = job.policy
    if policy.device.type == "cpu":
        tokens = sum(len(rollout) for rollout in rollouts)
        text = compare_on_cpu(tokens, seconds, recipe.rollout.engine.name)
    else:
        shape = Shape.of_policy(policy)
        work = SamplingWork(
            prompts=recipe.group.prompts_per_step,
            group=recipe.group.group_size,
            rows=recipe.rollout.max_rows,
            prompt_tokens=float(np.mean([prompt.tokens.size for prompt in job.prompts])),
            completion_tokens=recipe.rollout.max_new_tokens,
        )
        known = (
            policy.attention != "single" and NativeEngine(policy, max_rows=1).path == "specialised"
        )
        text = compare_on_gpu(
            shape,
            work,
            copy_bandwidth(policy.device),
            prepared_weights(shape, cpu=False),
            recorded=known,
        )
    return _note("sampler", text)


def _ended(rollouts: Sequence[Rollout]) -> float:
    return float(np.mean([not rollout.truncated for rollout in rollouts]))


def _spread(groups: Sequence[RolloutGroup]) -> Finding:
    """Check whether rewards differ within groups: only these teach."""
    rewards = np.concatenate([group.reward for group in groups])
    dead = sum(group.equal_rewards for group in groups)
    if np.isnan(rewards).all():
        return _wrong(
            "rewards",
            "no completion can be scored: each reward function returned None for all of them",
        )
    text = (
        f"mean {np.nanmean(rewards):.3f}, from {np.nanmin(rewards):.3g} to"
        f" {np.nanmax(rewards):.3g}; {dead} of {counted(len(groups), 'group')} without differences"
    )
    if dead < len(groups):
        return _good("rewards", text)
    return _note(
        "rewards",
        f"{text}: nothing to learn from them; use easier (or harder) prompts, a better start, a"
        " larger group_size, or a finer reward",
    )
