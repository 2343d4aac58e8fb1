"""The Tinker SDK itself against the server.  It is no dependency: these tests run where `tinker` 0.38 is installed too."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from groupwise.tinker import server as routes
from groupwise.tinker.server import TinkerServer
from groupwise.tinker.service import TinkerService, TinkerSettings

from .conftest import TinkerClient
from .test_steps import data_for, far, weights_of

pytestmark = pytest.mark.slow
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tinker = pytest.importorskip("tinker", reason="the Tinker SDK is not installed (pip install tinker==0.38.0)")
PROMPT = [5, 9, 2]


@pytest.fixture
def sdk(served: TinkerServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The SDK's client of the server, whose session ends with the test."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    with tinker.ServiceClient(base_url=f"http://127.0.0.1:{served.port}") as client:
        yield client


def data(loss: str, seed: int) -> list[Any]:
    """Batches as a script makes them."""
    rows = []
    for row in data_for(loss, seed):
        inputs = {name: column for name, column in row.items() if name != "tokens"}
        rows.append(tinker.types.Datum(model_input=tinker.types.ModelInput.from_ints(row["tokens"]), loss_fn_inputs=inputs))
    return rows


def train(client: Any, seeds: range) -> list[float]:
    """Steps as a script takes them: the step is sent before the batch has its result."""
    values = []
    for seed in seeds:
        loss = ("cross_entropy", "importance_sampling", "ppo", "cispo")[seed % 4]
        batch = client.forward_backward(data(loss, seed), loss)
        step = client.optim_step(tinker.AdamParams(learning_rate=0.01 / (1 + seed)))
        values.append(batch.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0.0
    return values


def adapter_client(sdk: Any, served: TinkerServer, **keywords: Any) -> Any:
    return sdk.create_lora_training_client(base_model=served.service.name, rank=4, seed=3, **keywords).result()


def test_it_trains_samples_saves_and_goes_on_to_the_bit(sdk: Any, served: TinkerServer, tiny_model: Path) -> None:
    client = adapter_client(sdk, served)
    assert client.get_info().lora_rank == 4
    assert client.get_tokenizer().encode("1+1")
    train(client, range(4))
    path = client.save_state("state").result().path
    values = train(client, range(4, 8))
    params = tinker.types.SamplingParams(max_tokens=8, seed=5)
    prompt = tinker.types.ModelInput.from_ints(PROMPT)
    drawn = client.save_weights_and_get_sampling_client().sample(prompt, 3, params).result()
    weights = weights_of(served.service._held(client.model_id).model())

    service = TinkerService(TinkerSettings(model=str(tiny_model), root=served.service.settings.root))
    with TinkerServer(service) as server, tinker.ServiceClient(base_url=f"http://127.0.0.1:{server.port}") as anew:
        again = anew.create_training_client_from_state_with_optimizer(path).result()
        assert train(again, range(4, 8)) == values
        same = again.save_weights_and_get_sampling_client().sample(prompt, 3, params).result()
        assert [one.tokens for one in same.sequences] == [one.tokens for one in drawn.sequences]
        assert [one.logprobs for one in same.sequences] == [one.logprobs for one in drawn.sequences]
        assert far(weights, weights_of(service._held(again.model_id).model())) == 0.0
    service.close()


def test_it_sends_what_the_hand_made_client_sends(sdk: Any, served: TinkerServer, client: TinkerClient) -> None:
    """So that the tests without the SDK are about what it does."""
    theirs, ours = adapter_client(sdk, served), client.model(4)
    values = train(theirs, range(4))
    for seed, value in zip(range(4), values, strict=True):
        loss = ("cross_entropy", "importance_sampling", "ppo", "cispo")[seed % 4]
        assert client.forward(ours, loss, data_for(loss, seed))[1] == value
        client.step(ours, learning_rate=0.01 / (1 + seed), beta2=0.95, eps=1e-12)
    assert far(weights_of(client.trained(ours)), weights_of(served.service._held(theirs.model_id).model())) == 0.0


def test_a_batch_of_many_requests_is_one_batch(sdk: Any, served: TinkerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK cuts a batch into requests that it sends at once, the first one last."""
    rows = data("cross_entropy", 0)

    def stepped(client: Any) -> tuple[Any, float]:
        batch = client.forward_backward(rows, "cross_entropy")
        step = client.optim_step(tinker.AdamParams(learning_rate=0.01))
        return batch.result(), step.result().metrics["grad_norm"]

    expected, norm = stepped(adapter_client(sdk, served))
    monkeypatch.setitem(routes.CLIENT, "fwdbwd_max_chunk_len", 1)
    with tinker.ServiceClient(base_url=f"http://127.0.0.1:{served.port}") as cutting:
        client = adapter_client(cutting, served)
        assert client.holder.get_client_config().fwdbwd_max_chunk_len == 1
        result, same = stepped(client)
        assert served.service._held(client.model_id).turns._next == len(rows) + 2
    assert same == pytest.approx(norm, rel=1e-5)
    assert result.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    for one, other in zip(result.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"].to_numpy(), other["logprobs"].to_numpy(), atol=1e-5)


def test_log_probs_of_sampling_and_of_training_agree(sdk: Any, served: TinkerServer) -> None:
    client = adapter_client(sdk, served)
    train(client, range(2))
    sampler = client.save_weights_and_get_sampling_client()
    (drawn,) = sampler.sample(
        tinker.types.ModelInput.from_ints(PROMPT), 1, tinker.types.SamplingParams(max_tokens=8)
    ).result().sequences  # fmt: skip
    tokens = PROMPT + drawn.tokens
    scored = sampler.compute_logprobs(tinker.types.ModelInput.from_ints(tokens)).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[len(PROMPT) :], drawn.logprobs, atol=1e-5)
    datum = tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [0.0] * (len(tokens) - 1)},
    )
    forward = client.forward([datum], "cross_entropy").result()
    np.testing.assert_allclose(forward.loss_fn_outputs[0]["logprobs"].to_numpy(), scored[1:], atol=1e-5)


