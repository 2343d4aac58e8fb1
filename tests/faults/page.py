# ruff: noqa: E501 - the lines of a page
"""docs/reliability.md, made from the faults that were injected and how they ended (`make test-faults`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

INTRO = """\
# Reliability

What a run survives, and how it ends where it cannot: for whoever leaves one alone over night. Made by `make test-faults`, which injects every fault of both tables and writes this page only if all of them end as they must.

What is promised, and tested there:

- **Nothing is trusted until it has its name.** Checkpoints, models, rollouts and the log's head are written beside their place, synced,
  renamed. A run may be killed at any moment: `python tests/faults/kill_runs.py --kills 200` does it, half of the time inside a save, to
  GRPO, SFT, reward-model, DPO and LoRA runs, on one process and on two, with whole and with sharded saves. Every run comes to the bits of
  one that was never killed, and never loses more than one save interval: of 200 kills, 28 or 29 of each kind and 131 inside a save,
  none lost more than two steps, with a save due every two.
- **An error keeps what was learnt.** Whatever ends a run (a reward that raises, a disk, another process, a signal), the last whole step is
  saved first, on one process or on many; the message says where, and what to do.
- **Resuming mixes nothing.** A changed recipe, a changed data file, a changed reward file, a stage that was trained again, other weights in
  the folder of a teacher, of a critic or under an adapter: each is named and refused; `--accept-changes` continues where the recipe is
  still the same. A change of a file that arguments name only warns: a reward may write to it. What a file of code imports is not looked
  at. "Finished" is believed only if the final model is whole.
- **One message, one exit code, no traceback** (`--debug` shows it): 2 recipe or data, 1 reward, 4 diverged, 5 checkpoint, 6 disk, 7 engine,
  8 another process, 9 memory, 130 Ctrl-C, 128 + N after signal N (143 SIGTERM), 141 where nobody reads the output any more.
- **Secrets stay out** of the run folder, logs and messages, by name, and by what the environment holds. Text that others wrote is
  shown with its control characters as escapes.
- **No pickle is run**: checkpoints are safetensors and JSON; the index of sharded ones is read by an unpickler that knows an index's classes
  only, after every byte was verified.

## Faults that are injected

| case | injected | exit | how it ends |
|---|---|---|---|
"""

TRL_INTRO = """
## The same for TRL

38 faults, one at a time, into six GRPO steps of a tiny random Qwen2 with TRL 1.16 (transformers 5.23, torch 2.13, a CPU), and into the same
with Groupwise: the tests marked `trl(number)` show it each time this page is made. "Silent" means exit code 0 and no error, with a result that is wrong or empty. Of the 38 TRL ends well in 5, silently
wrong in 10, hangs in 2.

| # | injected | TRL 1.16 | Groupwise |
|---|---|---|---|
"""

TRL: tuple[tuple[str, str], ...] = (
    ("reward raises at step 5", "traceback; work since the last save is lost"),
    ("reward sleeps an hour", "hangs, without a message"),
    ("reward gives NaN for one sample", "masked; the warning says it returned None"),
    ("reward gives NaN for all", "silent: six steps, weights as they were"),
    ("reward gives one +inf", "silent: the group's gradient is zero"),
    ("reward gives None for all", "silent but for warnings: nothing is learnt"),
    ("reward's list is too short", "clear error"),
    ("reward returns strings", "`too many dimensions 'str'`"),
    ("reward returns a 2-D tensor", "`only one element tensors can be converted`"),
    ("reward returns None", "`'NoneType' object is not iterable`"),
    ("rewards of 1e38, -1e38, 3e38", "silent: the deviation overflows, no gradient"),
    ("reward asks for a column that is not there", "TypeError after load and first generation"),
    ("tokenizer without PAD", "adds an id outside of the model's vocabulary"),
    ("tokenizer without EOS", "silent: an EOS outside of the vocabulary, completions never end"),
    ("PAD is EOS", "right"),
    ("model's vocabulary smaller than the tokenizer's", "`index out of range in self`"),
    ("NaN in a weight", "`probability tensor contains ...`"),
    ("learning rate 1e30", "the same message at step 2"),
    ("one empty prompt of 16", "`index -1 is out of bounds` at step 3"),
    ("prompt 12 times too long", "silent: trained on"),
    ("prompt is None", "ValueError at the step, without the row"),
    ("empty data set", "silent: saves a \"trained\" model"),
    ("SIGTERM", "11 of 61 steps lost"),
    ("Ctrl-C", "traceback; 11 of 61 steps lost"),
    ("disk full during a save", "unclear; half a checkpoint blocks the resume"),
    ("kill -9 during a save (10 times)", "9 of 9 that landed inside: resume fails until one deletes by hand"),
    ("newest checkpoint cut, emptied or without a file", "6 raw errors, never falls back"),
    ("newest checkpoint without optimizer or random state", "silent: resumes with fresh ones"),
    ("one bit flipped in the weights", "silent: trains on"),
    ("resumed and uninterrupted run, bit by bit", "differ where a save falls inside a rollout's updates"),
    ("pickle bomb in optimizer, scheduler or random state", "refused"),
    ("`hub_token: hf_...` in the recipe", "plain text in every checkpoint"),
    ("misspelt key in the recipe", "refused, below 115 lines of usage"),
    ("`loss_type: nosuch`", "fails after load and generation, 62 lines"),
    ("`epsilon: -3`; the same key twice", "silent: accepted"),
    ("model folder misspelt", "`couldn't connect to ...`"),
    ("a built-in math reward on plain text", "`string indices must be integers`"),
    ("rollout server accepts and never answers", "hangs"),
)  # fmt: skip
"""What was injected, and what TRL did.  What Groupwise does is what tests marked `trl(number, outcome)` show."""


def page_of(rows: Sequence[Any], ours: Mapping[int, str]) -> str:
    """The page.  rows: with `case`, `injected`, `status` and `outcome`.   ours: what Groupwise does under each of `TRL`, from 1."""
    faults = "".join(f"| {row.case} | {cell(row.injected)} | {row.status} | {cell(row.outcome)} |\n" for row in rows)
    both = enumerate(TRL, start=1)
    trl = "".join(f"| {place} | {injected} | {theirs} | {cell(ours[place])} |\n" for place, (injected, theirs) in both)
    return f"{INTRO}{faults}{TRL_INTRO}{trl}"


def cell(text: str) -> str:
    """Text inside a table of Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;")
