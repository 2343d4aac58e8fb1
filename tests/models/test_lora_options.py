"""LoRA with its options, held against peft: the files of each other, the gradients, and dropout with the same masks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from joined_kernels import JoinedOperations
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from groupwise import train
from groupwise.config.recipes import parse_stages
from groupwise.config.settings import LoraSettings, ModelSettings
from groupwise.data.packing import pack
from groupwise.errors import ConfigError
from groupwise.models.attention import plain_attention
from groupwise.models.backbone import checkpointing
from groupwise.models.loading import load_policy
from groupwise.models.lora import adapt, adapter_size, restore_adapter
from groupwise.models.lora_dropout import seed_of, streams_of
from groupwise.models.policy import Policy, without_adapter
from groupwise.models.saving import merged, save, save_to_resume
from groupwise.models.sharded import frozen_copy
from groupwise.ops import operations as operations_module
from groupwise.ops.operations import Operations
from groupwise.records import Branch, Sample
from groupwise.rollout.native.forward import DecodedWeights, plain_weights
from groupwise.rollout.vllm.server_fitness import unfit
from groupwise.training.offline import SFT
from groupwise.training.passes import score, update

PREFIX = "base_model.model."
CASES: dict[str, dict[str, Any]] = {
    "rslora": {"rslora": True},
    "dropout": {"dropout": 0.2},
    "head": {"modules_to_save": ("lm_head",)},
    "both ends": {"modules_to_save": ("embed_tokens", "lm_head"), "targets": ("q_proj",)},
    "a layer": {"modules_to_save": ("layers.0.mlp.down_proj",)},
    "pattern": {"targets": r"model\.layers\.[01]\.self_attn\.(q|v)_proj"},
    "block": {"layers": (1,)},
    "block and names": {"layers": (0,), "targets": ("k_proj", "up_proj")},
    "ranks": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\..*k_proj": 3.0}, "rslora": True},
}  # fmt: skip


def adapted(policy: Policy, base: str = "", **options: Any) -> Policy:
    return adapt(policy, LoraSettings(**{"rank": 4, "alpha": 8.0} | options), base=base)


def disturb(policy: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name in policy.adapter.trained:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def logp_of(policy: Policy, samples: Sequence[Sample]) -> np.ndarray:
    return np.concatenate(score(policy, samples, max_tokens_per_microbatch=60).logp)


class Recorded:
    """In an optimizer's place: keeps the gradients of an update."""

    def __init__(self, policy: Policy, taken: int = 0) -> None:
        self.model, self.taken = policy.model, taken
        self.gradients: dict[str, Tensor] = {}

    def clear(self) -> None:
        self.model.zero_grad()

    def step(self) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


def gradients_of(policy: Policy, samples: Sequence[Sample], positions: int = 40, taken: int = 0) -> dict[str, Tensor]:
    recorded: Any = Recorded(policy, taken)
    update(policy, SFT.loss, samples, recorded, max_tokens_per_microbatch=positions)
    return recorded.gradients


def assert_equal_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-11, msg=name)


def untied(policy: Policy) -> Policy:
    """The policy with a head of its own."""
    model: Any = policy.model
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.1)
    model.config.tie_word_embeddings = False
    return policy