def test_a_loss_of_the_scripts_own(sdk: Any, served: TinkerServer) -> None:
    """`forward_backward_custom` runs in the script: its step is that of the same loss here."""
    rows = data("cross_entropy", 0)

    def loss(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        value = sum(-(one.loss_fn_inputs["weights"].to_torch() * logp).sum() for one, logp in zip(data, logprobs, strict=True))
        return value, {"mine:sum": 1.0}

    own, built_in = adapter_client(sdk, served), adapter_client(sdk, served)
    result = own.forward_backward_custom(rows, loss).result()
    assert result.metrics["mine:sum"] == 1.0
    expected = built_in.forward_backward(rows, "cross_entropy").result()
    assert result.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    norms = [one.optim_step(tinker.AdamParams()).result().metrics["grad_norm"] for one in (own, built_in)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_refusals_reach_the_scripts_user(sdk: Any, served: TinkerServer) -> None:
    client = adapter_client(sdk, served)
    rows, prompt = data("ppo", 0), tinker.types.ModelInput.from_ints(PROMPT)
    with pytest.raises(tinker.RequestFailedError, match="'gspo' is not offered here: use cross_entropy"):
        client.forward_backward(rows, "gspo").result()
    with pytest.raises(tinker.RequestFailedError, match=r"no step is taken: forward_backward .* failed"):
        client.optim_step(tinker.AdamParams()).result()
    with pytest.raises(tinker.BadRequestError, match="beta1"):
        client.optim_step(tinker.AdamParams(beta1=2.0)).result()
    with pytest.raises(tinker.BadRequestError, match="kind 'inflight' is not offered"):
        client.save_weights_and_get_sampling_client(kind="inflight").result()
    with pytest.raises(tinker.BadRequestError, match="the model 'another' is not here"):
        sdk.create_lora_training_client(base_model="another").result()
    with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
        sdk.create_sampling_client(model_path="tinker://nobody/weights/x").result()
    sampler = sdk.create_sampling_client(base_model=served.service.name)
    with pytest.raises(tinker.BadRequestError, match="topk_sample_logprobs is not offered"):
        sampler.sample(prompt, 1, tinker.types.SamplingParams(max_tokens=2), topk_sample_logprobs=2).result()
    train(client, range(1))


def test_the_script_of_the_page_runs(
    served: TinkerServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{served.port}")
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    page = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```text file=script.py\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(script, "script.py", "exec"), names)
    names["service"].close("success").result()
    said = capsys.readouterr().out
    assert "loss:sum" in said
    assert said.count("SampledSequence(") == 4


def test_a_script_with_rewards_learns(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of `benchmarks/tinker_arithmetic.py` on all weights of the tiny model: it learns to say one digit."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    service = TinkerService(TinkerSettings(model=str(tiny_model), root=tmp_path, rows=64, full=True))
    shares = []
    with TinkerServer(service) as server, tinker.ServiceClient(base_url=f"http://127.0.0.1:{server.port}") as sdk:
        client = sdk.create_lora_training_client(base_model=service.name).result()
        tokenizer = client.get_tokenizer()
        prompt, right = tokenizer.encode("1+1="), tokenizer.encode("7")[-1]
        for _ in range(12):
            sampler = client.save_weights_and_get_sampling_client()
            params = tinker.types.SamplingParams(max_tokens=1, temperature=1.0, seed=len(shares))
            drawn = sampler.sample(tinker.types.ModelInput.from_ints(prompt), 128, params).result().sequences
            rewards = [float(one.tokens == [right]) for one in drawn]
            shares.append(sum(rewards) / len(rewards))
            rows = []
            for one, reward in zip(drawn, rewards, strict=True):
                before = [0.0] * (len(prompt) - 1)
                inputs = {
                    "target_tokens": [*prompt, *one.tokens][1:],
                    "logprobs": before + one.logprobs,
                    "advantages": [*before, reward - shares[-1]],
                }
                rows.append(tinker.types.Datum(model_input=tinker.types.ModelInput.from_ints(prompt), loss_fn_inputs=inputs))
            batch = client.forward_backward(rows, "importance_sampling")
            step = client.optim_step(tinker.AdamParams(learning_rate=0.02))
            batch.result()
            step.result()
    service.close()
    assert shares[0] < 0.1
    assert shares[-1] > 0.9, shares
