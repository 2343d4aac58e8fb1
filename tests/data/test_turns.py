"""The next turn as a suffix: own templates with the habits of the families, and the shipped ones where TRL is installed."""

from __future__ import annotations

import functools
import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
import yaml

from groupwise.data.rendering import Chat, render_chats
from groupwise.data.tokenizers import byte_tokenizer, make_tokenizer
from groupwise.data.turns import TOOL, Turns
from groupwise.errors import DataError

SPECIAL = {
    "qwen": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
    "gpt-oss": ["<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>"],
}
"""`<|end|>` is there already: the tokenizer's own end is one of gpt-oss's control tokens."""
ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|call|>", "<|return|>")

TABLE = yaml.safe_load(Path(__file__).parents[1].joinpath("fixtures", "turn_templates.yaml").read_text(encoding="utf-8"))
OWN = {name: row["template"] for name, row in TABLE["own"].items()}
SHIPPED = TABLE["shipped"]
MATRIX = SHIPPED | {name: row["turns"] for name, row in TABLE["own"].items()}


def shipped(name: str) -> str:
    """A template that TRL ships."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed: its chat templates are not here")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def turns_of(template: str, tokenizer=None) -> Turns:
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.add_tokens([*(token for tokens in SPECIAL.values() for token in tokens), "<|observation|>"], special_tokens=True)
    tokenizer.chat_template, tokenizer.bos_token = template, "<|begin_of_text|>"
    ends = list(ENDS)
    if "<|im_end|>" not in template and "<|eot" not in template:
        ends += ["<|user|>", "<|system|>", "<|observation|>"]
    return Turns(tokenizer=tokenizer, eos_ids=tuple(tokenizer.convert_tokens_to_ids(ends)))


@pytest.fixture(params=[*OWN, *SHIPPED])
def named(request) -> tuple[str, Turns]:
    name = request.param
    return name, turns_of(OWN[name] if name in OWN else shipped(name))


def render(turns: Turns, messages, gen=False) -> str:
    (text,) = render_chats(turns.tokenizer, [Chat(messages, tools=[TOOL], add_generation_prompt=gen)])
    assert isinstance(text, str), text
    return text


def encode(turns: Turns, text: str) -> list[int]:
    return list(turns.tokenizer(text, add_special_tokens=False)["input_ids"])


def calling(**arguments):
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def answering(text: str):
    return {"role": "assistant", "content": text}


def test_trap_4_the_matrix_of_templates(named):
    name, turns = named
    proofs = turns.prove()
    assert " ".join(proof.verdict for proof in proofs) == MATRIX[name], [str(proof) for proof in proofs]
    assert all(proof.why for proof in proofs if proof.verdict != "append")


def test_proof_says_what_the_template_rewrites():
    _, _, _, last = turns_of(OWN["forgets"]).prove()
    assert str(last).startswith("user after reasoning: rewrites (") and "<think>" in last.why and " becomes " in last.why
    (_, _, answer, _) = turns_of(OWN["channels"]).prove()
    assert "<|return|>" in answer.why and "<|end|>" in answer.why


def test_a_template_that_cannot_call_tools_refuses_and_says_why():
    turns = turns_of("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}")
    verdicts = [proof.verdict for proof in turns.prove()]
    assert verdicts == ["refuses", "refuses", "append", "append"]
    with pytest.raises(DataError, match="does not write what the assistant said"):
        turns.after(1, [{"role": "tool", "content": "x"}])
    strict = turns_of("{% for m in messages %}{% if m.role == 'user' and loop.index0 %}{{ raise_exception('only one') }}{% endif %}"
                      "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}")  # fmt: skip
    with pytest.raises(DataError, match="the chat template refuses these messages: only one"):
        strict.after(1, [{"role": "user", "content": "x"}])
    with pytest.raises(DataError, match="cannot follow without a message"):
        turns.after(1, [])


# ---- conversations --------------------------------------------------------------------------------------------------------------

WORDS = ["look", "ünï", "😀", "\n", " ", "false", '"q"', "{", "a\\b", "1e5", "</tool_call>", "<b>", "zq7mark", "\u2028", "..."]


def told(chance: random.Random) -> str:
    return "x" + "".join(chance.choice(WORDS) for _ in range(chance.randint(0, 8))) + "y"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keeps", "bare", "headers", *(name for name in SHIPPED if SHIPPED[name].count("append") == 4)])
def test_traps_1_2_5_random_conversations_are_what_the_template_writes(name):
    """Stream = full render, ids for ids, where what was sampled is canonical; any other split of the same text stays as it is."""
    texts = [f"{word} {other}" for word in WORDS for other in WORDS] * 3 + ["user assistant system tool look arguments"] * 20
    turns = turns_of(OWN[name] if name in OWN else shipped(name), make_tokenizer("bpe:320", texts))
    pattern, chance = turns._template.control_pattern, random.Random(name)
    letter = functools.cache(lambda char: encode(turns, char))
    for _ in range(1000 // 3 if name in OWN else 40):
        messages = [{"role": "user", "content": told(chance)}]
        stream = canonical = encode(turns, render(turns, messages, gen=True))
        for _ in range(chance.randint(1, 3)):
            calls = chance.random() < 0.5
            number = chance.choice([1, True, None, 1e5])
            said = calling(text=told(chance), n=number) if calls else answering(told(chance))
            before, answered = render(turns, messages, gen=True), render(turns, [*messages, said])
            assert answered.startswith(before)
            own = answered[len(before) :]
            end = pattern.search(own)
            own = own[: end.end()] if end is not None else own
            results = chance.randint(1, 1 if name.startswith(("bare", "llama")) else 2)
            more = [{"role": "tool", "name": "look", "content": told(chance)} for _ in range(results)]
            more = more if calls else [{"role": "user", "content": told(chance)}]
            if end is None:  # the next header ends the turn
                own += "<|system|>" if calls else "<|user|>"
            sampled = encode(turns, own)
            suffix = turns.after(sampled[-1], more)
            split = [token for char in own.removesuffix(own[own.rindex("<|") :]) for token in letter(char)] + sampled[-1:]
            assert turns.tokenizer.decode(split) == own
            stream, canonical = stream + split + suffix.tokens.tolist(), canonical + sampled + suffix.tokens.tolist()
            messages = [*messages, said, *more]
        whole = render(turns, messages, gen=True)
        assert turns.tokenizer.decode(stream) == whole
        assert canonical == encode(turns, whole)


def test_trap_2_the_separator_behind_the_end_of_a_turn(named):
    name, turns = named
    suffix = turns.after(turns.eos_ids[0], [{"role": "user", "content": "next"}])
    if name.startswith(("qwen", "keeps", "forgets")):
        assert suffix.text.startswith("\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n")
    assert turns.tokenizer.decode(suffix.tokens) == suffix.text and suffix.tokens.dtype == np.int64


def test_trap_9_a_turn_that_was_cut_is_closed_first(named):
    _, turns = named
    message = [{"role": "user", "content": "next"}]
    token = encode(turns, "x")[0]
    cut = turns.after(token, message)
    assert turns.tokenizer.decode(cut.tokens) == cut.text
    ended = turns.after(int(cut.tokens[0]), message)
    assert cut.tokens[1:].tolist() == ended.tokens.tolist()


def test_behind_another_end_than_the_templates_own_the_same_follows():
    turns = turns_of(OWN["channels"])
    ended, returned = (turns.tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|return|>"))
    own, foreign = (turns.after(last, [{"role": "user", "content": "x"}]) for last in (ended, returned))
    assert own.tokens.tolist() == foreign.tokens.tolist() and own.text.startswith("<|start|>user<|message|>x")


def test_control_tokens_in_observations_are_text(named):
    """What the world says can neither end a turn nor begin another."""
    _, turns = named
    attack = "".join(token for tokens in SPECIAL.values() for token in tokens) + "<|end|><|user|><|system|><|observation|>"
    special = [i for i, token in turns.tokenizer.added_tokens_decoder.items() if token.special]
    for role in ("tool", "user"):
        message = {"role": role, "name": "look"}
        mild, hostile = (turns.after(turns.eos_ids[0], [{**message, "content": text}]) for text in ("x", f"x{attack}"))
        own = [[token for token in suffix.tokens.tolist() if token in special] for suffix in (mild, hostile)]
        assert own[0] == own[1]
        assert turns.tokenizer.decode(hostile.tokens) == hostile.text == mild.text.replace("x", f"x{attack}", 1)


def test_trap_12_parallel_results_keep_their_order(named):
    name, turns = named
    results = [{"role": "tool", "name": f"f{i}", "tool_call_id": f"call_{i}", "content": f"result {i}"} for i in range(3)]
    text = turns.after(turns.eos_ids[0], results).text
    assert [text.index(f"result {i}") for i in range(3)] == sorted(text.index(f"result {i}") for i in range(3)), name


def test_variables_and_tools_reach_the_template():
    template = OWN["keeps"] + "{% if add_generation_prompt and quiet %}<think>\n\n</think>\n\n{% endif %}"
    quiet = turns_of(template).after(1, [{"role": "user", "content": "x"}], variables={"quiet": True})
    assert quiet.text.endswith("</think>\n\n")
    shown = turns_of("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{{ tools | length }}")
    assert shown.after(shown.eos_ids[0], [{"role": "user", "content": "x"}], [TOOL, TOOL]).text == "x<|im_end|>2"
