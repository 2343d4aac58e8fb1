"""What distillation on the student's own completions is worth: SFT on the teacher's, from the same start, on as many tokens.

    groupwise train recipes/distill.yaml seed=0 runs=runs/0
    python benchmarks/distillation.py runs/0/distill runs/1/distill runs/2/distill

Each argument is a finished run of a recipe with the stages `teacher`, `start`, `distill` and `sft`; without one the recipe is
trained first.  Its teacher answers prompts of the training set, once each, until its answers have as many tokens as the stage
`distill` has trained; its start is trained on them by the settings of the stage `sft`, and judged as the stage `distill` was.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from baselines import Result, run_out

from groupwise.config.recipes import parse_recorded
from groupwise.config.settings import ModelSettings, Recipe
from groupwise.data.encoding import Demonstration, visit
from groupwise.data.load import load_data
from groupwise.data.order import Order
from groupwise.models.loading import load_policy
from groupwise.models.shape import Shape
from groupwise.records import Sampling
from groupwise.rewards.compose import build_rewards
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.plan import microbatch
from groupwise.training.evaluate import evaluate
from groupwise.training.offline import SFT, train_offline
from groupwise.training.optimizer import Optimizer

PROMPTS = 256
"""To a call of the engine."""


def trained_tokens(stage: Path) -> int:
    """Completion tokens that a stage's loss has counted, in all its steps."""
    return int(sum(step.get("tokens/trained", 0) for step in read_metrics(stage)))


def imitate(run: Path) -> Result:
    """SFT on the teacher's completions from the start of a run, on at least as many tokens as its stage `distill`."""
    sft, distill = (recorded(run / name) for name in ("sft", "distill"))
    student, teacher = (load_policy(ModelSettings(path=str(run / name / "final"))) for name in ("start", "teacher"))
    limit = distill.rollout.max_new_tokens
    data = load_data(distill.data, student.tokenizer, context=student.context, max_new_tokens=limit, seed=distill.seed)
    rewards = build_rewards(distill.rewards, columns=list(data.train[0].row), tokenizer=student.tokenizer, verdict=distill.verdict)
    engine, order = NativeEngine(teacher, max_rows=distill.rollout.max_rows), Order(len(data.train), distill.seed)
    sampling = Sampling(temperature=distill.rollout.temperature, max_new_tokens=limit)
    wanted, tokens, right = trained_tokens(run / "distill"), 0, 0.0
    rows: list[Demonstration] = []
    while tokens < wanted:
        prompts = [visit(data.train[row], epoch) for epoch, row in order.take(PROMPTS)]
        for group in rewards.score(list(engine.generate(prompts, group_size=1, sampling=sampling, seed=distill.seed))):
            (said,) = group.rollouts
            if tokens < wanted:
                rows.append(Demonstration(id=said.prompt.id, prompt=said.prompt.tokens, completion=said.tokens))
                tokens, right = tokens + said.tokens.size, right + float(group.reward[0])
    steps = math.ceil(len(rows) / sft.batch_size)
    waiting = iter(rows)
    seconds = run_out(
        train_offline(
            student,
            SFT,
            draw=lambda k: [row for _, row in zip(range(k), waiting, strict=False)],
            optimizer=Optimizer(student.model, sft.optimizer, steps),
            max_tokens_per_microbatch=sft.optimizer.tokens_per_microbatch or microbatch(Shape.of_policy(student)),
            batch_size=sft.batch_size,
            steps=steps,
        )
    )
    judged = Sampling(max_new_tokens=limit)
    engine = NativeEngine(student, max_rows=distill.rollout.max_rows)
    found = evaluate(engine, rewards, data.held_out, k=distill.eval.k, sampling=judged, seed=distill.seed)
    rewards.close()
    note = f"{len(rows)} of the teacher's completions, {right / len(rows):.3f} of them right, {tokens} tokens, {steps} steps"
    return Result("sft on the teacher's", distill.seed, seconds, found, note)


def recorded(stage: Path) -> Recipe:
    """The recipe that a stage was run by."""
    path = stage / "config.yaml"
    return parse_recorded(path.read_text(encoding="utf-8"), str(path))


def trained(folder: Path) -> Path:
    """The recipe `distill`, run here with its own seed: its folder of stages."""
    recipe = Path(__file__).parents[1] / "recipes/distill.yaml"
    subprocess.run(
        [sys.executable, "-m", "groupwise", "train", str(recipe), f"runs={folder}"], check=True, stdout=subprocess.DEVNULL
    )
    return folder / "distill"


def compare(run: Path) -> None:
    """Print how the stages of a run ended, and how SFT on its teacher's completions does."""
    for stage in ("distill", "sft"):
        last = read_metrics(run / stage)[-1]
        figures = f"greedy {last['eval/greedy']:.3f}  sampled {last['eval/sampled']:.3f}"
        print(f"{run / stage}: {trained_tokens(run / stage)} tokens  {figures}", flush=True)
    print(imitate(run), flush=True)


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    with tempfile.TemporaryDirectory() as folder:
        for run in parser.parse_args().runs or [trained(Path(folder))]:
            compare(run)


if __name__ == "__main__":
    main()
