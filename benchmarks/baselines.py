"""What GRPO is worth: more SFT and rejection sampling, given the same processor time from the same start.

For each seed the recipe's SFT stage is trained, then its GRPO stage; the processor seconds of GRPO's loop are the budget of
every other method:

    more sft             the SFT stage anew, with as many more steps (and fresh demonstrations) as the budget pays for
    rejection sampling   sample from the SFT model for half of the budget, keep what is right, SFT on it for the other half
                         (2308.01825); with --rounds N in N rounds, each sampling from what the round before has made

    python benchmarks/baselines.py                          # recipes/demo.yaml, seed 0
    python benchmarks/baselines.py --seeds 0 1 2 --rounds 1 4
    python benchmarks/baselines.py --recipe my.yaml stages.grpo.steps=60

Any recipe with the stages `sft` and `grpo` will do.  Processor seconds of one thread are counted, evaluation left out, so that a
busy machine treats all alike.  `rejection` below is a training loop of one's own over the library's stages, as privileged as the
library's: sample, score, train, judge.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from _machine import save

from groupwise.config.recipes import load_stages
from groupwise.config.settings import ModelSettings, Recipe
from groupwise.data.encoding import Demonstration, visit
from groupwise.data.load import TASK_ROWS, load_data
from groupwise.data.order import Order
from groupwise.models import saving
from groupwise.models.loading import load_policy
from groupwise.models.shape import Shape
from groupwise.records import RolloutGroup, Sampling, Step
from groupwise.rewards.compose import build_rewards
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.job import make_job
from groupwise.runs.plan import microbatch
from groupwise.training.evaluate import Evaluation, evaluate
from groupwise.training.offline import SFT, train_offline
from groupwise.training.optimizer import Optimizer

REJECTION_LR = 1e-3
"""Peak learning rate of SFT on kept samples; cosine to 5 %.  The best of 3e-4, 1e-3 and 3e-3 on the demo's seed 0."""
PROMPTS, SIZE = 32, 8
"""Prompts to a call of the engine, and samples of each, as in the demo's GRPO stage."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a method came to."""

    method: str
    seed: int
    seconds: float
    """Processor seconds after the start that all share."""
    found: Evaluation
    note: str = ""

    def row(self) -> dict[str, Any]:
        """For the results file."""
        figures = {name: round(value, 4) for name, value in self.found.metrics().items()}
        return {"method": self.method, "seed": self.seed, "seconds": round(self.seconds, 1), "note": self.note, **figures}

    def __str__(self) -> str:
        found = self.found
        figures = f"greedy {found.greedy}  sampled {found.sampled}  pass@{found.k} {found.pass_at_k}"
        return f"seed {self.seed}  {self.method:28} {self.seconds:6.1f} s  {figures}  {self.note}"


def stage(recipe: Recipe, folder: Path) -> tuple[float, Evaluation]:
    """Train a stage without a run folder and save its model: the processor seconds of its loop, and what it is worth."""
    job = make_job(recipe)
    seconds = run_out(job.loop(0))
    found = job.judge(True)
    assert isinstance(found, Evaluation)
    saving.save(job.policy, folder)
    job.close()
    return seconds, found


def run_out(steps: Iterator[Step]) -> float:
    """Take every step of a loop: its processor seconds."""
    start = time.process_time()
    for _ in steps:
        pass
    return time.process_time() - start


def more_sft(recipe: Recipe, extra: float, spent: float, folder: Path) -> tuple[float, Evaluation, str]:
    """The SFT stage anew with `extra` more processor seconds than the `spent` ones, its schedule and its rows stretched."""
    assert recipe.steps is not None
    factor = 1.0 + extra / spent
    rows = round((recipe.data.limit or TASK_ROWS) * factor)
    longer = dataclasses.replace(recipe, steps=round(recipe.steps * factor), data=dataclasses.replace(recipe.data, limit=rows))
    seconds, found = stage(longer, folder)
    return seconds - spent, found, f"{longer.steps} steps in all, {rows} demonstrations"


def kept(groups: Sequence[RolloutGroup]) -> list[Demonstration]:
    """The right completions, each different one of a prompt once."""
    rows = []
    for group in groups:
        right = [r for r, reward in zip(group.rollouts, group.reward, strict=True) if reward == 1.0 and not r.truncated]
        rows += [
            Demonstration(id=r.prompt.id, prompt=r.prompt.tokens, completion=r.tokens) for r in {r.text: r for r in right}.values()
        ]
    return rows


