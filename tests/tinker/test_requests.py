"""Who may ask, and what is refused: by name, in the form that the SDK shows, and without harm to the next request."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.cli import commands
from groupwise.errors import ConfigError
from groupwise.tinker import promises, wire
from groupwise.tinker import server as routes
from groupwise.tinker.server import TinkerServer
from groupwise.tinker.service import SILENT, TinkerService, TinkerSettings

from .conftest import TinkerClient
from .test_steps import data_for

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "words"),
    [
        ("POST", "/api/v1/create_custom_loss", b"{}", JSON, 404, "create_custom_loss is not offered by groupwise serve --tinker"),
        ("POST", "/api/v1/retrieve_futures", b"{}", JSON, 404, "is not offered"),
        ("GET", "/api/v1/training_runs", b"", {}, 404, "is not offered"),
        ("GET", "/api/v1/create_session", b"", {}, 404, "is not offered"),
        ("GET", "/", b"", {}, 404, "is not offered"),
        ("POST", "/create_session", b"{}", JSON, 404, "is not offered"),
        ("PUT", "/api/v1/create_session", b"{}", JSON, 501, "Unsupported method"),
        ("GET", f"/{'x' * 3000}", b"", {}, 414, "too long"),
        ("POST", "/api/v1/get_info", b"{}", {"Content-Type": "text/plain"}, 415, "must be application/json"),
        ("POST", "/api/v1/forward_backward", b"{}", JSON, 415, "must be application/x-protobuf"),
        ("POST", "/api/v1/get_info", b"{}", JSON | {"Content-Encoding": "zstd"}, 415, "not compressed"),
        ("POST", "/api/v1/get_info", b"{}", JSON | {"Content-Length": str(1 << 40)}, 413, "at most"),
        ("POST", "/api/v1/get_info", b"{}", JSON | {"Content-Length": "-1"}, 411, "length"),
        ("POST", "/api/v1/get_info", b"{", JSON, 400, "cannot be read"),
        ("POST", "/api/v1/get_info", b"[" * 100_000, JSON, 400, "cannot be read"),
        ("POST", "/api/v1/get_info", b"[]", JSON, 400, "cannot be read"),
        ("POST", "/api/v1/get_info", b"\xff\xfe", JSON, 400, "cannot be read"),
        ("POST", "/api/v1/get_info", b"{}", JSON, 400, "model_id: Field required"),
        ("POST", "/api/v1/get_info", b'{"model_id": "nobody"}', JSON, 404, "there is no model 'nobody'"),
        ("POST", "/api/v1/retrieve_future", b'{"request_id": "x"}', JSON, 404, "there is no request 'x'"),
        ("POST", "/api/v1/session_heartbeat", b'{"session_id": "x"}', JSON, 404, "there is no session 'x'"),
        ("POST", "/api/v1/sessions/x/finish", b"{}", JSON, 404, "there is no session 'x'"),
        ("GET", "/api/v1/samplers/x", b"", {}, 404, "there is no sampler 'x'"),
        ("GET", "/api/v1/healthz", b"", {"Host": "evil.example"}, 421, "another host"),
        ("GET", "/api/v1/healthz", b"", {"Origin": "http://127.0.0.1"}, 403, "web pages"),
        ("GET", "/api/v1/healthz", b"", {"Sec-Fetch-Site": "same-origin"}, 403, "web pages"),
        ("POST", "/api/v1/get_info", b"{}", JSON | {"Transfer-Encoding": "chunked"}, 411, "length"),
    ],
)
def test_what_is_not_offered_is_refused(
    client: TinkerClient, method: str, path: str, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    answered, kind, answer = client.ask(method, path, body, headers)
    assert (answered, kind) == (status, "application/json")
    assert words in json.loads(answer)["detail"]
    assert client.ask("GET", "/api/v1/healthz", b"")[0] == 200


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\xff", b"no message"])
def test_bytes_that_are_no_batch_are_refused(client: TinkerClient, body: bytes) -> None:
    status, answer = client.post("forward_backward", body)
    assert status == 400
    assert "no ForwardBackwardRequest" in answer["detail"]


ROW = data_for("ppo")[0]
SUPERVISED = data_for("cross_entropy")[0]


@pytest.mark.parametrize(
    ("loss", "config", "row", "words"),
    [
        ("dro", {}, ROW, "'dro' is not offered here: use cross_entropy, importance_sampling, ppo, cispo"),
        ("custom", {}, ROW, "'custom' is not offered"),
        ("ppo", {"beta": 1.0}, ROW, "ppo has no setting 'beta': it reads clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 1.2}, ROW, "clip_low_threshold must be above 0"),
        ("cispo", {"clip_high_threshold": 0.9}, ROW, "clip_high_threshold must be above 1"),
        ("importance_sampling", {"clip_low_threshold": 0.8}, ROW, "importance_sampling has no setting"),
        ("ppo", {}, SUPERVISED, "data[0] has no 'advantages'"),
        ("cross_entropy", {}, ROW, "data[0] has no 'weights'"),
        ("cross_entropy", {}, SUPERVISED | {"surprise": [0.0] * 6}, "the loss reads no 'surprise'"),
        ("cross_entropy", {}, SUPERVISED | {"weights": [1.0]}, "weights has 1 numbers for 6 positions"),
        ("cross_entropy", {}, SUPERVISED | {"weights": [float("nan")] * 6}, "not finite"),
        ("cross_entropy", {}, SUPERVISED | {"tokens": [9999] * 6}, "outside the vocabulary"),
        ("cross_entropy", {}, SUPERVISED | {"tokens": [5, 9, 2, 3, 3, 3], "target_tokens": [4, 2, 3, 3, 3, 1]}, "moved by one"),
        ("cross_entropy", {}, {name: [3] * 96 for name in SUPERVISED}, "the model's context is 96"),
    ],
)
def test_a_batch_that_no_loss_reads_fails_by_name(
    client: TinkerClient, loss: str, config: dict[str, float], row: dict[str, Any], words: str
) -> None:
    model = client.model()
    failed = client.result(client.begin("forward_backward", client.batch(model, loss, [row], config=config)))
    assert failed["category"] == "user"
    assert words in failed["error"]
    client.forward(model, "ppo", [ROW])


def test_data_that_are_no_tokens_fail_by_name(client: TinkerClient) -> None:
    model = client.model()
    cases = {}
    for name in ("an image", "sparse", "two numbers a position", "cut", "no data"):
        message = wire._kinds()["ForwardBackwardRequest"]()
        message.ParseFromString(client.batch(model, "cross_entropy", [SUPERVISED]))
        cases[name] = message
    cases["an image"].data[0].model_input.add().image.format = "png"
    cases["sparse"].data[0].loss_fn_inputs["weights"].sparse_csr.values = b"1234"
    cases["two numbers a position"].data[0].loss_fn_inputs["weights"].shape[:] = [3, 2]
    cases["cut"].data[0].loss_fn_inputs["weights"].dense = b"123"
    del cases["no data"].data[:]
    words = {
        "an image": "a chunk of kind 'image'",
        "sparse": "is sparse",
        "two numbers a position": "has the shape [3, 2]",
        "cut": "has 3 bytes",
        "no data": "has no data",
    }
    for name, message in cases.items():
        failed = client.result(client.begin("forward_backward", message.SerializeToString()))
        assert words[name] in failed["error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_model": "another"}, "the model 'another' is not here"),
        ({"lora_config": {"rank": 4096}}, "rank 4096 is not offered here: at most 64"),
        ({"lora_config": {"rank": 4, "train_mlp": False, "train_attn": False}}, "no layer would be trained"),
        ({"lora_config": {"rank": 0}}, "lora_config.rank"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "is not offered here: use AdamW"),
        ({"session_id": "nobody"}, "there is no session"),
        ({"surprise": 1}, "unknown parameter 'surprise'"),
    ],
)
def test_a_model_that_is_not_offered_is_refused(client: TinkerClient, change: dict[str, Any], words: str) -> None:
    status, answer = client.post("create_model", client.model_body(4, **change))
    assert status in (400, 404)
    assert words in answer["detail"]


def test_requests_of_a_model_that_are_not_offered_are_refused(client: TinkerClient) -> None:
    model = client.model()
    step = {"model_id": model, "seq_id": client.number(model), "optimizer_params": {"type": "dimuon", "learning_rate": 1.0}}
    inflight = {"model_id": model, "seq_id": client.number(model), "sampling_session_seq_id": 0, "kind": "inflight"}
    token = {"model_id": model, "seq_id": client.number(model), "path": "tinker://a/weights/b", "optimizer": True}
    for route, body, words in (
        ("optim_step", step, "no optimizer but AdamW is offered"),
        ("save_weights_for_sampler", inflight, "kind 'inflight' is not offered"),
        ("load_weights", token | {"weights_access_token": "x"}, "weights_access_token is not offered"),
    ):
        status, answer = client.post(route, body)
        assert (status, words in answer["detail"]) == (400, True), answer
    client.forward(model, "ppo", [ROW])


@pytest.mark.parametrize(("attn", "mlp", "inside"), [(True, False, "self_attn"), (False, True, "mlp")])
def test_an_adapter_lies_where_the_client_wants_it(client: TinkerClient, attn: bool, mlp: bool, inside: str) -> None:
    lora = {"rank": 2, "seed": 1, "train_attn": attn, "train_mlp": mlp}
    model = client.done("create_model", client.model_body(2, lora_config=lora))["model_id"]
    names = client.trained(model).policy.adapter.trained
    assert names
    assert all(f".{inside}." in name for name in names)
    info = client.post("get_info", {"model_id": model})[1]
    assert (info["is_lora"], info["lora_rank"], info["model_data"]["arch"]) == (True, 2, "llama")


@pytest.mark.slow
def test_a_model_makes_room_when_its_session_is_over_or_silent(tmp_path: Path, tiny_model: Path) -> None:
    now = [0.0]
    service = TinkerService(TinkerSettings(model=str(tiny_model), root=tmp_path, models=1), clock=lambda: now[0])
    with TinkerServer(service) as server:
        first, second, third = TinkerClient(server), TinkerClient(server), TinkerClient(server)
        model = first.model()
        status, answer = second.post("create_model", second.model_body())
        assert (status, "1 models are in training" in answer["detail"]) == (400, True)
        now[0] += SILENT
        assert first.post("session_heartbeat", {"session_id": first.session})[0] == 200
        now[0] += SILENT
        assert second.post("create_model", second.model_body())[0] == 400
        now[0] += 1.0
        again = second.model()
        status, answer = first.post("optim_step", first.step_body(model))
        assert (status, "made room for another" in answer["detail"]) == (404, True)
        second.forward(again, "ppo", [ROW])
        assert second.post(f"sessions/{second.session}/finish", {"reason": {"type": "success"}})[0] == 200
        assert second.post("session_heartbeat", {"session_id": second.session})[0] == 410
        third.model(None)
    service.close()


def test_all_weights_are_trained_where_the_server_says_so(tmp_path: Path, tiny_model: Path) -> None:
    service = TinkerService(TinkerSettings(model=str(tiny_model), root=tmp_path, full=True))
    with TinkerServer(service) as server:
        client = TinkerClient(server)
        info = client.post("get_info", {"model_id": client.model(32)})[1]
        assert (info["is_lora"], info["lora_rank"]) == (False, None)
    service.close()


def test_a_server_that_others_reach_asks_for_its_token(served: TinkerServer) -> None:
    for host, token, words in (("0.0.0.0", "", "GROUPWISE_TINKER_TOKEN"), ("127.0.0.1", "secret", "must begin with tml-")):
        with pytest.raises(ConfigError, match=words):
            TinkerServer(served.service, host=host, token=token)
    with TinkerServer(served.service, host="0.0.0.0", token="tml-secret") as server:
        client = TinkerClient(server)
        for key in ({}, {"X-API-Key": "tml-other"}, {"Authorization": "Bearer tml-secret"}):
            status, _, answer = client.ask("GET", "/api/v1/healthz", b"", key)
            assert (status, "TINKER_API_KEY" in json.loads(answer)["detail"]) == (401, True)
        assert client.ask("GET", "/api/v1/healthz", b"", {"X-API-Key": "tml-secret"})[0] == 200


def test_a_result_that_is_not_there_is_asked_for_again(client: TinkerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose turn has not come."""
    monkeypatch.setattr(routes, "WAITING", 0.01)
    model = client.model()
    late = client.batch(model, "ppo", [ROW], number=2)
    promise = client.begin("forward_backward", late)
    answer = client.post("retrieve_future", {"request_id": promise})[1]
    assert answer == {"type": "try_again", "request_id": promise, "queue_state": "active"}
    client.begin("forward_backward", client.batch(model, "ppo", [ROW], number=1))
    monkeypatch.setattr(routes, "WAITING", 30.0)
    assert isinstance(client.result(promise), bytes)


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path, tiny_model: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(tiny_model), "--tinker", "--port", str(port), "--checkpoints", str(tmp_path / "saved")]
    process = subprocess.Popen([sys.executable, "-m", "groupwise", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        assert f"TINKER_BASE_URL=http://127.0.0.1:{port}   TINKER_API_KEY=tml-anything" in lines[1]
        assert str(tmp_path / "saved") in lines[2]
        client = TinkerClient(SimpleNamespace(port=port))  # type: ignore[arg-type]
        status, _, answer = client.ask("GET", "/api/v1/get_server_capabilities", b"")
        assert status == 200
        assert json.loads(answer)["supported_models"][0]["model_name"] == str(tiny_model)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.stdout.close()


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--quantization", "fp8"], "--cache, --quantization, and what stands behind --, are for vLLM"),
        (["--cache", "4G"], "--cache, --quantization, and what stands behind --, are for vLLM"),
        (["--", "--tensor-parallel-size", "2"], "--cache, --quantization, and what stands behind --, are for vLLM"),
        (["--dtype", "int8"], "--dtype must be float32 or bfloat16"),
    ],
)
def test_options_of_vllm_are_refused(capsys: pytest.CaptureFixture[str], tiny_model: Path, words: list[str], wrong: str) -> None:
    assert commands.main(["serve", str(tiny_model), "--tinker", *words]) == 2
    assert wrong in capsys.readouterr().err


def test_results_that_a_client_has_are_not_held_for_ever(client: TinkerClient) -> None:
    """Those that nobody has asked for are."""
    sampler = client.sampler_of()
    waiting = client.begin("asample", client.sample_body(sampler, [5]))
    first = client.begin("asample", client.sample_body(sampler, [5]))
    assert client.result(first) == client.result(first)
    for _ in range(promises.TOLD):
        client.sample(sampler, [5], max_tokens=1)
    status, answer = client.post("retrieve_future", {"request_id": first})
    assert (status, "long answered" in answer["detail"]) == (404, True)
    assert isinstance(client.result(waiting), bytes)


def test_a_session_begins_with_what_has_no_effect(client: TinkerClient) -> None:
    """The SDK logs it as a warning."""
    answer = client.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"})[1]
    assert "train_unembed has no effect" in answer["warning_message"]
    assert "ttl_seconds has no effect" in answer["warning_message"]
