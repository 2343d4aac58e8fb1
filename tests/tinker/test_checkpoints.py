"""Checkpoints: what was saved goes on to the bit, and a name is a name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from groupwise.runs.checkpoint import policy_folder
from groupwise.tinker.server import TinkerServer
from groupwise.tinker.service import TinkerService, TinkerSettings

from .conftest import TinkerClient
from .test_steps import data_for, far, weights_of


def train(client: TinkerClient, model: str, seeds: range) -> list[float]:
    """Steps with different losses and settings; returns the losses."""
    values = []
    for seed in seeds:
        loss = ("cross_entropy", "ppo", "cispo")[seed % 3]
        values.append(client.forward(model, loss, data_for(loss, seed))[1])
        client.step(model, learning_rate=0.01 / (1 + seed), beta2=0.9, weight_decay=0.1)
    return values


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, None], ids=["adapter", "all weights"])
def test_a_saved_model_goes_on_to_the_bit(client: TinkerClient, served: TinkerServer, tiny_model: Path, rank: int | None) -> None:
    """In the same server, and in one that was started anew on the same folder."""
    model = client.model(rank)
    train(client, model, range(3))
    path = client.save(model, "state")
    values = train(client, model, range(3, 6))
    weights = weights_of(client.trained(model))
    again = client.load(path)["model_id"]
    assert train(client, again, range(3, 6)) == values
    assert far(weights, weights_of(client.trained(again))) == 0.0

    service = TinkerService(TinkerSettings(model=str(tiny_model), root=served.service.settings.root))
    with TinkerServer(service) as server:
        other = TinkerClient(server)
        anew = other.load(path)["model_id"]
        assert train(other, anew, range(3, 6)) == values
        assert far(weights, weights_of(other.trained(anew))) == 0.0
    service.close()


@pytest.mark.slow
def test_weights_without_the_optimizer_start_it_anew(client: TinkerClient) -> None:
    model = client.model()
    train(client, model, range(2))
    path = client.save(model, "state")
    plain = client.load(path, optimizer=False)["model_id"]
    assert far(weights_of(client.trained(model)), weights_of(client.trained(plain))) == 0.0
    assert client.trained(plain).steps == 0
    body = {"model_id": plain, "seq_id": client.number(plain), "path": path, "optimizer": True}
    assert client.done("load_weights", body)["path"] == path
    assert client.trained(plain).steps == 2
    assert train(client, plain, range(2, 4)) == train(client, model, range(2, 4))


def test_a_checkpoint_is_a_model_for_everybody(client: TinkerClient, served: TinkerServer) -> None:
    """Its folder is one that every command of the library takes for a model."""
    model = client.model(None)
    train(client, model, range(1))
    path = client.save(model, "state")
    folder = served.service.settings.root / path.removeprefix("tinker://")
    assert (policy_folder(folder) / "config.json").is_file()


def test_a_name_is_taken_once_unless_it_is_overwritten(client: TinkerClient) -> None:
    model = client.model()
    train(client, model, range(1))
    path = client.save(model, "state")
    body = {"model_id": model, "seq_id": client.number(model), "path": "state", "overwrite": False}
    assert "is there already" in client.result(client.begin("save_weights", body))["error"]
    train(client, model, range(1, 2))
    for _ in range(2):  # the second time at the same step
        assert client.save(model, "state", overwrite=True) == path
    again = client.load(path)["model_id"]
    assert client.trained(again).steps == 2
    assert far(weights_of(client.trained(model)), weights_of(client.trained(again))) == 0.0


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".hidden", "x" * 300, "nul\0"])
def test_a_name_names_no_other_folder(client: TinkerClient, name: str) -> None:
    model = client.model()
    body = {"model_id": model, "seq_id": client.number(model), "path": name}
    status, answer = client.post("save_weights", body)
    assert status == 400
    assert "the checkpoint's name" in answer["detail"]
    paths = [f"tinker://{model}/weights/{name}", f"tinker://{name}/weights/state", f"file://{name}"]
    for path in paths:
        asked = {"session_id": client.login(), "sampling_session_seq_id": 0, "model_path": path}
        status, answer = client.post("create_sampling_session", asked)
        assert status == 400, path


@pytest.mark.slow
def test_what_does_not_fit_is_not_loaded(client: TinkerClient, served: TinkerServer) -> None:
    model, larger = client.model(4), client.model(8)
    train(client, model, range(1))
    path = client.save(model, "state")
    body = {"model_id": larger, "seq_id": client.number(larger), "path": path, "optimizer": True}
    assert "adapter of rank 4, and the model one of rank 8" in client.result(client.begin("load_weights", body))["error"]
    saved = {"model_id": model, "seq_id": client.number(model), "path": "final"}
    final = client.done("save_weights_for_sampler", saved)["path"]
    body = {"model_id": model, "seq_id": client.number(model), "path": final, "optimizer": True}
    assert "weights alone" in client.result(client.begin("load_weights", body))["error"]
    missing = {"model_id": model, "seq_id": client.number(model), "path": "tinker://nobody/weights/x", "optimizer": True}
    assert "there is no checkpoint" in client.result(client.begin("load_weights", missing))["error"]
    folder = served.service.settings.root / path.removeprefix("tinker://")
    (weights,) = folder.rglob("adapter_model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    damaged = {"model_id": model, "seq_id": client.number(model), "path": path, "optimizer": True}
    assert "adapter_model.safetensors" in client.result(client.begin("load_weights", damaged))["error"]


def test_a_seed_decides_the_adapter(client: TinkerClient) -> None:
    one = client.done("create_model", client.model_body(4))["model_id"]
    weights = weights_of(client.trained(one))
    client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})
    client.session = ""
    same = client.done("create_model", client.model_body(4))["model_id"]
    lora = {"rank": 4, "seed": 4}
    other = client.done("create_model", client.model_body(4, lora_config=lora))["model_id"]
    assert far(weights, weights_of(client.trained(same))) == 0.0
    assert far(weights, weights_of(client.trained(other))) > 0.0
    assert torch.isfinite(next(iter(weights.values()))).all()
