"""Score heads against scores that are known by construction, and against transformers' own sequence classification."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sample_texts import TOKENIZER
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Gemma3Config,
    LlamaForSequenceClassification,
)

from groupwise.config.settings import LoraSettings, ModelSettings
from groupwise.errors import ConfigError
from groupwise.models import passes
from groupwise.models.attention import plain_attention
from groupwise.models.lora import adapt, take_over_adapter
from groupwise.models.policy import Policy
from groupwise.models.reward_head import (
    SUM_UNIT,
    Answer,
    add_head,
    check_scores,
    load_scorer,
    pool_weights,
    reads_tokens,
    score_tokens,
    whole_scores,
    wrap_scorer,
)
from groupwise.models.saving import save, save_to_resume
from groupwise.proof.prove import prove


class Lookup(nn.Module):
    """A backbone whose state after a token is the token's id, whatever stands before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        state = torch.zeros(*input_ids.shape, self.width)
        state[..., 0] = input_ids.float()
        return SimpleNamespace(last_hidden_state=state)


@pytest.fixture
def scorer(tiny_policy: Callable[..., Policy]) -> Callable[..., Policy]:
    """`scorer(family, pooling)`: a random scoring model of 2 layers."""

    def make(family: str = "llama", pooling: str = "last", **options: object) -> Policy:
        causal = tiny_policy(family, **options)
        model = add_head(causal.model, causal.tokenizer, causal.eos_ids, pooling, seed=1)  # type: ignore[arg-type]
        return wrap_scorer(model, causal.tokenizer, options.get("settings"))  # type: ignore[arg-type]

    return make


@pytest.fixture
def answers() -> list[Answer]:
    """Ragged completions of two prompts, one a single token; EOS (id 1) at the end, in the middle, and nowhere."""
    prompts = {"a": [7, 8, 9, 1, 7], "b": [5]}
    completions = {"a": [[6, 7, 8, 1], [1], [1, 6, 1], [9, 9, 9, 9, 9, 9]], "b": [[6, 1], [12, 13, 14, 15, 16, 17, 18, 1]]}
    return [Answer(g, np.array(prompts[g]), np.array(ids)) for g in prompts for ids in completions[g]]


