# ruff: noqa: E501 - the lines of a page
"""outcomes.md beside this file, made from the faults that were injected and how they ended (`make test-faults`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

INTRO = """\
# Injected faults and how they end

`make test-faults` injects every fault of both tables and writes this page if all of them end as they must. What it means for a run:
[docs/reliability.md](../../docs/reliability.md).

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