@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "tied"])
@pytest.mark.parametrize("name", CASES)
def test_peft_and_transformers_load_what_is_saved(
    name: str, tied: bool, tiny_policy: Callable[..., Policy], random_samples: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    base = tiny_policy("qwen3") if tied else untied(tiny_policy("llama"))
    assert base.model.config.tie_word_embeddings == tied
    save(base, tmp_path / "base")
    policy = adapted(load_policy(ModelSettings(path=str(tmp_path / "base"))), str(tmp_path / "base"), **CASES[name])
    samples = random_samples()
    start = logp_of(policy, samples)
    np.testing.assert_allclose(start, logp_of(base, samples), atol=1e-6)
    disturb(policy)
    ours = logp_of(policy, samples)
    assert np.abs(ours - start).max() > 0.05
    np.testing.assert_allclose(logp_of(frozen_copy(policy), samples), start, atol=1e-6)
    save(policy, tmp_path / "final")
    save_to_resume(policy, tmp_path / "kept")
    ids = torch.arange(5, 25)[None]
    with plain_attention(policy.model), torch.no_grad():
        expected = policy.model(input_ids=ids).logits
    untouched = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    by_peft = PeftModel.from_pretrained(untouched, str(tmp_path / "final/adapter")).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    for model in (by_peft, merged):
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=2e-5)
    for folder in ("final", "final/adapter", "kept"):
        np.testing.assert_allclose(logp_of(load_policy(ModelSettings(path=str(tmp_path / folder))), samples), ours, atol=2e-5)
    again = adapted(load_policy(ModelSettings(path=str(tmp_path / "base"))), **CASES[name])
    restore_adapter(again, tmp_path / "kept")
    np.testing.assert_array_equal(logp_of(again, samples), ours)


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True, "lora_dropout": 0.1},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": r".*\.1\..*_proj"},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 16}},
        {"use_dora": True},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
    ids=lambda options: "+".join(options),
)
def test_an_adapter_of_pefts_is_read(
    options: dict[str, Any], tiny_policy: Callable[..., Policy], random_samples: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    base = tiny_policy("qwen3")
    save(base, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options)
    by_peft = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in by_peft.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    by_peft.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    by_peft.save_pretrained(tmp_path / "adapter")
    base.tokenizer.save_pretrained(tmp_path / "adapter")
    policy = load_policy(ModelSettings(path=str(tmp_path / "adapter")))
    ids = torch.arange(5, 25)[None]
    with plain_attention(policy.model), torch.no_grad():
        torch.testing.assert_close(policy.model(input_ids=ids).logits, by_peft(input_ids=ids).logits, rtol=1e-4, atol=2e-5)
    samples = random_samples()
    save(policy, tmp_path / "again")
    again = load_policy(ModelSettings(path=str(tmp_path / "again")))
    np.testing.assert_allclose(logp_of(again, samples), logp_of(policy, samples), atol=1e-6)


@contextmanager
def masks_of_a_row(model: nn.Module, index: int, sample: Sample, seed: int, step: int, share: float) -> Iterator[None]:
    """Give peft's dropout layers the masks of one sequence alone: what `models.lora_dropout` promises, written again."""
    names = [(f"{sample.group}/{seed_of(sample.prompt.tobytes())}", sample.prompt.size - 1), (f"{index}@0", sample.completion.size)]
    layers = [module for module in model.modules() if "lora_dropout" in module._modules]

    class Given(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place

        def forward(self, x: Tensor) -> Tensor:
            parts = []
            for name, length in names:
                generator = torch.Generator().manual_seed(seed_of(f"{seed}/{step}/{self.place}/{name}"))
                parts.append(torch.rand(length, x.shape[-1], generator=generator))
            return x * (torch.cat(parts) >= share) / (1.0 - share)

    before = [layer.lora_dropout["default"] for layer in layers]  # type: ignore[index, operator]
    for place, layer in enumerate(layers):
        layer.lora_dropout["default"] = Given(place)  # type: ignore[index, operator]
    try:
        yield
    finally:
        for layer, dropout in zip(layers, before, strict=True):
            layer.lora_dropout["default"] = dropout  # type: ignore[index, operator]


OPTIONS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.3},
    "whole modules and dropout": {"lora_dropout": 0.3, "modules_to_save": ["lm_head", "embed_tokens"]},
    "ranks": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3}},
}
SETTINGS = {"lora_dropout": "dropout", "use_rslora": "rslora"}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_pefts_model(
    name: str, tiny_policy: Callable[..., Policy], random_samples: Callable[..., list[Sample]]
) -> None:
    """Packed with shared prompts, against peft's own model on one sequence at a time, with the masks of its row."""
    options, step = OPTIONS[name], 3
    ours = {SETTINGS.get(option, option): value for option, value in options.items()}
    policy = adapted(tiny_policy(dtype=torch.float64), **ours)
    disturb(policy)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    by_peft = get_peft_model(tiny_policy(dtype=torch.float64).model, config, autocast_adapter_dtype=False)
    own = dict(policy.model.named_parameters())
    with torch.no_grad():
        for place, parameter in by_peft.named_parameters():
            parameter.copy_(own[place.removeprefix(PREFIX)])
    samples = [replace(sample, temperature=1.0) for sample in random_samples()]
    total = torch.zeros((), dtype=torch.float64)
    with plain_attention(by_peft.get_base_model()):
        for index, sample in enumerate(samples):
            ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion[:-1]]))
            with masks_of_a_row(by_peft, index, sample, 0, step, options.get("lora_dropout", 0.0)):
                logits = by_peft(input_ids=ids[None]).logits[0, sample.prompt.size - 1 :, : policy.vocabulary]
            logp = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(sample.completion)[:, None])[:, 0]
            total = total - (torch.from_numpy(sample.weight) * logp).sum()
    total.backward()
    expected = {place.removeprefix(PREFIX): p.grad for place, p in by_peft.named_parameters() if p.grad is not None}
    assert set(expected) == set(policy.adapter.trained)
    assert_equal_gradients(gradients_of(policy, samples, taken=step), expected)


