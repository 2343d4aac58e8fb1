from types import SimpleNamespace

import numpy as np
import pytest
from encoders import encode_pairs

from groupwise.config.settings import DataSettings
from groupwise.data.encoding import Pair
from groupwise.data.images import NO_MODEL
from groupwise.data.sources import SourceRows
from groupwise.data.templates import Template
from groupwise.errors import ConfigError, DataError
from groupwise.training.objectives import OBJECTIVES


def pairs(tokenizer, rows, context=200, chat=True, **options):
    template = Template(tokenizer=tokenizer, chat=chat)
    return encode_pairs(SourceRows("f.json", rows), template, context=context, eos_ids=(tokenizer.eos_token_id,), **options)


def test_every_form_of_a_pair_gives_the_same_ids(tokenizer):
    user = {"role": "user", "content": "1+2"}
    good, bad = ({"role": "assistant", "content": content} for content in ("3", "4"))
    rows = [
        {"prompt": "1+2", "chosen": "3", "rejected": "4"},
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
        {"prompt": "1+2", "chosen": [user, good], "rejected": [user, bad]},
        {"instruction": "1+2", "input": "", "output": "ignored", "chosen": "3", "rejected": "4"},
    ]
    built, report = pairs(tokenizer, rows)
    decoded = {tuple(tokenizer.decode(side) for side in (one.prompt, one.chosen, one.rejected)) for one in built}
    assert decoded == {("<|user|>1+2<|end|><|assistant|>", "3<|end|>", "4<|end|>")}
    assert report.kept == 5


def test_identical_empty_and_over_long_pairs_are_counted_never_silently_kept(tokenizer):
    rows = [
        {"prompt": "1", "chosen": "3", "rejected": "4"},
        {"prompt": "2", "chosen": "3", "rejected": "3"},
        {"prompt": "2", "chosen": "3<|end|>", "rejected": "3"},
        {"prompt": "3", "chosen": "", "rejected": "3"},
        {"prompt": "", "chosen": "1", "rejected": "3"},
        {"prompt": "4", "chosen": "1", "rejected": "3" * 30},
    ]
    built, report = pairs(tokenizer, rows, context=20, chat=False)
    assert [pair.id for pair in built] == ["0"]
    dropped = {"empty": 1, "with an empty completion": 1, "with chosen = rejected": 2, "longer than 20 tokens (the test)": 1}
    assert report.dropped == dropped


def test_a_prompt_is_cut_the_same_for_both_sides(tokenizer):
    row = {"prompt": "123456", "chosen": "7", "rejected": "8899"}
    (pair,), _ = pairs(tokenizer, [row], context=8, chat=False, too_long="truncate_left")
    assert tokenizer.decode(pair.prompt) == "456"


def test_missing_columns_and_different_prompts(tokenizer):
    with pytest.raises(DataError, match=r"row 1: no column 'rejected'; there are: chosen, prompt"):
        pairs(tokenizer, [{"prompt": "1", "chosen": "2"}])
    with pytest.raises(DataError, match="row 1: chosen is 5"):
        pairs(tokenizer, [{"prompt": "1", "chosen": 5, "rejected": "2"}])
    good, bad = ([{"role": "user", "content": q}, {"role": "assistant", "content": "3"}] for q in "12")
    with pytest.raises(DataError, match="whose conversations differ before the last turn"):
        pairs(tokenizer, [{"chosen": good, "rejected": bad}])
    with pytest.raises(ConfigError, match=r"set data\.template: alpaca"):
        pairs(tokenizer, [{"instruction": "1", "chosen": "2", "rejected": "3"}], chat=False)


def test_a_pair_cannot_be_built_wrong():
    one = np.array([1, 2])
    with pytest.raises(AssertionError, match="chosen and rejected are the same"):
        Pair(id="0", prompt=one, chosen=one, rejected=one.copy())


@pytest.mark.parametrize(("objective", "noted"), [("dpo", 1), ("reward", 0)])
def test_a_margin_is_used_or_named_as_not_read(tokenizer, write, objective, noted):
    rows = [{"prompt": "1", "chosen": "2", "rejected": "3", "margin": 2.0}, {"prompt": "2", "chosen": "2", "rejected": "3"}]
    recipe = SimpleNamespace(data=DataSettings(path=write(rows)), seed=0, reward_model=SimpleNamespace(replay=None))
    blueprint = SimpleNamespace(context=64, eos_ids=(tokenizer.eos_token_id,), tokenizer=tokenizer, images=NO_MODEL)
    loaded = OBJECTIVES[objective].load(recipe, blueprint)
    assert loaded.report.noted["with a margin, which only reward models read"] == noted
    assert [pair.margin for pair in loaded.train] == [2.0, 0.0]
