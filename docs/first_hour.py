"""Runs the first hour for real and writes its transcript, docs/first-hour.md: `python docs/first_hour.py`.

A fresh clone, `make demo`, then a model, data and a reward of one's own, evaluation, a look at the run, a report for a colleague.
Every command is executed in the order of the page; a command that fails ends the script.  `--fast` runs the same commands with the
installed library and small settings, in seconds, and writes nothing: the tests do that.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first-hour.md"


@dataclass(frozen=True)
class Run:
    """A command of the page."""

    command: str
    says: str = ""
    """The paragraph before it."""
    lines: tuple[int, int] = (40, 40)
    """How many lines of its output are shown, from the start and from the end."""
    fast: str = ""
    """What `--fast` types instead."""


@dataclass(frozen=True)
class Part:
    """A section of the page: files that the reader writes, then commands."""

    title: str
    says: str
    files: tuple[tuple[str, str, str], ...] = ()
    """(language, name, text)."""
    runs: tuple[Run, ...] = ()
    after: str = ""


DATA = """\
import json
import random

random.seed(0)
with open("train.jsonl", "w") as file:
    for _ in range(2000):
        a, b = random.randint(100, 999), random.randint(100, 999)
        if a % 10 + b % 10 > 9 and a // 10 % 10 + b // 10 % 10 > 8:  # the last two digits carry
            print(json.dumps({"prompt": f"{a}+{b}", "answer": str(a + b)}), file=file)
"""
REWARD = '''\
import re


def digits(completions, answer, **_):
    """The share of the answer's digits that are right, from the last one on."""
    rewards = []
    for text, gold in zip(completions, answer):
        numbers = re.findall(r"\\d+", text)
        last = numbers[-1] if numbers else ""
        rewards.append(sum(a == b for a, b in zip(reversed(last), reversed(gold))) / len(gold))
    return rewards
