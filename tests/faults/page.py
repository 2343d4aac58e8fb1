# ruff: noqa: E501 - the lines of a page
"""outcomes.md beside this file, made from the faults that were injected and how they ended (`make test-faults`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INTRO = """\
# Injected faults and how they end

`make test-faults` injects every fault of the first table and writes this page if all of them end as they must. What it means for a run:
[docs/reliability.md](../../docs/reliability.md).

## Faults that are injected

| case | injected | exit | how it ends |
|---|---|---|---|
"""

TRL_INTRO = """
## The same for TRL

38 faults, one at a time, into six GRPO steps of a tiny random Qwen2 with TRL 1.16 (transformers 5.23, torch 2.13, a CPU), and into the same
with Groupwise. "Silent" means exit code 0 and no error, with a result that is wrong or empty. Of the 38 TRL ends well in 5, silently
wrong in 10, hangs in 2.

| # | injected | TRL 1.16 | Groupwise |
|---|---|---|---|
"""

TRL = (
    ("reward raises at step 5", "traceback; work since the last save is lost", "one message; the last whole step is saved"),
    ("reward sleeps an hour", "hangs, without a message", "the call is ended at its timeout, its samples are masked and counted"),
    ("reward gives NaN for one sample", "masked; the warning says it returned None", "refused: the reward, the sample, the value"),
    ("reward gives NaN for all", "silent: six steps, weights as they were", "refused, as above"),
    ("reward gives one +inf", "silent: the group's gradient is zero", "refused, as above"),
    ("reward gives None for all", "silent but for warnings: nothing is learnt", "ends after 3 steps without a single reward"),
    ("reward's list is too short", "clear error", "clear error with both lengths"),
    ("reward returns strings", "`too many dimensions 'str'`", "names the reward, the type and the place"),
    ("reward returns a 2-D tensor", "`only one element tensors can be converted`", "names the reward and the shape"),
    ("reward returns None", "`'NoneType' object is not iterable`", "names the reward and what it must return"),
    ("rewards of 1e38, -1e38, 3e38", "silent: the deviation overflows, no gradient", "advantages are finite (float64)"),
    ("reward asks for a column that is not there", "TypeError after load and first generation", "refused before weights are loaded"),
    ("tokenizer without PAD", "adds an id outside of the model's vocabulary", "there is no padding"),
    ("tokenizer without EOS", "silent: an EOS outside of the vocabulary, completions never end", "refused, with what to set"),
    ("PAD is EOS", "right", "right: there is no padding"),
    ("model's vocabulary smaller than the tokenizer's", "`index out of range in self`", "refused before weights are read"),
    ("NaN in a weight", "`probability tensor contains ...`", "refused with the parameter's name"),
    ("learning rate 1e30", "the same message at step 2", "refused with the recipe: out of range"),
    ("one empty prompt of 16", "`index -1 is out of bounds` at step 3", "the row is reported and left out"),
    ("prompt 12 times too long", "silent: trained on", "left out and counted before step 1"),
    ("prompt is None", "ValueError at the step, without the row", "left out and counted, with file and line"),
    ("empty data set", "silent: saves a \"trained\" model", "refused"),
    ("SIGTERM", "11 of 61 steps lost", "143; the last whole step is saved"),
    ("Ctrl-C", "traceback; 11 of 61 steps lost", "130; the last whole step is saved"),
    ("disk full during a save", "unclear; half a checkpoint blocks the resume", "6; nothing half stays, the older ones are intact"),
    ("kill -9 during a save (10 times)", "9 of 9 that landed inside: resume fails until one deletes by hand", "resumes by itself"),
    ("newest checkpoint cut, emptied or without a file", "6 raw errors, never falls back", "named in a warning; the one before is used"),
    ("newest checkpoint without optimizer or random state", "silent: resumes with fresh ones", "named; the one before is used"),
    ("one bit flipped in the weights", "silent: trains on", "named; the one before is used"),
    ("resumed and uninterrupted run, bit by bit", "differ where a save falls inside a rollout's updates", "equal"),
    ("pickle bomb in optimizer, scheduler or random state", "refused", "there is no pickle to put it into"),
    ("`hub_token: hf_...` in the recipe", "plain text in every checkpoint", "redacted"),
    ("misspelt key in the recipe", "refused, below 115 lines of usage", "line, key, and what was meant"),
    ("`loss_type: nosuch`", "fails after load and generation, 62 lines", "line, value and the choices"),
    ("`epsilon: -3`; the same key twice", "silent: accepted", "both in the one list of mistakes"),
    ("model folder misspelt", "`couldn't connect to ...`", "no such folder, and what is near"),
    ("a built-in math reward on plain text", "`string indices must be integers`", "plain text and messages are both read"),
    ("rollout server accepts and never answers", "hangs", "ends at its deadline, names the server"),
)  # fmt: skip
"""What was injected, what TRL did, and what Groupwise does, which tests beside its code show."""


def page_of(rows: Sequence[Any]) -> str:
    """The page.  rows: with `case`, `injected`, `status` and `outcome`."""
    faults = "".join(f"| {row.case} | {cell(row.injected)} | {row.status} | {cell(row.outcome)} |\n" for row in rows)
    trl = "".join(f"| {place} | {' | '.join(cells)} |\n" for place, cells in enumerate(TRL, start=1))
    return f"{INTRO}{faults}{TRL_INTRO}{trl}"


def cell(text: str) -> str:
    """Text inside a table of Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;")
