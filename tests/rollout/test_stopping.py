"""EOS ids, stop strings and the limit, and which of them wins."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from groupwise.records import Finish
from groupwise.rollout.stopping import Stopping


@pytest.fixture(scope="module")
def bpe():
    """Byte-level: characters outside ASCII are several tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<eos>"])
    core.train_from_iterator(["the answer is </answer> so the answer\n\nQ: is"] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def first_finish(stopping, tokens, limit):
    for n in range(1, len(tokens) + 1):
        finish = stopping.finish(tokens[:n], limit)
        if finish is not None:
            return n, finish
    return None


@pytest.mark.parametrize(
    "stop", [("</answer>",), ("\n\nQ:",), ("é!",), ("日本",), (" is",), ("zz", "s <", "ö"), ("<eos>",), (" ",)]
)
def test_a_stop_string_ends_the_row_at_the_token_that_completes_it(bpe, stop):
    rng = random.Random(0)
    texts = ["the answer is 4</answer> so", "日本 é! ö", "so\n\nQ: is it", "nothing here"]
    for text in texts:
        tokens = bpe(text, add_special_tokens=False)["input_ids"]
        tokens.insert(rng.randrange(len(tokens)), bpe.eos_token_id)
        expected = next(
            (n for n in range(1, len(tokens) + 1) if any(s in bpe.decode(tokens[:n], skip_special_tokens=False) for s in stop)),
            None,
        )
        found = first_finish(Stopping((), stop, bpe), tokens, 10_000)
        assert found == (None if expected is None else (expected, Finish.STOP))


def test_eos_wins_over_a_stop_string_and_that_over_the_limit(bpe):
    tokens = bpe("the answer", add_special_tokens=False)["input_ids"]
    assert Stopping((0, tokens[-1]), ("answer",), bpe).finish(tokens, len(tokens)) is Finish.EOS
    assert Stopping((0,), ("answer",), bpe).finish(tokens, len(tokens)) is Finish.STOP
    assert Stopping((0,), (), bpe).finish(tokens, len(tokens)) is Finish.LENGTH
    assert Stopping((0,), (), bpe).finish(tokens, len(tokens) + 1) is None


@pytest.mark.parametrize("stop", ["\n\n", "</answer>", " "])
def test_looking_for_a_stop_string_costs_each_token_the_same(bpe, stop, monkeypatch):
    """Also where every token may be the end of one, as for one that ends in white space."""
    decoded = []
    decode = bpe.decode
    monkeypatch.setattr(bpe, "decode", lambda ids, **how: (decoded.append(len(ids)), decode(ids, **how))[1])
    tokens = bpe("日theanswer" * 200, add_special_tokens=False)["input_ids"]
    assert first_finish(Stopping((), (stop,), bpe), tokens, 10_000) is None
    assert sum(decoded) < 100 * len(tokens)


@pytest.mark.parametrize("seed", range(20))
def test_a_stop_string_is_found_wherever_it_stands_in_a_long_text(bpe, seed):
    """Against the whole text, decoded after every token: pieces of characters, tokens without a text, spaces at the edges."""
    rng = random.Random(seed)
    stop = rng.choice(["\n\n", " is", "é", "日本", "r </", "answer\n\nQ: is"])
    text = "".join(rng.choice(["a", "é", "日", "本", " ", "\n", "answer", "the", "</", "r ", " is"]) for _ in range(200))
    tokens = bpe(text, add_special_tokens=False)["input_ids"]
    expected = next((n for n in range(1, len(tokens) + 1) if stop in bpe.decode(tokens[:n], skip_special_tokens=False)), None)
    found = first_finish(Stopping((), (stop,), bpe), tokens, 10_000)
    assert found == (None if expected is None else (expected, Finish.STOP))
