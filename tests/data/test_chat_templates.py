"""What SFT, pairs and steps learn behind the chat templates of published families: what the template writes, to the letter."""

from pathlib import Path

import pytest
import yaml
from encoders import encode_demonstrations, encode_pairs, encode_solutions
from transformers import GenerationConfig

from groupwise.data.rendering import CLOCK, Chat, render_chats
from groupwise.data.sources import SourceRows
from groupwise.data.templates import Template
from groupwise.data.tokenizers import byte_tokenizer
from groupwise.models.loading import eos_ids

TABLE = yaml.safe_load(Path(__file__).parents[1].joinpath("fixtures", "chat_templates.yaml").read_text())
FAMILIES = pytest.mark.parametrize("family", TABLE, ids=lambda family: family["family"])
REASONED = "<think>\nso\n</think>\n\nyo"


def made(family):
    """A byte tokenizer with a family's marks and template, and its EOS ids; two newlines are one token, as they are there."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": family["tokens"]})
    tokenizer.add_tokens([*family.get("added", ()), "\n\n"])
    tokenizer.eos_token, tokenizer.bos_token = family["eos"], family.get("bos")
    tokenizer.chat_template = family["template"]
    ends = GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(family["ends"]))
    return tokenizer, eos_ids(ends, tokenizer)


def learnt(family, form, row, *, chat=True):
    """(prompt, completion) as texts, of each answer that a form of rows learns."""
    tokenizer, ends = made(family)
    template = Template(tokenizer=tokenizer, chat=chat, variables=family.get("variables", {}))
    encode = {"demonstration": encode_demonstrations, "pair": encode_pairs, "steps": encode_solutions}[form]
    (record,), report = encode(SourceRows("rows", [row]), template, context=1000, eos_ids=ends)
    sides = [record.chosen, record.rejected] if form == "pair" else [record.completion]
    return tokenizer, [(tokenizer.decode(record.prompt), tokenizer.decode(side)) for side in sides], record, report


ASKED = {"role": "user", "content": "q"}
SAID = {"role": "assistant", "content": "yo"}


@FAMILIES
@pytest.mark.parametrize(
    "row", [{"prompt": "q", "completion": "yo"}, {"messages": [ASKED, SAID]}, {"prompt": [ASKED], "completion": [SAID]}]
)
def test_a_demonstration_learns_what_the_template_writes(family, row):
    tokenizer, texts, _, report = learnt(family, "demonstration", row)
    assert texts == [(family["prompt"], family["learnt"])]
    closed = [remark for remark in report.noted if remark.startswith("without the reasoning")]
    assert bool(closed) == bool(family.get("rewrites"))
    chat = Chat([ASKED, SAID], variables=family.get("variables", {}))
    (whole,) = render_chats(tokenizer, [chat])
    assert family.get("rewrites") or whole.rstrip("\n") == family["prompt"] + family["learnt"]


@FAMILIES
def test_both_sides_of_a_pair_learn_what_the_template_writes(family):
    _, texts, *_ = learnt(family, "pair", {"prompt": "q", "chosen": "yo", "rejected": [{**SAID, "content": "no"}]})
    assert texts == [(family["prompt"], family["learnt"]), (family["prompt"], family["learnt"].replace("yo", "no"))]


@FAMILIES
def test_steps_stand_where_the_template_writes_an_answer(family):
    row = {"prompt": "q", "completions": ["hey", "yo"], "labels": [True, False]}
    tokenizer, texts, record, _ = learnt(family, "steps", row)
    assert texts == [(family["prompt"], family["learnt"].replace("yo", "hey\nyo"))]
    first = tokenizer.decode(record.completion[: record.ends[0] + 1])
    assert first.endswith("hey\n") and record.ends[-1] == record.completion.size - 1


@FAMILIES
def test_strings_and_texts_end_with_the_tokenizers_own_end(family):
    end = family["eos"]
    bos = family.get("bos", "")
    row = {"prompt": "q", "completion": "yo"}
    assert learnt(family, "demonstration", row, chat=False)[1] == [("q", "yo" + end)]
    assert learnt(family, "pair", {"prompt": "q", "chosen": "yo", "rejected": "no"}, chat=False)[1][0] == ("q", "yo" + end)
    steps = {"prompt": "q", "completions": ["hey", "yo"], "labels": [1, 0]}
    assert learnt(family, "steps", steps, chat=False)[1] == [("q", "hey\nyo" + end)]
    ((prompt, completion),) = learnt(family, "demonstration", {"text": bos + "qyo"}, chat=False)[1]
    assert prompt + completion == bos + "qyo" + end and prompt in (bos, "q")


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "deepseek-r1"])
def test_an_answer_that_brings_reasoning_keeps_it(name):
    (family,) = [one for one in TABLE if one["family"] == name]
    _, ((prompt, completion),), *_ = learnt(family, "demonstration", {"prompt": "q", "completion": REASONED})
    assert prompt + completion == family["prompt"].removesuffix("<think>\n") + REASONED + family["eos"]


def test_a_template_writes_the_date_of_the_runs_moment_and_none_is_left_for_the_next():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d %H:%M') }}"
    chats = [Chat([ASKED], variables={CLOCK: 86400.0 * 366}), Chat([ASKED], variables={CLOCK: 0}), Chat([ASKED])]
    dated, first, today = render_chats(tokenizer, chats)
    assert (dated, first) == ("1971-01-02 00:00", "1970-01-01 00:00") and today > "2024"