def total(pooling: str, scores: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([pool_weights(pooling, score_n.size) @ score_n for score_n in scores])  # type: ignore[arg-type]


@pytest.mark.parametrize("max_tokens_per_microbatch", [1, 9, 1000])
@pytest.mark.parametrize("attention", ["shared", "packed"])
def test_known_token_scores_give_the_exact_pooled_score(
    scorer: Callable[..., Policy], answers: list[Answer], max_tokens_per_microbatch: int, attention: str
) -> None:
    policy = scorer(settings=ModelSettings(attention=attention))  # type: ignore[arg-type]
    width = policy.model.score.weight.shape[1]
    setattr(policy.model, policy.model.base_model_prefix, Lookup(width))
    policy.model.score.weight.data = torch.eye(1, width) / 4
    found = score_tokens(policy, answers, max_tokens_per_microbatch=max_tokens_per_microbatch)
    for score_n, answer in zip(found, answers, strict=True):
        np.testing.assert_array_equal(score_n, answer.completion / 4)
    np.testing.assert_array_equal(total("last", found), [answer.completion[-1] / 4 for answer in answers])
    np.testing.assert_allclose(total("mean", found), [answer.completion.mean() / 4 for answer in answers], rtol=1e-15)
    np.testing.assert_allclose(total("sum", found), [answer.completion.sum() / 4 / SUM_UNIT for answer in answers], rtol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_scores_do_not_depend_on_what_else_is_scored(scorer: Callable[..., Policy], answers: list[Answer], family: str) -> None:
    policy = scorer(family)
    alone = [score_tokens(policy, [answer], max_tokens_per_microbatch=1000)[0] for answer in answers]
    for order, max_tokens_per_microbatch in ((range(6), 1000), ([5, 2, 0, 4, 1, 3], 1000), (range(6), 12), ([3, 3, 0], 40)):
        together = score_tokens(policy, [answers[i] for i in order], max_tokens_per_microbatch=max_tokens_per_microbatch)
        for i, score_n in zip(order, together, strict=True):
            np.testing.assert_allclose(score_n, alone[i], atol=1e-6)
    assert np.ptp(np.concatenate(alone)) > 0.1


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_saved_model_scores_the_same_in_transformers(
    scorer: Callable[..., Policy], answers: list[Answer], family: str, tmp_path: Path
) -> None:
    policy = scorer(family)
    ours = total("last", score_tokens(policy, answers, max_tokens_per_microbatch=64))
    save(policy, tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rows = [[*answer.prompt.tolist(), *answer.completion.tolist()] for answer in answers]
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")  # as TRL calls a reward model: a padded batch
    theirs = model(**batch).logits
    assert theirs.shape == (6, 1)
    np.testing.assert_allclose(theirs[:, 0].detach().numpy(), ours, atol=1e-5)
    again = load_scorer(ModelSettings(path=str(tmp_path)))
    np.testing.assert_allclose(total("last", score_tokens(again, answers, max_tokens_per_microbatch=64)), ours, atol=1e-6)


def test_a_pad_token_is_added_to_a_text_part_with_a_section_of_its_own() -> None:
    """As Gemma 3's: its vocabulary is not written where others write it."""
    text = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"image_size": 16, "patch_size": 8}
    causal = AutoModelForCausalLM.from_config(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.pad_token = None
    model = add_head(causal, tokenizer, [tokenizer.eos_token_id], "last", seed=0)
    assert model.config.get_text_config().vocab_size == len(tokenizer) == len(TOKENIZER) + 1


def test_an_eos_that_is_also_the_pad_is_not_hidden(
    tiny_policy: Callable[..., Policy], answers: list[Answer], tmp_path: Path
) -> None:
    causal = tiny_policy("gpt2")
    causal.tokenizer.pad_token = causal.tokenizer.eos_token
    policy = wrap_scorer(add_head(causal.model, causal.tokenizer, causal.eos_ids, "last", seed=1), causal.tokenizer)
    assert policy.tokenizer.pad_token_id not in policy.eos_ids
    save(policy, tmp_path)
    row = torch.from_numpy(np.concatenate([answers[0].prompt, answers[0].completion, [policy.tokenizer.pad_token_id]]))
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()(row[None]).logits
    assert theirs.item() == pytest.approx(score_tokens(policy, answers[:1], max_tokens_per_microbatch=64)[0][-1], abs=1e-5)
    assert score_tokens(policy, answers[:1], max_tokens_per_microbatch=64)[0][-1] != pytest.approx(
        score_tokens(policy, answers[:1], max_tokens_per_microbatch=64)[0][-2]
    )


def test_in_tiles_streams_have_few_sizes_and_the_same_scores(
    scorer: Callable[..., Policy], answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, totals, hidden = scorer(), [], passes.hidden
    expected = score_tokens(policy, answers, max_tokens_per_microbatch=12)
    monkeypatch.setattr("groupwise.models.policy.tiled", lambda dtype: True)

    def counted(policy: Policy, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        totals.append(tokens.numel())
        return hidden(policy, tokens, *rest)

    monkeypatch.setattr(passes, "hidden", counted)
    for ours, theirs in zip(score_tokens(policy, answers, max_tokens_per_microbatch=12), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert len(totals) > 1 and all(total % 16 == 0 for total in totals)


@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_pooling_is_recorded(scorer: Callable[..., Policy], pooling: str, tmp_path: Path) -> None:
    save(scorer(pooling=pooling), tmp_path)
    assert load_scorer(ModelSettings(path=str(tmp_path))).model.config.pooling == pooling


def test_scorers_saved_by_transformers_score_the_same(
    tiny_policy: Callable[..., Policy], answers: list[Answer], tmp_path: Path
) -> None:
    causal = tiny_policy("llama")
    config = causal.model.config
    config.num_labels = 1
    theirs = LlamaForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path / "llama")
    causal.tokenizer.save_pretrained(tmp_path / "llama")
    policy = load_scorer(ModelSettings(path=str(tmp_path / "llama")))
    with plain_attention(theirs):
        expected = [theirs(torch.from_numpy(np.concatenate([a.prompt, a.completion]))[None]).logits.item() for a in answers]
    np.testing.assert_allclose(total("last", score_tokens(policy, answers, max_tokens_per_microbatch=64)), expected, atol=1e-6)

    bert = BertConfig(vocab_size=80, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1)
    encoder = BertForSequenceClassification(bert).eval()
    encoder.save_pretrained(tmp_path / "bert")
    causal.tokenizer.save_pretrained(tmp_path / "bert")
    policy = load_scorer(ModelSettings(path=str(tmp_path / "bert")))
    assert not reads_tokens(policy)
    expected = [encoder(torch.from_numpy(np.concatenate([a.prompt, a.completion]))[None]).logits.item() for a in answers]
    np.testing.assert_allclose(whole_scores(policy, answers), expected, atol=1e-6)


@pytest.mark.parametrize("start_scores", [True, False])
@pytest.mark.parametrize("scores", [True, False])
def test_an_adapter_goes_on_in_a_model_of_its_own_kind(
    scores: bool, start_scores: bool, scorer: Callable[..., Policy], tiny_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    """One of a reward model has a score head, which one of a language model lacks."""

    def adapted(seed: int, scoring: bool) -> Policy:
        policy = scorer(seed=seed) if scoring else tiny_policy(seed=seed)
        return adapt(policy, LoraSettings(rank=2), base="x", seed=seed)

    start, policy = adapted(1, start_scores), adapted(0, scores)
    save_to_resume(start, tmp_path)
    if scores == start_scores:
        take_over_adapter(policy, tmp_path)
        for name in policy.adapter.trained:  # type: ignore[union-attr]
            assert torch.equal(policy.model.get_parameter(name), start.model.get_parameter(name)), name
        return
    says = "trains a scoring model, whose adapter has a score head.*set model.path to" if scores else "belongs to a scoring model"
    with pytest.raises(ConfigError, match=f"{says}.*leave model.lora.start out"):
        take_over_adapter(policy, tmp_path)


def test_what_is_not_a_reward_model_is_refused(tiny_policy: Callable[..., Policy], tmp_path: Path) -> None:
    policy = tiny_policy("llama")
    save(policy, tmp_path / "causal")
    with pytest.raises(ConfigError, match="not a reward model"):
        load_scorer(ModelSettings(path=str(tmp_path / "causal")))
    policy.model.config.num_labels = 3
    LlamaForSequenceClassification(policy.model.config).save_pretrained(tmp_path / "classes")
    policy.tokenizer.save_pretrained(tmp_path / "classes")
    with pytest.raises(ConfigError, match="3 labels"):
        load_scorer(ModelSettings(path=str(tmp_path / "classes")))


class Noisy(LlamaForSequenceClassification):
    """Drops units while it scores."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.register_forward_hook(lambda m, args, out: F.dropout(out, 0.3, True))


class NoisyEncoder(BertForSequenceClassification):
    """The same of a model without a number for each token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert.encoder.register_forward_pre_hook(lambda m, args: (F.dropout(args[0], 0.3, True), *args[1:]))


class MixesNeighbours(LlamaForSequenceClassification):
    """Beyond 40 tokens every one hears all of its stream."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.register_forward_hook(lambda m, args, out: out if out.shape[1] < 40 else out + out.mean(1, keepdim=True))


class ScoresAnotherLayer(LlamaForSequenceClassification):
    """Its own pass reads twice the state behind more than 30 tokens."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        found = super().forward(input_ids, **kwargs)
        found.logits = found.logits * (2 if input_ids.shape[1] > 30 else 1)
        return found


class LosesAGradient(LlamaForSequenceClassification):
    """What its first MLP learns depends on how much lies in a stream."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].mlp.register_forward_hook(lambda m, args, out: out.detach() if out.shape[1] > 40 else out)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *((kind, attention) for kind in (Noisy, ScoresAnotherLayer) for attention in ("single", "shared")),
        *((kind, "shared") for kind in (MixesNeighbours, LosesAGradient)),
    ],
)
def test_faults_of_a_scorers_own_class_are_found(
    tiny_policy: Callable[..., Policy], kind: type[LlamaForSequenceClassification], attention: Any
) -> None:
    causal = tiny_policy("llama")
    causal.model.config.num_labels, causal.model.config._attn_implementation = 1, "eager"
    policy = wrap_scorer(kind(causal.model.config), causal.tokenizer, ModelSettings(attention=attention))
    with pytest.raises(ConfigError, match=f"{kind.__name__} (gives other scores|cannot be trained like this)"):
        prove(policy)


@pytest.mark.parametrize("attention", ["single", "shared"])
def test_scorers_are_proven_by_their_own_class(scorer: Callable[..., Policy], attention: Any) -> None:
    proof = prove(scorer(settings=ModelSettings(attention=attention)), recompute=True)
    assert proof.family == "LlamaForSequenceClassification" and proof.paths == ("scores", "training", "recompute")


@pytest.mark.parametrize("kind", [NoisyEncoder, MixesNeighbours, ScoresAnotherLayer])
def test_a_judge_is_held_against_its_own_pass_over_the_first_answers(
    tiny_policy: Callable[..., Policy], answers: list[Answer], kind: Any
) -> None:
    """At the lengths that a run has: what a fault changes beyond them is not looked for."""
    causal = tiny_policy("llama")
    causal.model.config.num_labels = 1
    bert = BertConfig(vocab_size=80, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1)
    policy = wrap_scorer(kind(bert if kind is NoisyEncoder else causal.model.config), causal.tokenizer)
    if kind is not NoisyEncoder:
        check_scores(policy, answers)
    long = Answer("long", np.arange(4, 12), np.arange(4, 54) % 13)
    with pytest.raises(ConfigError, match=f"{kind.__name__} (gives other scores each time|cannot score: a score differs)"):
        check_scores(policy, [*answers, long])


def test_padding_behind_a_judges_answer_is_not_compared(scorer: Callable[..., Policy], answers: list[Answer]) -> None:
    """transformers takes the end mark for padding where it is the same id, and reads the token before it."""
    policy = scorer()
    policy.model.config.pad_token_id = policy.eos_ids[0]
    check_scores(policy, answers)
    only_ends = [Answer("a", np.array([5, 6]), np.array([policy.eos_ids[0]]))]
    check_scores(policy, only_ends)