def rejection(
    start: Path, sft: Recipe, grpo: Recipe, max_tokens_per_microbatch: float, step_seconds: float, rounds: int
) -> tuple[float, Evaluation, str]:
    """Sample, keep what is right, train on it.  step_seconds: of one SFT step, to spend the budget to the end."""
    policy = load_policy(ModelSettings(path=str(start)))
    engine = NativeEngine(policy, max_rows=grpo.rollout.max_rows)
    limit = grpo.rollout.max_new_tokens
    source = dataclasses.replace(grpo.data, limit=TASK_ROWS)
    data = load_data(source, policy.tokenizer, context=policy.context, max_new_tokens=limit, seed=sft.seed)
    rewards = build_rewards(grpo.rewards, columns=list(data.train[0].row), tokenizer=policy.tokenizer, verdict=grpo.verdict)
    order = Order(len(data.train), sft.seed)
    sampling = Sampling(temperature=grpo.rollout.temperature, max_new_tokens=limit)
    steps = max(round(max_tokens_per_microbatch / 2 / rounds / step_seconds), 1)
    optimizer = Optimizer(policy.model, dataclasses.replace(sft.optimizer, lr=REJECTION_LR), steps * rounds)
    spent, sampled, chosen = 0.0, 0, 0
    for _ in range(rounds):
        clock = time.process_time()
        right: list[Demonstration] = []
        while time.process_time() - clock < max_tokens_per_microbatch / 2 / rounds:
            prompts = [visit(data.train[row], epoch) for epoch, row in order.take(PROMPTS)]
            groups = rewards.score(list(engine.generate(prompts, group_size=SIZE, sampling=sampling, seed=sft.seed)))
            sampled += PROMPTS * SIZE
            right += kept(groups)
        chosen += len(right)
        if not right:
            break
        rows = Order(len(right), sft.seed)
        taken = optimizer.taken
        run_out(
            train_offline(
                policy,
                SFT,
                draw=lambda k, right=right, rows=rows: [right[row] for _, row in rows.take(k)],
                optimizer=optimizer,
                max_tokens_per_microbatch=sft.optimizer.tokens_per_microbatch or microbatch(Shape.of_policy(policy)),
                batch_size=sft.batch_size,
                done=taken,
                steps=taken + steps,
            )
        )
        engine.send_weights(optimizer.taken)
        spent += time.process_time() - clock
    found = evaluate(
        engine,
        rewards,
        data.held_out,
        k=grpo.eval.k,
        sampling=Sampling(max_new_tokens=limit),
        seed=sft.seed,
    )
    rewards.close()
    return spent, found, f"{sampled} samples, {chosen} different right ones kept, {optimizer.taken} steps"


def compare(path: str, overrides: list[str], seed: int, rounds: list[int], folder: Path) -> Iterator[Result]:
    """Every method on one seed."""
    stages = load_stages(path, [*overrides, f"seed={seed}", f"runs={folder}", "threads=1"])
    sft, grpo = stages["sft"], stages["grpo"]
    start = folder / "sft"
    sft_seconds, found = stage(sft, start)
    yield Result("sft (the start)", seed, 0.0, found, f"{sft.steps} steps, {sft_seconds:.1f} s")
    grpo = dataclasses.replace(grpo, model=dataclasses.replace(grpo.model, path=str(start)))
    max_tokens_per_microbatch, found = stage(grpo, folder / "grpo")
    yield Result(grpo.objective, seed, max_tokens_per_microbatch, found, f"{grpo.steps} steps")
    seconds, found, note = more_sft(sft, max_tokens_per_microbatch, sft_seconds, folder / "more")
    yield Result("more sft", seed, seconds, found, note)
    assert sft.steps is not None
    for count in rounds:
        seconds, found, note = rejection(start, sft, grpo, max_tokens_per_microbatch, sft_seconds / sft.steps, count)
        label = f"rejection sampling, {count} round{'s' if count > 1 else ''}"
        yield Result(label, seed, seconds, found, note)


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=str(Path(__file__).parents[1] / "recipes" / "demo.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 4], help="of rejection sampling")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    results = []
    for seed in given.seeds:
        with tempfile.TemporaryDirectory(prefix="groupwise-baselines-") as folder:
            for result in compare(given.recipe, given.overrides, seed, given.rounds, Path(folder)):
                results.append(result)
                print(result, flush=True)
    content = {"recipe": Path(given.recipe).name, "overrides": given.overrides, "results": [result.row() for result in results]}
    print(save(f"baselines_{Path(given.recipe).stem}", content))


if __name__ == "__main__":
    main()
