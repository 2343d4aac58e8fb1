"""A server for the Tinker SDK with a tiny model, and a client that sends what the SDK sends."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from groupwise.models.policy import Policy
from groupwise.models.saving import save
from groupwise.tinker import wire
from groupwise.tinker.server import TinkerServer
from groupwise.tinker.service import TinkerService, TinkerSettings

Row = dict[str, Any]


class TinkerClient:
    """One client with its session: it numbers its requests as the SDK does, and waits for their results."""

    def __init__(self, server: TinkerServer) -> None:
        self.server = server
        self.session = ""
        self.numbers: dict[str, int] = {}
        self.models = self.samplers = 0

    # ---- HTTP

    def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            connection.request(method, path, body=body, headers=dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.getheader("Content-Type") or "", answer.read()
        finally:
            connection.close()

    def post(self, route: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/x-protobuf" if route == "forward_backward" else "application/json"
        status, kind, answer = self.ask("POST", f"/api/v1/{route}", data, {"Content-Type": kind})
        return status, answer if "protobuf" in kind else json.loads(answer)

    def begin(self, route: str, body: Any) -> str:
        """Send a request, and return the id of its promise."""
        status, answer = self.post(route, body)
        assert status == 200, answer
        return answer["request_id"]

    def result(self, request_id: str) -> Any:
        """Wait for a result, of which the promise is known."""
        for _ in range(20):
            status, answer = self.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})
            assert status == 200, answer
            if not isinstance(answer, dict) or answer.get("type") != "try_again":
                return answer
        raise AssertionError(f"{request_id} has no result")

    def done(self, route: str, body: Any) -> Any:
        """The result of a request that must succeed."""
        answer = self.result(self.begin(route, body))
        assert not isinstance(answer, dict) or "error" not in answer, answer
        return answer

    # ---- what a script does

    def number(self, model: str) -> int:
        self.numbers[model] = self.numbers.get(model, 0) + 1
        return self.numbers[model]

    def login(self) -> str:
        if not self.session:
            answer = self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})[1]
            self.session = answer["session_id"]
        return self.session

    def model_body(self, rank: int | None = 4, **changes: Any) -> Row:
        self.models += 1
        lora = None if rank is None else {"rank": rank, "seed": 3, "train_unembed": True, "train_mlp": True, "train_attn": True}
        body = {"session_id": self.login(), "model_seq_id": self.models - 1, "base_model": self.server.service.name}
        return body | {"lora_config": lora, "optimizer_config": {"type": "adamw"}, "type": "create_model"} | changes

    def model(self, rank: int | None = 4) -> str:
        return self.done("create_model", self.model_body(rank))["model_id"]

    def load(self, path: str, *, optimizer: bool = True) -> Any:
        body = {"session_id": self.login(), "model_seq_id": self.models, "path": path, "optimizer": optimizer}
        self.models += 1
        return self.result(self.begin("load_weights", body | {"type": "load_weights"}))

    def batch(
        self,
        model: str,
        loss: str,
        data: Sequence[Row],
        *,
        config: Mapping[str, float] | None = None,
        forward_only: bool = False,
        number: int | None = None,
    ) -> bytes:
        """The body of `forward_backward`."""
        message = wire._kinds()["ForwardBackwardRequest"](model_id=model, loss_fn=loss, forward_only=forward_only)
        message.seq_id = self.number(model) if number is None else number
        for name, value in (config or {}).items():
            message.loss_fn_config_v2[name].number = value
        for row in data:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(row["tokens"], "<i4").tobytes()
            for name, column in row.items():
                if name == "tokens":
                    continue
                whole = name == "target_tokens"
                tensor = datum.loss_fn_inputs[name]
                tensor.dtype = wire.INT64 if whole else wire.FLOAT32
                tensor.dense = np.array(column, "<i8" if whole else "<f4").tobytes()
                tensor.shape.append(len(column))
        return message.SerializeToString()

    def forward(self, model: str, loss: str, data: Sequence[Row], **keywords: Any) -> tuple[list[np.ndarray], float]:
        """Log-probs of each datum, and the loss of all."""
        message = wire._kinds()["ForwardBackwardOutput"]()
        message.ParseFromString(self.done("forward_backward", self.batch(model, loss, data, **keywords)))
        (record,) = message.loss_fn_outputs
        field = record.fields["logprobs"]
        cuts = np.frombuffer(field.offsets, "<i8")[1:-1] // 4
        return np.split(np.frombuffer(field.data, "<f4"), cuts), message.metrics["loss:sum"]

    def step_body(self, model: str, **adam: float) -> Row:
        return {"model_id": model, "seq_id": self.number(model), "adam_params": {"learning_rate": 0.01} | adam}

    def step(self, model: str, **adam: float) -> dict[str, float]:
        return self.done("optim_step", self.step_body(model, **adam))["metrics"]

    def save(self, model: str, name: str, **changes: Any) -> str:
        body = {"model_id": model, "seq_id": self.number(model), "path": name, "overwrite": False, "type": "save_weights"}
        return self.done("save_weights", body | changes)["path"]

    def sampler(self, model: str) -> str:
        """A sampler of a model's weights as they are now."""
        body = {"model_id": model, "seq_id": self.number(model), "sampling_session_seq_id": self.samplers, "kind": "snapshot"}
        self.samplers += 1
        return self.done("save_weights_for_sampler", body)["sampling_session_id"]

    def sampler_of(self, path: str | None = None) -> str:
        """A sampler of a checkpoint, or of the base model."""
        body: Row = {"session_id": self.login(), "sampling_session_seq_id": self.samplers}
        self.samplers += 1
        body |= {"base_model": self.server.service.name} if path is None else {"model_path": path}
        status, answer = self.post("create_sampling_session", body)
        assert status == 200, answer
        return answer["sampling_session_id"]

    def sample_body(self, sampler: str, prompt: Sequence[int], count: int = 1, **changes: Any) -> Row:
        chunks = [{"type": "encoded_text", "tokens": list(prompt)}]
        top = {name: changes.pop(name) for name in list(changes) if "logprobs" in name or name == "record_stability_info"}
        params = {"max_tokens": 6, "temperature": 1.0, "top_k": -1, "top_p": 1.0} | changes
        body = {"sampling_session_id": sampler, "seq_id": self.number(sampler), "num_samples": count, "type": "sample"}
        return body | {"prompt": {"chunks": chunks}, "sampling_params": params} | top

    def drawn(self, answer: bytes) -> tuple[list[tuple[list[int], np.ndarray, bool]], np.ndarray]:
        """Completions with their log-probs and whether they are truncated, and the prompt's log-probs."""
        message = wire._kinds()["SampleResponse"]()
        message.ParseFromString(answer)
        completions = []
        for one in message.sequences:
            tokens = np.frombuffer(one.tokens, "<i4").tolist()
            completions.append((tokens, np.frombuffer(one.logprobs, "<f4"), one.stop_reason == wire.TRUNCATED))
        return completions, np.frombuffer(message.prompt_logprobs, "<f4")

    def sample(self, sampler: str, prompt: Sequence[int], count: int = 1, **changes: Any) -> Any:
        return self.drawn(self.done("asample", self.sample_body(sampler, prompt, count, **changes)))

    def trained(self, model: str) -> Any:
        """The model itself, on the server's side."""
        return self.server.service._held(model).model()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Callable[..., Policy]) -> Path:
    """A folder with a random model."""
    folder = tmp_path_factory.mktemp("tinker") / "tiny"
    save(tiny_policy("llama"), folder)
    return folder


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[TinkerServer]:
    """One server for many tests: each has a session of its own."""
    root = tmp_path_factory.mktemp("checkpoints")
    service = TinkerService(TinkerSettings(model=str(tiny_model), root=root, models=2, rows=8))
    with TinkerServer(service) as server:
        yield server
    service.close()


@pytest.fixture
def client(served: TinkerServer) -> Iterator[TinkerClient]:
    """A client whose session, with its models, ends with the test."""
    client = TinkerClient(served)
    yield client
    if client.session:
        client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}, "detail": None})