def test_masks_belong_to_rows_however_they_are_packed(
    tiny_policy: Callable[..., Policy], random_samples: Callable[..., list[Sample]]
) -> None:
    samples = random_samples()
    policy = adapted(tiny_policy(dtype=torch.float64), dropout=0.3)
    disturb(policy)
    expected = gradients_of(policy, samples)
    for other in (gradients_of(policy, samples, 17), gradients_of(policy, samples, 1000)):
        assert_equal_gradients(other, expected)
    assert_equal_gradients(gradients_of(replace(policy, attention="packed"), samples), expected)
    with checkpointing(policy, True):
        assert_equal_gradients(gradients_of(policy, samples), expected)
    name = policy.adapter.trained[0]
    assert not torch.allclose(gradients_of(policy, samples, taken=1)[name], expected[name])
    assert not torch.allclose(gradients_of(policy, samples[1:])[name], expected[name])


@pytest.mark.parametrize("chosen", [None, JoinedOperations()], ids=["as on a CPU", "as on a GPU"])
def test_only_updates_have_dropout(
    chosen: Operations | None,
    tiny_policy: Callable[..., Policy],
    random_samples: Callable[..., list[Sample]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if chosen is not None:
        monkeypatch.setattr(operations_module, "_chosen", chosen)
    samples = random_samples()
    policies = [adapted(tiny_policy(), dropout=share) for share in (0.5, 0.0)]
    for policy in policies:
        disturb(policy)
    dropping, plain = policies
    expected = logp_of(plain, samples)
    np.testing.assert_array_equal(logp_of(dropping, samples), expected)
    recorded: Any = Recorded(dropping)
    seen = update(dropping, SFT.loss, samples, recorded, max_tokens_per_microbatch=60).seen
    assert np.abs(np.concatenate(seen) - expected).max() > 0.05
    np.testing.assert_array_equal(logp_of(dropping, samples), expected)


def test_every_position_draws_once() -> None:
    """Also those of completions that go on behind another context; only filler draws nothing."""
    weight = np.ones(4)
    prompt = np.array([5, 6, 7])
    branches = (Branch(begin=2, context=np.array([5, 6, 7, 1, 9])), Branch(begin=3, context=np.array([8, 9])))
    samples = [
        Sample(group="a", prompt=prompt, completion=np.arange(4), weight=weight),
        Sample(group="a", prompt=prompt, completion=np.arange(4), weight=weight, branches=branches),
        Sample(group="b", prompt=prompt, completion=np.arange(4), weight=weight),
    ]
    for batch in (*pack(samples, 100, fill=True), *pack(samples, 9), *pack(samples, 100, share=False)):
        streams = streams_of(batch, samples)
        covered = [place for stream in streams for place in range(stream.start, stream.start + stream.length)]
        assert sorted(covered) == list(range(sum(batch.layout.length)))
    (batch,) = pack(samples, 100)
    names = [stream.name for stream in streams_of(batch, samples)]
    assert len(set(names)) == len(names)
    unshared = [stream.name for one in pack(samples, 100, share=False) for stream in streams_of(one, samples)]
    assert set(unshared) == set(names)


WRONG = [
    ({"targets": "q_proj"}, r"the pattern 'q_proj' is the whole name of no linear layer, such as model.*: write \[q_proj\]"),
    ({"targets": r".*(q_proj"}, "is no regular expression"),
    ({"targets": r".*\.w_proj"}, "its linear layers are called q_proj"),
    ({"layers": (2,)}, "the model has 2 blocks, the last is 1; got 2"),
    ({"rank_pattern": {"w_proj": 2}}, "model.lora.rank_pattern: 'w_proj' names no layer with an adapter"),
    ({"targets": ("q_proj",), "alpha_pattern": {"k_proj": 2.0}}, "model.lora.alpha_pattern: 'k_proj'"),
    ({"modules_to_save": ("norm",)}, r"a LlamaRMSNorm is no embedding and no linear layer; .*\[model.embed_tokens, lm_head\]"),
    ({"modules_to_save": ("head",)}, "'head': no module of the model has that name"),
    ({"targets": ("lm_head", "q_proj")}, "train all of it with model.lora.modules_to_save"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_what_does_not_fit_the_model_is_refused(options: dict[str, Any], message: str, tiny_policy: Callable[..., Policy]) -> None:
    with pytest.raises(ConfigError, match=message):
        adapted(tiny_policy(), **options)


def test_dropout_that_could_not_be_exact_is_refused(tiny_policy: Callable[..., Policy]) -> None:
    single = tiny_policy(settings=ModelSettings(attention="single"))
    with pytest.raises(ConfigError, match=r"model\.attention is 'single'"):
        adapted(single, dropout=0.1)
    balanced = tiny_policy("mixtral")
    balanced.model.config.output_router_logits = True
    with pytest.raises(ConfigError, match="counts their tokens in a pass without dropout"):
        adapted(balanced, dropout=0.1, targets=("q_proj",))


def test_the_plan_counts_whole_modules_and_what_dropout_keeps(
    tiny_policy: Callable[..., Policy], random_samples: Callable[..., list[Sample]]
) -> None:
    """Every layer of an adapter keeps its own input behind dropout, and a mask; the input before it may stay as well."""
    samples = random_samples()
    kept: dict[float, int] = {}
    for share in (0.0, 0.5):
        policy = adapted(tiny_policy(), dropout=share)
        disturb(policy)
        weights = {parameter.data_ptr() for parameter in policy.model.parameters()}
        seen: dict[int, Tensor] = {}

        def keep(tensor: Tensor, seen: dict[int, Tensor] = seen, weights: set[int] = weights) -> Tensor:
            if tensor.data_ptr() not in weights:
                seen[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            gradients_of(policy, samples, 1000)
        kept[share] = sum(tensor.nbytes for tensor in seen.values())
    (batch,) = pack(samples, 1000, fill=policy.tiled)
    plain = tiny_policy().model
    lora = LoraSettings(rank=4, modules_to_save=("embed_tokens", "lm_head"))
    size = adapter_size(plain, lora)
    assert size.inputs == 2 * (5 * 32 + 32 + plain.config.intermediate_size)
    assert size.ranks == 2 * 7 * 4
    planned = batch.layout.total * (size.inputs * 5 + size.ranks * 4)
    assert 0.5 * planned <= kept[0.5] - kept[0.0] <= 1.05 * planned
    policy = adapt(tiny_policy(), lora, base="")
    assert size.parameters == sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    assert size.parameters > 2 * policy.model.config.vocab_size * 32


def test_decoded_weights_are_those_in_use(tiny_policy: Callable[..., Policy]) -> None:
    """What the native engine decodes by: the trained copies where the adapter is on, the originals where it is off."""
    policy = adapted(tiny_policy("qwen3"), modules_to_save=("lm_head", "embed_tokens"))
    disturb(policy)
    ids = torch.arange(5, 25)[None]
    for one in (policy, without_adapter(policy)):
        weights = plain_weights(one)
        head, embedding = weights.policy.head.weight_VD, weights.policy.model.get_input_embeddings().weight
        assert head.data_ptr() == one.head.weight_VD.data_ptr()
        assert (head.data_ptr() == embedding.data_ptr()) == (not one.adapter_on)
        with plain_attention(merged(one)) as whole, plain_attention(policy.model) as model, one.adapter_state(), torch.no_grad():
            torch.testing.assert_close(whole(input_ids=ids).logits, model(input_ids=ids).logits)


def test_decoded_weights_are_those_of_the_last_gather(tiny_policy: Callable[..., Policy]) -> None:
    """A gather of sharded weights puts other tensors into the same modules."""
    policy = adapted(tiny_policy("qwen3"), modules_to_save=("lm_head",))
    kept = DecodedWeights(policy)
    before = kept.known()
    assert before is not None and kept.known() is before
    for module in policy.model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach() + 1.0)
    after = kept.known()
    assert after is not None
    torch.testing.assert_close(after.policy.head.weight_VD, policy.head.weight_VD)


RECIPE = """
name: dropping
model: {{path: {base}, lora: {{rank: 4, alpha: 8, dropout: 0.2, rslora: true, modules_to_save: [lm_head]}}}}
data: {{path: {data}, template: "{{question}}="}}
rewards: [{{function: repetition, args: {{n: 1}}}}]
runs: {runs}
save: {{every: 1}}
group: {{prompts_per_step: 3, group_size: 4, beta: 0.1, updates_per_rollout: 2}}
rollout: {{max_new_tokens: 10}}
optimizer: {{lr: 1.0e-2}}
objective: grpo
steps: 3
"""


@pytest.mark.slow
def test_a_resumed_run_draws_the_masks_that_it_would_have_drawn(tiny_policy: Callable[..., Policy], tmp_path: Path) -> None:
    """Its weights end in the same bits; without dropout they are others, and at step 1 the policy is its reference with it too."""
    save(tiny_policy("qwen3"), tmp_path / "base")
    rows = [{"question": f"{i}+1"} for i in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    text = RECIPE.format(base=tmp_path / "base", data=tmp_path / "rows.json", runs=tmp_path / "runs")

    def recipe(*overrides: str) -> Any:
        return next(iter(parse_stages(text, "recipe", list(overrides)).values()))

    straight = list(train(recipe()))
    assert straight[0].metrics["kl"] < 0.1 * straight[-1].metrics["kl"]
    broken = iter(train(recipe("name=broken")))
    assert next(step for step in broken if step.number == 2)
    broken.close()
    (rest,) = train(recipe("name=broken"))
    assert rest.metrics["loss"] == straight[-1].metrics["loss"]
    list(train(recipe("name=plain", "model.lora.dropout=0")))
    file = "final/adapter/adapter_model.safetensors"
    expected, resumed, plain = (load_file(tmp_path / "runs" / name / file) for name in ("dropping", "broken", "plain"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in expected.items())
    assert not all(torch.equal(tensor, plain[name]) for name, tensor in expected.items())
    model = load_policy(ModelSettings(path=str(tmp_path / "runs/dropping/final"))).model
    assert not model.config.tie_word_embeddings


def test_servers_that_tie_embedding_and_head_are_refused(tiny_policy: Callable[..., Policy]) -> None:
    policy = tiny_policy("qwen3", hidden=128)
    facts = {"device": "cpu", "logprobs": "processed_logprobs", "vocabulary": policy.model.config.vocab_size}
    assert unfit(facts, policy) is None
    assert "modules_to_save" in str(unfit(facts, adapted(policy, modules_to_save=("lm_head",))))
