"""Requests that train: each step is the trainer's own, in the order of its number, once, on a gradient that is whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from groupwise.algorithms import losses
from groupwise.algorithms.table import ALGORITHMS
from groupwise.config.settings import OptimizerSettings
from groupwise.models.passes import packed_for
from groupwise.models.policy import Policy
from groupwise.records import Sample
from groupwise.tinker import wire
from groupwise.tinker.batches import packed_data
from groupwise.tinker.trained import TrainedModel
from groupwise.training.loss import Loss
from groupwise.training.offline import SFT
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import score, update

from .conftest import TinkerClient

BOUNDS = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}
CONFIG = {"ppo": BOUNDS, "cispo": BOUNDS | {"clip_low_threshold": 1e-9}}
"""Settings at which the losses are the trainer's: its CISPO has no lower bound."""
ROWS = {
    "importance_sampling": losses.Importance(drop=1.0),
    "ppo": losses.Clipped(low=0.05, high=0.05),
    "cispo": losses.Cispo(cap=1.05),
}
"""The trainer's surrogates that the losses are."""


def data_for(loss: str, seed: int = 0) -> list[dict[str, Any]]:
    """Two prompts with two completions each; log-probs far enough from the policy's that some ratios are clipped."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt in ([5, 9, 2], [7, 3, 3, 8, 1]):
        for length in (4, 6):
            tokens = [*prompt, *rng.integers(3, 20, length).tolist()]
            row = {"tokens": tokens[:-1], "target_tokens": tokens[1:]}
            mask = np.array([0.0] * (len(prompt) - 1) + [1.0] * length)
            if loss == "cross_entropy":
                row["weights"] = (mask * rng.choice([0.5, 1.0, 2.0], mask.size)).tolist()
            else:
                row["advantages"] = (mask * rng.choice([-1.0, 0.5, 1.0])).tolist()
                row["logprobs"] = (mask * rng.normal(-3.0, 0.3, mask.size)).tolist()
            rows.append(row)
    return rows


def samples_for(loss: str, data: list[dict[str, Any]]) -> list[Sample]:
    """The same as the trainer packs it: prompts apart, shared by their completions, only completions trained."""
    samples = []
    for place, row in enumerate(data):
        tokens = np.array([*row["tokens"], row["target_tokens"][-1]])
        factor = np.array(row["weights" if loss == "cross_entropy" else "advantages"], np.float32).astype(np.float64)
        prompt = int(np.flatnonzero(factor)[0]) + 1
        factor = factor[prompt - 1 :]
        columns: dict[str, Any] = {"weight": factor}
        if loss != "cross_entropy":
            behavior = np.array(row["logprobs"], np.float32).astype(np.float64)[prompt - 1 :]
            columns = {"weight": np.ones(factor.size), "advantage": factor, "behavior_logp": behavior}
        samples.append(
            Sample(group=str(place // 2), index=place % 2, prompt=tokens[:prompt], completion=tokens[prompt:], **columns)
        )
    return samples


def weights_of(model: TrainedModel) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.policy.model.named_parameters() if one.requires_grad}


def far(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("rank", [4, None], ids=["adapter", "all weights"])
@pytest.mark.parametrize("loss", ["cross_entropy", *ROWS])
def test_two_steps_are_the_trainers_own(client: TinkerClient, loss: str, rank: int | None) -> None:
    """The trainer's `update` on the samples that it would pack, with its optimizer: the pass differs by rounding alone."""
    model = client.model(rank)
    trained = client.trained(model)
    before = weights_of(trained)
    ours = TrainedModel(trained.origin)
    assert far(before, weights_of(ours)) == 0.0
    settings = OptimizerSettings(lr=0.01, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1, clip_norm=0.5)
    optimizer = Optimizer(ours.policy.model, settings, total_steps=2)
    adam = {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 0.5}
    config = CONFIG.get(loss)
    for seed in (0, 1):
        data = data_for(loss, seed)
        _, value = client.forward(model, loss, data, config=config)
        metrics = client.step(model, **adam)
        samples = samples_for(loss, data)
        rule: Any = SFT.loss
        if loss in ROWS:
            rule = Loss(algorithm=replace(ALGORITHMS["grpo"], surrogate=ROWS[loss]), samples=samples)
        expected = update(ours.policy, rule, samples, optimizer, max_tokens_per_microbatch=512)
        assert value == pytest.approx(expected.loss, abs=2e-5)
        assert metrics["grad_norm"] == pytest.approx(expected.stats.grad_norm, rel=1e-4)
    assert far(before, weights_of(trained)) > 0.005
    assert far(weights_of(trained), weights_of(ours)) < 2e-5


FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda logp, factor, _: -(logp * factor).sum(),
    "importance_sampling": lambda logp, factor, old: -((logp - old).exp() * factor).sum(),
    "ppo": lambda logp, factor, old: -torch.minimum((r := (logp - old).exp()) * factor, r.clamp(0.95, 1.05) * factor).sum(),
    "cispo": lambda logp, factor, old: -((logp - old).exp().clamp(0.95, 1.05).detach() * logp * factor).sum(),
}
"""The losses as the SDK's documentation writes them."""


@pytest.mark.parametrize("loss", FORMULAS)
def test_a_loss_and_its_gradient_are_the_documented_formula(client: TinkerClient, loss: str) -> None:
    model = client.model(None)
    hugging_face = AutoModelForCausalLM.from_pretrained(client.server.service.name)
    data = data_for(loss)
    total, expected_logp = torch.zeros(()), []
    for row in data:
        logits = hugging_face(input_ids=torch.tensor([row["tokens"]])).logits[0]
        targets = torch.tensor(row["target_tokens"])
        logp = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        factor = torch.tensor(row["weights" if loss == "cross_entropy" else "advantages"])
        total = total + FORMULAS[loss](logp, factor, torch.tensor(row.get("logprobs", [])))
        expected_logp.append(logp.detach().numpy())
    total.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in hugging_face.parameters() if one.grad is not None])
    logp, value = client.forward(model, loss, data, config=BOUNDS if loss in ("ppo", "cispo") else None)
    assert value == pytest.approx(float(total.detach()), abs=2e-5)
    assert client.step(model)["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for one, expected in zip(logp, expected_logp, strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-5)


def test_gradients_of_several_requests_are_summed(client: TinkerClient) -> None:
    data = data_for("cross_entropy")
    together, apart = client.model(), client.model()
    client.forward(together, "cross_entropy", data)
    for row in data:
        client.forward(apart, "cross_entropy", [row])
    assert client.step(apart)["grad_norm"] == pytest.approx(client.step(together)["grad_norm"], rel=1e-5)
    assert client.trained(apart).steps == 1


def test_requests_are_done_in_the_order_of_their_numbers(client: TinkerClient) -> None:
    """The SDK sends the parts of a batch at once, the first one last."""
    model, data = client.model(), data_for("cross_entropy")
    bodies = [client.batch(model, "cross_entropy", [row]) for row in data]
    step = client.begin("optim_step", client.step_body(model))
    parts = [client.begin("forward_backward", body) for body in reversed(bodies)]
    assert all(isinstance(client.result(part), bytes) for part in parts)
    other = client.model()
    client.forward(other, "cross_entropy", data)
    norm = client.step(other)["grad_norm"]
    assert client.result(step)["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_request_that_arrives_twice_is_done_once(client: TinkerClient) -> None:
    model = client.model()
    body = client.batch(model, "cross_entropy", data_for("cross_entropy"))
    assert len({client.begin("forward_backward", body) for _ in range(3)}) == 1
    step = client.step_body(model)
    with ThreadPoolExecutor(4) as threads:
        promises = set(threads.map(lambda _: client.begin("optim_step", step), range(4)))
    assert len(promises) == 1
    assert client.result(promises.pop())["type"] == "optim_step"
    assert client.trained(model).steps == 1


def test_no_step_is_taken_on_a_gradient_that_is_not_whole(client: TinkerClient) -> None:
    """A part of a batch fails, before or behind one that succeeds; the step behind them is refused, and leaves nothing."""
    model, data = client.model(), data_for("ppo")
    before = weights_of(client.trained(model))
    client.forward(model, "ppo", data)
    failed = client.result(client.begin("forward_backward", client.batch(model, "gspo", data)))
    assert failed["category"] == "user" and "'gspo' is not offered" in failed["error"]
    client.forward(model, "ppo", data)
    refused = client.result(client.begin("optim_step", client.step_body(model)))
    assert "'gspo' is not offered" in refused["error"]
    assert far(before, weights_of(client.trained(model))) == 0.0
    client.forward(model, "ppo", data[:1])
    norm = client.step(model)["grad_norm"]
    fresh = client.model()
    client.forward(fresh, "ppo", data[:1])
    assert norm == client.step(fresh)["grad_norm"]


def test_a_forward_pass_leaves_no_gradient(client: TinkerClient) -> None:
    model, data = client.model(), data_for("cross_entropy")
    logp, value = client.forward(model, "cross_entropy", data, forward_only=True)
    again, same = client.forward(model, "cross_entropy", data)
    assert value == pytest.approx(same, rel=1e-6)
    np.testing.assert_allclose(np.concatenate(logp), np.concatenate(again), atol=1e-6)
    client.step(model)
    client.forward(model, "cross_entropy", data, forward_only=True)
    refused = client.result(client.begin("optim_step", client.step_body(model)))
    assert "there was no forward_backward" in refused["error"]


def test_a_refused_body_does_not_hold_up_those_behind_it(client: TinkerClient) -> None:
    model = client.model()
    client.forward(model, "cross_entropy", data_for("cross_entropy"))
    status, answer = client.post("optim_step", client.step_body(model, beta1=1.5))
    assert (status, "adam_params.beta1" in answer["detail"]) == (400, True)
    assert client.step(model)["grad_norm"] > 0.0


def test_a_gradient_that_is_not_finite_is_no_step(client: TinkerClient) -> None:
    model = client.model()
    before = weights_of(client.trained(model))
    row = data_for("importance_sampling")[0] | {"advantages": [3e38] * 6}
    row["logprobs"] = [-80.0] * 6
    client.forward(model, "importance_sampling", [row])
    refused = client.result(client.begin("optim_step", client.step_body(model)))
    assert "not finite" in refused["error"]
    assert far(before, weights_of(client.trained(model))) == 0.0


RECORDED = bytes.fromhex(
    "0a016d10031a640a100a0e0a0c010000000200000003000000121e0a077765696768747312130a0c000000000000803f0000803f180122010312300a0d7461"
    "726765745f746f6b656e73121f0a180200000000000000030000000000000004000000000000001802220103220370706f2a1d0a12636c69705f6c6f775f74"
    "68726573686f6c64119a9999999999e93f3a1f0a12636c69705f6c6f775f7468726573686f6c641209099a9999999999e93f"
)
"""What SDK 0.38 sends for a batch of one datum, `ppo` and one setting; its last part as a newer field beside the older one."""


def test_a_batch_is_read_as_the_sdk_writes_it() -> None:
    request = wire.read_batch(RECORDED)
    assert (request.model_id, request.number, request.loss, request.forward_only) == ("m", 3, "ppo", False)
    assert request.config == {"clip_low_threshold": 0.8}
    (datum,) = request.data()
    assert datum.tokens.tolist() == [1, 2, 3]
    assert {name: column.tolist() for name, column in datum.inputs.items()} == {
        "target_tokens": [2, 3, 4],
        "weights": [0.0, 1.0, 1.0],
    }


def test_completions_of_a_prompt_cost_the_prompt_once(tiny_policy: Callable[..., Policy]) -> None:
    """A prompt of 40 tokens with eight completions of 4: what the pass computes, and that every position has its log-prob."""
    policy = tiny_policy("llama")
    prompt, data = list(range(3, 23)) * 2, []
    for first in range(3, 11):
        tokens = np.array([*prompt, first, 5, 6, 7])
        factor = np.array([0.0] * 39 + [1.0, -1.0, 0.5, 2.0], np.float32)
        inputs = {"target_tokens": tokens[1:], "weights": factor}
        data.append(wire.Datum(tokens=tokens[:-1], inputs=inputs))
    packed = packed_data(data, "cross_entropy", policy)
    batches = packed_for(policy, packed.samples, 4096)
    assert sum(sum(batch.layout.length) for batch in batches) < 40 + 8 * 5
    assert len(packed.prompts) == 1
    of_prompts = score(policy, packed.prompts, max_tokens_per_microbatch=4096).logp
    shared = packed.logp(score(policy, packed.samples, max_tokens_per_microbatch=4096).logp, of_prompts)
    for datum, logp in zip(data, shared, strict=True):
        alone = packed_data([datum], "cross_entropy", policy)
        assert (len(alone.prompts), alone.samples[0].completion.size) == (0, 43)
        (expected,) = score(policy, alone.samples, max_tokens_per_microbatch=4096).logp
        np.testing.assert_allclose(logp, expected, atol=1e-5)