'''
RECIPE = """\
objective: grpo
name: mine
steps: 40
threads: 1
model: {path: runs/demo/sft/final}                               # a folder or a hub name
data: {path: train.jsonl, chat: true, eval_fraction: 0.2}        # columns: prompt, answer
rewards:
  - function: accuracy                                           # built in: numbers, LaTeX, fractions, sets
  - {function: "my_rewards.py:digits", weight: 0.2}              # yours
rollout: {max_new_tokens: 40}
group: {prompts_per_step: 16, group_size: 8}
optimizer: {lr: 2.0e-4}
eval: {every: 20, k: 4}
"""
SMALL = (
    "stages.sft.steps=20 stages.grpo.steps=2 data.limit=200 stages.grpo.data.limit=200 data.eval_limit=4 "
    "stages.grpo.eval.prompts=4 eval.k=2"
)

STEP = re.compile(r"step \d+/\d+ ")
"""How a line of a step begins, where output goes to a file."""

PARTS = (
    Part(
        "The demo",
        "You need Linux or macOS, Python 3.11 to 3.14 and make ([install](install.md)). `make demo` creates a virtual\n"
        "environment, installs Groupwise, and trains a model of 0.4M parameters on three-digit addition. SFT first trains it on\n"
        "demonstrations that forget carries. GRPO then rewards right answers.",
        runs=(Run("make demo", lines=(0, 30), fast=f"groupwise train recipes/demo.yaml {SMALL}"),),
        after="The last table is the result: accuracy on held-out prompts, before and after GRPO.\n"
        "[The line in the terminal](monitoring.md#the-line-in-the-terminal) explains the figures of a step,\n"
        "the [glossary](words.md) all other terms. `source .venv/bin/activate` puts `groupwise` on your path.",
    ),
    Part(
        "Your data, your reward",
        "A row of data has a `prompt` and the columns that your rewards need. These rows are additions whose last two digits\n"
        "carry; the demonstrations get them wrong. The reward `digits` gives partial credit for each right digit.",
        files=(("python", "make_data.py", DATA), ("python", "my_rewards.py", REWARD), ("yaml", "my.yaml", RECIPE)),
        runs=(
            Run("python make_data.py && head -n 3 train.jsonl"),
            Run(
                "groupwise score my_rewards.py:digits runs/demo/grpo",
                "Test the reward on the completions of the demo's last step.",
                (12, 0),
            ),
            Run(
                "groupwise check my.yaml",
                "`groupwise check` compares sampled with scored log-probs and tests gold answers and end tokens.",
                (0, 9),
            ),
        ),
    ),
    Part(
        "Train",
        "The run prints its plan, then one line for each step. Ctrl-C saves the last step. The same command continues from there.",
        runs=(
            Run(
                "groupwise train my.yaml",
                lines=(0, 17),
                fast="groupwise train my.yaml steps=2 eval.every=1 eval.k=2 data.limit=60 group.prompts_per_step=4",
            ),
        ),
        after="The result is the sampled accuracy on held-out prompts. The mean reward also contains 0.2 times `digits`.",
    ),
    Part(
        "Evaluate, look, share",
        "`groupwise eval` answers the run's held-out prompts, or the rows of `--data FILE`.",
        runs=(
            Run("groupwise eval runs/mine", fast="groupwise eval runs/mine --limit 4"),
            Run(
                "groupwise replay runs/mine --step 20 --set objective=dr_grpo",
                "The line `algorithm` of the plan and of a replay names the four parts of the loss: the credit that makes\n"
                "advantages of rewards, the importance ratio, the policy loss of a token, and the weights by which tokens\n"
                "are averaged ([parts](algorithms.md)).\n\n"
                "What would Dr. GRPO have done with the same completions? A replay recomputes the recorded step, first unchanged,\n"
                "then with the change:",
                (0, 13),
                fast="groupwise replay runs/mine --step 2 --set objective=dr_grpo",
            ),
            Run(
                "groupwise view runs/mine --export report.html && ls report.html",
                "`groupwise view runs/mine` opens the run in the browser. `--export` writes it as one page.",
            ),
        ),
        after="![The viewer on a run](images/viewer.png)\n\n"
        "Next: [how to read a run](monitoring.md), [a real model](real-model.md).",
    ),
)

HEAD = """\
# The first hour

Train a tiny model, then train it further on your data with your reward. `python docs/first_hour.py` ran all commands of
this page in a fresh clone. {what}
"""


@dataclass
class Shell:
    """Runs the page's commands in one folder."""

    folder: Path
    environment: dict[str, str]
    fast: bool
    spent: list[tuple[float, float]] = field(default_factory=list)

    def run(self, run: Run) -> tuple[str, float, float]:
        """Output, seconds elapsed and seconds of processor time.  Raises RuntimeError for a command that fails."""
        command = run.fast if self.fast and run.fast else run.command
        began, before = time.monotonic(), _processor()
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command!r} ended with {done.returncode}:\n{done.stdout}")
        self.spent.append((time.monotonic() - began, _processor() - before))
        return done.stdout, *self.spent[-1]


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shortened(text: str, lines: tuple[int, int]) -> str:
    """The first and last lines of an output, without trailing blanks; of a run's steps the first and those that were evaluated."""
    first, last = lines
    found: list[str] = []
    for line in text.strip("\n").splitlines():
        if STEP.match(line) and " eval " not in line and found and (found[-1] == "..." or STEP.match(found[-1])):
            line = "..."
        if not found or line != "..." or found[-1] != "...":
            found.append(line.rstrip())
    if len(found) <= first + last:
        return "\n".join(found)
    end = found[-last:] if last else []
    return "\n".join([*found[:first], "...", *(end[1:] if end[:1] == ["..."] else end)])


def transcript(folder: Path, environment: dict[str, str], *, fast: bool) -> str:
    """Run everything in `folder`, a clone of the repository, and write the page."""
    shell = Shell(folder, environment, fast)
    body: list[str] = []
    for part in PARTS:
        body += [f"## {part.title}", "", part.says, ""]
        for language, name, text in part.files:
            (folder / name).write_text(text, encoding="utf-8")
            body += [f"```{language} file={name}", text.rstrip("\n"), "```", ""]
        for run in part.runs:
            output, _, processor = shell.run(run)
            output = output.replace(str(folder) + "/", "").replace(str(folder), ".")
            body += [run.says, ""] if run.says else []
            body += ["```text", f"$ {run.command}", shortened(output, run.lines), "```", ""]
            if processor > 10:
                body += [f"({processor:.0f} s of processor time)", ""]
        body += [part.after, ""] if part.after else []
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.partition(":")[2].strip() for line in facts if line.startswith("model name")), "unknown")
    processor = sum(spent for _, spent in shell.spent)
    what = f"Together they took {processor / 60:.1f} minutes of processor time, installation included ({cpu})."
    what += "\n`left`, `time` and `tok/s` in the output are wall time on a busy machine."
    return (HEAD.format(what=what) + "\n" + "\n".join(body)).rstrip("\n") + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Clone the repository's last commit, run, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="small settings, this environment, no page")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "groupwise"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
        environment = {**os.environ, "COLUMNS": "118", "PYTHONUNBUFFERED": "1"}
        for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH"):
            environment.pop(name, None)
        if options.fast:
            environment |= fast_environment(folder)
        else:
            environment["PATH"] = f"{folder / '.venv' / 'bin'}:{environment['PATH']}"
        page = transcript(folder, environment, fast=options.fast)
    if options.fast:
        print(page)
    else:
        PAGE.write_text(page, encoding="utf-8")


def fast_environment(folder: Path) -> dict[str, str]:
    """What makes `groupwise` and `python` this interpreter with this library."""
    shims = folder / ".shims"
    shims.mkdir()
    for name, line in (("groupwise", f'exec "{sys.executable}" -m groupwise "$@"'), ("python", f'exec "{sys.executable}" "$@"')):
        (shims / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (shims / name).chmod(0o755)
    return {"PATH": f"{shims}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "118"}


if __name__ == "__main__":
    assert shutil.which("git"), "git is needed"
    main()
