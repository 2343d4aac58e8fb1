"""The client of vLLM servers against a server in this process that speaks the same routes, and lies where a test wants it to.

What vLLM itself does is tested with real servers in tests/vllm.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma3Config

from groupwise.config.settings import LoraSettings
from groupwise.errors import ConfigError, EngineError, PeerError
from groupwise.models.lora import adapt
from groupwise.models.policy import without_adapter
from groupwise.models.saving import save
from groupwise.records import Finish, Prompt, Sampling
from groupwise.rollout.vllm import member, pool, published, publisher, server_fitness
from groupwise.rollout.vllm.addresses import addresses_of
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.colocated import buckets
from groupwise.rollout.vllm.engine import VllmEngine
from groupwise.rollout.vllm.plugin.groupwise_lease import Lease
from groupwise.rollout.vllm.plugin.groupwise_versions import FORMAT, Mirror, VersionSource, WrongVersion
from groupwise.rollout.vllm.published import VersionedServer
from groupwise.rollout.vllm.server import command

EOS = 1


class FakeServer:
    """Answers like `vllm serve` with our plug-in; a completion repeats the prompt's first token and ends with EOS."""

    def __init__(self) -> None:
        self.facts = self.facts_of(40)
        self.label = "default"
        self.computed = 7.0
        self.calls: list[str] = []
        self.paused: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.mirror = Mirror(Path(tempfile.mkdtemp(prefix="groupwise-mirror-")))
        self.fetched: dict[str, Any] = {}
        self.lease = Lease()
        self.deliveries: list[dict[str, Any]] = []
        self.adapters: dict[str, str] = {}
        """Folders of adapters by their names."""
        self.spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.hold: Callable[[dict[str, Any]], None] = lambda body: None
        self.status: dict[str, int] = {}
        self.dies: set[str] = set()
        self.hung_up = threading.Event()
        self._asked = threading.local()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or a body waits until its headers have been acknowledged: 40 ms

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.answer()

            def do_POST(self) -> None:
                self.answer()

            def answer(self) -> None:
                path = self.path.split("?")[0]
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
                fake._asked.by = self.connection
                fake.calls.append(body["method"] if path == "/collective_rpc" else path)
                fake.paused += [self.path.split("mode=")[1]] if path == "/pause" else []
                if path in fake.dies:
                    self.close_connection = True
                    return
                status = fake.status_of(path)
                found = fake.do(path, body) if status == 200 else {"error": "no"}
                text = (found if isinstance(found, str) else json.dumps(found)).encode()
                with contextlib.suppress(OSError):  # who asked has hung up
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    @staticmethod
    def facts_of(vocabulary: int) -> dict[str, Any]:
        return {
            "logprobs": "processed_logprobs", "candidates": 256, "dtype": "float32", "context": 64, "vocabulary": vocabulary,
            "rows": 8, "workers": 1, "device": "cpu", "format": FORMAT, "lora_rank": 0,
            "mirror": secrets.token_hex(4),
        }  # fmt: skip

    def do(self, path: str, body: dict[str, Any]) -> Any:
        match path:
            case "/collective_rpc":
                return {"results": [self.call(body["method"], body.get("kwargs", {}))]}
            case "/weight_info":
                return {"weight_version": self.label}
            case "/update_weights":
                held = self.mirror.manifest()
                assert held is not None and held.label == body["update_info"]["label"]
            case "/finish_weight_update":
                self.label = body["weight_version"]
            case "/metrics":
                return f'vllm:prompt_tokens_total{{engine="0"}} {self.computed}\nvllm:generation_tokens_total{{engine="0"}} 0.0\n'
            case "/v1/models":
                return {"data": [{"id": name} for name in ("policy", *self.adapters)]}
            case "/v1/load_lora_adapter":
                assert body["lora_name"] not in self.adapters and body["lora_path"] not in self.adapters.values()
                self.adapters[body["lora_name"]] = body["lora_path"]
                return "Success"
            case "/v1/unload_lora_adapter":
                del self.adapters[body["lora_name"]]
                return "Success"
            case "/inference/v1/generate":
                assert body["model"] == "policy" or body["model"] in self.adapters
                self.requests.append(body)
                self.hold(body)
                return self.spoil({"choices": [self.choice(body, i) for i in range(body["sampling_params"]["n"])]})
        return {}

    def status_of(self, path: str) -> int:
        """The status of the answer to a request."""
        return self.status.get(path, 200)

    def until_hung_up(self) -> None:
        """Let the one who asks wait, until he hangs up or a minute is over."""
        readable, _, _ = select.select([self._asked.by], [], [], 60)
        if readable and self._asked.by.recv(1, socket.MSG_PEEK) == b"":
            self.hung_up.set()

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """The plug-in's methods, with the real mirror."""
        if method == "groupwise_facts":
            return self.facts
        if method == "groupwise_hold":
            return self.lease.ask(**arguments)
        if method == "groupwise_let_go":
            return self.lease.end(**arguments)
        if method == "groupwise_drop_adapter":
            self.mirror.drop_adapter(arguments["label"])
        if method == "groupwise_fetch":
            self.fetched = dict.fromkeys(("error", "healed", "folder"), "") | {"done": True, "read_bytes": 0, "full": False}
            self.fetched |= {"seconds": 0.0, "label": ""}
            source = VersionSource(arguments["source"], arguments["token"])
            try:
                if arguments["adapter"]:
                    folder = self.mirror.adapter(source, arguments["version"])
                    return self.fetched.update(folder=str(folder), read_bytes=source.read_bytes)
                found = self.mirror.go_to(source, arguments["version"])
                self.fetched |= {"read_bytes": found.read_bytes, "full": found.full, "healed": found.healed}
                self.fetched["label"] = self.mirror.manifest().label
            except WrongVersion as error:
                self.fetched["error"] = str(error)
            self.deliveries.append(self.fetched)
        return self.fetched

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What the mirror holds."""
        held = self.mirror.manifest()
        assert held is not None
        bits = self.mirror.tensors(held)
        dtype = getattr(torch, held.dtype)
        return {name: torch.from_numpy(bits[name].copy()).view(dtype).view(shape) for name, shape in held.shapes.items()}

    def choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        first, length = body["token_ids"][0], min(3 + index, body["sampling_params"]["max_tokens"])
        ids = [first] * (length - 1) + [EOS]
        wanted = body["sampling_params"]["logprobs"]

        def entry(drawn: int) -> dict[str, Any]:
            others = [id for id in range(3, 4 + wanted) if id != drawn][:wanted]
            found = {drawn: -0.5} | {id: -1.5 if id < 5 else -9999.0 for id in others}
            return {"token_id": drawn, "logprob": -0.5, "top_logprobs": [{"token_id": i, "logprob": x} for i, x in found.items()]}

        content = [entry(id) for id in ids]
        return {
            "index": index, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": "stop", "stop_reason": EOS,
            "weight_versions": [{"version": self.label, "start": 0, "end": length}],
        }  # fmt: skip

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        shutil.rmtree(self.mirror.folder, ignore_errors=True)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture
def engine_of(policy_of) -> Iterator[Callable[..., VllmEngine]]:
    made: list[VllmEngine] = []

    def make(*servers: FakeServer, in_flight: bool = False, patience: float = 60.0, **options: Any) -> VllmEngine:
        options = {"num_attention_heads": 1, "num_key_value_heads": 1} | options  # one head of 32
        policy = policy_of(dtype=torch.float32, **options)
        urls = [server.url for server in servers]
        made.append(VllmEngine(policy, servers=urls, in_flight=in_flight, patience=patience))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


SAMPLING = Sampling(temperature=0.7, max_new_tokens=9)
WATCHED = ("/health", "/metrics", "/weight_info", "groupwise_hold")
"""What a server is asked again and again."""


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in another thread."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def draw(engine: VllmEngine, prompts: list[Prompt], sampling: Sampling = SAMPLING, size: int = 3, seed: int = 5) -> dict[str, Any]:
    return {g[0].prompt.id: g for g in engine.generate(prompts, group_size=size, sampling=sampling, seed=seed)}


# ---- what is asked and what comes back


@pytest.mark.slow
def test_groups_come_back_whole_with_versions_and_log_probs(server, engine_of, prompts_of) -> None:
    engine, prompts = engine_of(server), prompts_of(4, 7, 2)
    engine.send_weights(3)
    groups = draw(engine, prompts)
    assert set(groups) == {prompt.id for prompt in prompts}
    for prompt in prompts:
        assert [rollout.index for rollout in groups[prompt.id]] == [0, 1, 2]
        for rollout in groups[prompt.id]:
            assert rollout.tokens.tolist() == [prompt.tokens[0]] * (2 + rollout.index) + [EOS]
            assert rollout.finish is Finish.EOS
            assert rollout.version.tolist() == [3] * len(rollout)
            assert rollout.behavior_logp.tolist() == [-0.5] * len(rollout)
            assert rollout.sampling == SAMPLING


@pytest.mark.slow
def test_every_sampling_setting_is_said_in_full(server, engine_of, prompts_of) -> None:
    engine = engine_of(server, eos_ids=(1, 2))
    (prompt,) = prompts_of(60)
    sampling = Sampling(temperature=0.7, top_k=4, top_p=0.9, min_p=0.05, max_new_tokens=9, stop=("a", "bc"))
    (group,) = draw(engine, [prompt], sampling).values()
    asked = server.requests[0]["sampling_params"]
    seed = asked.pop("seed")
    assert asked == {
        "n": 3, "temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.05, "logprobs": 8, "max_tokens": 4,
        "ignore_eos": True, "stop_token_ids": [1, 2], "stop": ["a", "bc"], "detokenize": True, "skip_special_tokens": False,
    }  # fmt: skip
    assert server.requests[0]["token_ids"] == prompt.tokens.tolist()
    for rollout in group:  # what could be drawn: the drawn token, and the candidates that are not at -9999
        assert [set(ids.tolist()) for ids in rollout.support] == [{int(token), 3, 4} for token in rollout.tokens]
    draw(engine, [prompt], sampling, seed=6)
    draw(engine, [prompt], sampling, seed=5)
    again = [request["sampling_params"]["seed"] for request in server.requests[1:]]
    assert again[1] == seed != again[0]


@pytest.mark.slow
def test_a_greedy_prompt_is_decoded_once(server, engine_of, prompts_of) -> None:
    (group,) = draw(engine_of(server), prompts_of(4), Sampling(temperature=0.0, max_new_tokens=9)).values()
    asked = server.requests[0]["sampling_params"]
    assert (asked["n"], asked["temperature"], asked["top_k"], asked["top_p"], asked["min_p"]) == (1, 0.0, 0, 1.0, 0.0)
    assert len(group) == 3 and len({rollout.tokens.tobytes() for rollout in group}) == 1


@pytest.mark.slow
def test_ids_of_no_token_are_never_asked_for(server, engine_of, prompts_of) -> None:
    server.facts["vocabulary"] = 48
    draw(engine_of(server, rows=48), prompts_of(4))
    asked = server.requests[0]["sampling_params"]
    assert asked["logit_bias"] == {str(id): -1e9 for id in range(40, 48)}
    assert not any(isinstance(value, list) and len(value) > 8 for value in asked.values()), (
        "what is sent grows with what is no token"
    )


@pytest.mark.slow
def test_a_group_is_handed_on_while_others_are_sampled(server, engine_of, prompts_of) -> None:
    prompts, go_on = prompts_of(4, 5), threading.Event()
    server.hold = lambda body: None if len(body["token_ids"]) == 4 else (go_on.wait(10), None)[1]
    groups = engine_of(server).generate(prompts, group_size=2, sampling=SAMPLING, seed=0)
    assert next(groups)[0].prompt is prompts[0]
    go_on.set()
    assert next(groups)[0].prompt is prompts[1]


IN_FLIGHT = 4
"""Requests for three completions each that are on their way to one of two servers of eight rows: one more than fits."""


@pytest.mark.slow
def test_several_servers_share_the_requests_and_the_slow_one_gets_fewer(server, engine_of, prompts_of) -> None:
    """The slow one answers only when the other has had all requests that are not on their way to it; the other begins after it."""
    slow, asked, rest = FakeServer(), threading.Event(), threading.Event()

    def hold(body: dict[str, Any]) -> None:
        assert asked.wait(60)
        if len(server.requests) >= 20 - IN_FLIGHT:
            rest.set()

    slow.hold = lambda body: (asked.set(), rest.wait(60))[0]
    server.hold = hold
    engine = engine_of(server, slow)
    assert len(draw(engine, prompts_of(*[4] * 20))) == 20
    assert rest.is_set()
    assert 1 <= len(slow.requests) <= IN_FLIGHT
    assert len(server.requests) == 20 - len(slow.requests)
    assert server.weights.keys() == slow.weights.keys()
    slow.close()


@pytest.mark.slow
def test_who_leaves_early_hangs_up(server, engine_of, prompts_of) -> None:
    asked = threading.Event()
    server.hold = lambda body: None if len(body["token_ids"]) == 4 else (asked.set(), server.until_hung_up())[1]
    groups = engine_of(server).generate(prompts_of(4, 5), group_size=2, sampling=SAMPLING, seed=0)
    next(groups)
    assert asked.wait(60)
    assert not server.hung_up.is_set()
    groups.close()
    assert server.hung_up.wait(30)


# ---- episodes


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0.0, 0.5])
def test_every_turn_is_a_request_with_all_ids_so_far(server, engine_of, prompts_of, scripted_environment, cut) -> None:
    other, prompts = FakeServer(), prompts_of(4, 7, 2)
    engine = engine_of(server, other)
    engine.send_weights(3)
    told, asked = None, []
    for delays in (None, 0, 1):
        for fake in (server, other):
            fake.requests.clear()
        engine.environment = environment = scripted_environment(cut=cut, cut_to="other", delays=delays)
        groups = draw(engine, prompts, Sampling(max_new_tokens=40))
        assert set(groups) == {prompt.id for prompt in prompts}
        rollouts = {(r.prompt.id, r.index): r for group in groups.values() for r in group}
        asked = []
        for name, rollout in rollouts.items():
            talk = environment.begun[name]
            assert talk.closed == [rollout.finish]
            branches = {branch.begin: branch.context for branch in rollout.episode.branches}
            context, begin = rollout.prompt.tokens, 0
            for turn, (tokens, finish, logp, version) in zip(rollout.episode.turns, talk.heard, strict=True):
                if turn.begin in branches:
                    context, begin = branches[turn.begin], turn.begin
                asked.append([*context.tolist(), *rollout.tokens[begin : turn.begin].tolist()])
                assert rollout.tokens[turn.begin : turn.end].tolist() == tokens == [asked[-1][0]] * (len(tokens) - 1) + [EOS]
                assert (finish, version, logp) == (Finish.EOS, 3, [-0.5] * len(tokens))
            assert rollout.trained.sum() == sum(turn.end - turn.begin for turn in rollout.episode.turns)
        found = [request["token_ids"] for fake in (server, other) for request in fake.requests]
        assert sorted(found) == sorted(asked)
        seeds = [request["sampling_params"]["seed"] for fake in (server, other) for request in fake.requests]
        assert len(set(seeds)) == len(seeds)
        transcripts = {name: rollout.tokens.tolist() for name, rollout in rollouts.items()}
        assert told is None or told == transcripts
        told = transcripts
    other.close()


@pytest.mark.slow
def test_a_world_that_waits_does_not_stop_other_turns(server, engine_of, prompts_of, scripted_environment) -> None:
    engine = engine_of(server)
    engine.environment = environment = scripted_environment(never=[("p1", 1)], delays=0)
    groups = engine.generate(prompts_of(4, 7, 2), group_size=3, sampling=Sampling(max_new_tokens=40), seed=5)
    assert {next(groups)[0].prompt.id, next(groups)[0].prompt.id} == {"p0", "p2"}
    groups.close()
    assert all(len(talk.closed) == 1 for talk in environment.begun.values())


def test_a_model_whose_text_part_has_a_section_of_its_own_is_known(policy_of) -> None:
    """As Gemma 3's: its vocabulary is not written where others write it."""
    policy = policy_of(dtype=torch.float32, num_attention_heads=1, num_key_value_heads=1)
    text = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 32}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 16}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Gemma3Config(text_config=text, vision_config=vision))
    policy = replace(policy, model=model)
    facts = FakeServer.facts_of(48)
    assert server_fitness.unfit(facts, policy) is None
    assert "a vocabulary of 40, the policy one of 48" in str(server_fitness.unfit(FakeServer.facts_of(40), policy))
    body = VllmEngine(policy, servers=["http://127.0.0.1:1"])._body(np.array([5]), 1, 4, 0, SAMPLING)
    assert list(body["sampling_params"]["logit_bias"]) == list(range(40, 48))


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("limit", [1, 20_000, 1 << 28])
def test_weights_travel_under_their_checkpoints_names(family: str, limit: int, policy_of, tmp_path) -> None:
    policy = policy_of(family, dtype=torch.float32)
    policy.model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent: dict[str, torch.Tensor] = {}
    parts = list(buckets(policy, torch.float32, limit))
    for names, shapes, flat in parts:
        sizes = [4 * int(np.prod(shape)) for shape in shapes]
        assert flat.numel() == sum(sizes) and (len(names) == 1 or sum(sizes) <= limit)
        sent |= {n: part.view(torch.float32).view(s) for n, part, s in zip(names, flat.split(sizes), shapes, strict=True)}
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)
    assert (len(parts) == 1) == (limit == 1 << 28)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_adapter_travels_inside_the_weights_it_changes(family: str, policy_of, tmp_path) -> None:
    policy = adapt(policy_of(family, dtype=torch.float32), LoraSettings(rank=2, alpha=4.0), base="")
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name in policy.adapter.trained:
                parameter.normal_()
    save(policy, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    ((names, shapes, flat),) = buckets(policy, torch.float32)
    parts = flat.split([4 * int(np.prod(shape)) for shape in shapes])
    assert set(names) == saved.keys()
    for name, shape, part in zip(names, shapes, parts, strict=True):
        assert torch.equal(part.view(torch.float32).view(shape), saved[name]), name


@pytest.mark.slow
def test_weights_arrive_in_the_servers_dtype_before_the_pause(server, engine_of) -> None:
    server.facts["dtype"] = "bfloat16"
    engine = engine_of(server)
    engine.send_weights(2)
    for name, weight in engine.policy.model.named_parameters():
        assert torch.equal(server.weights[name], weight.detach().to(torch.bfloat16)), name
    last_fetch = len(server.calls) - server.calls[::-1].index("groupwise_fetched")
    told = ["/pause", "/reset_prefix_cache", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
    assert [call for call in server.calls[last_fetch:] if call not in WATCHED] == told
    assert server.label.endswith(":2")


@pytest.mark.slow
def test_the_same_version_is_sent_once(server, engine_of, prompts_of) -> None:
    engine = engine_of(server)
    draw(engine, prompts_of(4))  # before any send_weights the weights go out too: version 0
    engine.send_weights(0)
    assert server.calls.count("/finish_weight_update") == 1
    engine.send_weights(1)
    assert server.calls.count("/finish_weight_update") == 2


# ---- adapters alone


@pytest.fixture
def adapted_engine(policy_of) -> Iterator[Callable[..., VllmEngine]]:
    made: list[VllmEngine] = []

    def make(server: FakeServer, **lora: Any) -> VllmEngine:
        policy = policy_of(dtype=torch.float32, num_attention_heads=1, num_key_value_heads=1)
        policy = adapt(policy, LoraSettings(**({"rank": 4} | lora)), base="")
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if name in policy.adapter.trained:
                    parameter.normal_()
        made.append(VllmEngine(policy, servers=[server.url]))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "bound"), [("", 0.01), ("fp8", 0.1)])
def test_a_server_that_quantises_is_not_held_to_the_rounding_of_float32(
    quantization: str, bound: float, server, adapted_engine, prompts_of
) -> None:
    server.facts["quantization"] = quantization
    engine = adapted_engine(server)
    engine.send_weights(1)
    draw(engine, prompts_of(2))
    assert engine.tolerance == bound


def test_the_command_of_a_server_names_how_it_quantises() -> None:
    options = {"python": Path("python"), "host": "127.0.0.1", "port": 1, "rows": 1, "dtype": "bfloat16"}
    line = command("model", **options, quantization="fp8")  # type: ignore[arg-type]
    assert line[line.index("--quantization") + 1] == "fp8"
    assert "--quantization" not in command("model", **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_adapter_goes_alone_to_a_server_that_has_room_for_its_rank(server, adapted_engine, prompts_of) -> None:
    """Under a name of its own for each version; two stay; the weights under them are sent once."""
    server.facts["lora_rank"] = 8
    engine = adapted_engine(server)
    for version in range(4):
        engine.send_weights(version)
        (group,) = draw(engine, prompts_of(4)).values()
        assert {int(one) for rollout in group for one in rollout.version} == {version}
        run, _, newest = server.requests[-1]["model"].partition(":")
        assert newest == str(version)
        assert list(server.adapters) == [f"{run}:{one}" for one in (version - 1, version) if one >= 0]
        saved = load_file(Path(server.adapters[f"{run}:{version}"]) / "adapter_model.safetensors")
        assert len(saved) == len(engine.policy.adapter.trained)
    assert server.label == f"{run}.base:0"
    assert server.calls.count("/update_weights") == 1
    below = without_adapter(engine.policy)
    expected = dict(buckets_of(below))
    assert all(torch.equal(server.weights[name], weight) for name, weight in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "lora"),
    [
        (0, {}),
        (2, {}),
        (8, {"modules_to_save": ("gate_proj",), "targets": ("q_proj",)}),
        (8, {"rank": 8, "rank_pattern": {"q_proj": 16}}),
    ],
    ids=["no adapters", "too low a rank", "a module of its own", "too low a rank for one layer"],
)
def test_an_adapter_that_a_server_cannot_take_is_merged(
    rank: int, lora: dict[str, Any], server, adapted_engine, prompts_of
) -> None:
    server.facts["lora_rank"] = rank
    engine = adapted_engine(server, **lora)
    engine.send_weights(0)
    engine.send_weights(1)
    assert not server.adapters and server.calls.count("/update_weights") == 2
    assert len(draw(engine, prompts_of(4))) == 1
    assert server.requests[-1]["model"] == "policy"
    assert all(torch.equal(server.weights[name], weight) for name, weight in buckets_of(engine.policy))


@pytest.mark.slow
def test_a_server_that_has_lost_the_weights_under_the_adapters_gets_them_again(server, adapted_engine, prompts_of) -> None:
    """What other weights drew meanwhile is never taken for the adapter's."""
    server.facts["lora_rank"] = 8
    engine = adapted_engine(server)
    engine.send_weights(0)
    label, server.label = server.label, "somebody.base:0"
    (group,) = draw(engine, prompts_of(4)).values()
    assert {int(one) for rollout in group for one in rollout.version} == {0}
    assert server.label == label and server.calls.count("/update_weights") == 2


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True], ids=["weights", "adapters"])
def test_a_run_that_goes_back_repeats_no_label(alone: bool, server, adapted_engine, prompts_of) -> None:
    """As one does that ends with its best evaluation: the number is an earlier one, the weights need not be those of then."""
    server.facts["lora_rank"] = 8 if alone else 0
    engine = adapted_engine(server)
    said = {}
    for step, version in enumerate((3, 4, 5, 3, 4)):
        with torch.no_grad():
            for name, parameter in engine.policy.model.named_parameters():
                if name in engine.policy.adapter.trained:
                    parameter.fill_(0.01 * step)
        engine.send_weights(version)
        (group,) = draw(engine, prompts_of(4)).values()
        assert {int(one) for rollout in group for one in rollout.version} == {version}
        label = server.requests[-1]["model"] if alone else server.label
        assert label not in said and label.endswith(f":{version}")
        said[label] = step
        if alone:
            saved = load_file(Path(server.adapters[label]) / "adapter_model.safetensors")
            assert all((tensor == 0.01 * step).all() for tensor in saved.values())
        else:
            assert all(torch.equal(server.weights[name], weight) for name, weight in buckets_of(engine.policy))
    assert len({label.rpartition(":")[0] for label in said}) == 2


# ---- weights that reach completions on their way


@pytest.mark.slow
def test_new_weights_reach_completions_that_are_half_done(server, engine_of, prompts_of) -> None:
    """They are kept while the servers pause, and each token says which weights drew it."""
    engine, asked, go_on = engine_of(server, in_flight=True), threading.Event(), threading.Event()
    engine.send_weights(4)
    begun = server.label

    def hold(_: dict[str, Any]) -> None:
        asked.set()
        assert go_on.wait(10)

    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        for choice in answer["choices"]:
            end = len(choice["token_ids"])
            choice["weight_versions"] = [
                {"version": begun, "start": 0, "end": 2}, {"version": server.label, "start": 2, "end": end}
            ]  # fmt: skip
        return answer

    server.hold, server.spoil, found = hold, spoil, {}
    thread = threading.Thread(target=lambda: found.update(draw(engine, prompts_of(4))))
    thread.start()
    assert asked.wait(10)
    engine.send_weights(5)
    until(lambda: server.label.endswith(":5"))
    assert server.paused == ["keep", "keep"]
    go_on.set()
    thread.join(10)
    (group,) = found.values()
    assert [rollout.version.tolist() for rollout in group] == [[4, 4, 5], [4, 4, 5, 5], [4, 4, 5, 5, 5]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "spans",
    [
        [("3", 0, 2), ("4", 2, 4)],  # older than the request
        [("4", 0, 2), ("6", 2, 4)],  # newer than all that were sent
        [("4", 0, 2), ("4", 3, 4)],  # a token is missing
        [("4", 0, 2)],
        [],
    ],
)
def test_p5_a_token_of_no_version_that_it_can_have_is_refused(spans, server, engine_of, prompts_of) -> None:
    engine = engine_of(server, in_flight=True)
    engine.send_weights(4)
    run = server.label.removesuffix("4")
    server.spoil = spoilt(weight_versions=[{"version": run + name, "start": begin, "end": end} for name, begin, end in spans])
    with pytest.raises(EngineError, match="drawn by stale or foreign weights"):
        draw(engine, prompts_of(4))


@pytest.mark.slow
def test_closing_the_engine_ends_what_another_thread_samples(server, engine_of, prompts_of) -> None:
    engine, asked, said = engine_of(server, in_flight=True), threading.Event(), []
    server.hold = lambda body: (asked.set(), server.until_hung_up())[1]

    def sample() -> None:
        with pytest.raises(EngineError, match="the engine was closed") as found:
            draw(engine, prompts_of(4))
        said.append(found)

    thread = threading.Thread(target=sample)
    thread.start()
    assert asked.wait(60)
    engine.close()
    thread.join(30)  # half as long as the server would take
    assert said


# ---- what must not be believed


def spoilt(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][1] |= changes
        return answer

    return spoil


def entry(logp: Any) -> dict[str, Any]:
    return {"logprobs": {"content": [{"token_id": 3, "logprob": logp, "top_logprobs": []}] * 4}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda answer: {"choices": answer["choices"][:2]}, "2 completions came back, 3 were asked for"),
        (lambda answer: {}, "cannot be read"),
        (spoilt(index=0), "3 completions came back"),
        (spoilt(token_ids=[3, 3, 40, 1]), "outside of the vocabulary of 40"),
        (spoilt(token_ids=[3, 1, 3, 1]), "continues after an end of sequence"),
        (spoilt(token_ids=[]), "0 tokens"),
        (spoilt(token_ids=[3] * 4, finish_reason="length"), "4 tokens, ended by 'length', where up to 9"),
        (spoilt(token_ids=[3] * 4, stop_reason="x"), "stopped by 'x'"),
        (spoilt(finish_reason="abort"), "'abort': somebody else"),
        (spoilt(logprobs=None), "cannot be read"),
        (spoilt(**entry(None)), "cannot be read"),
        (spoilt(**entry(float("nan"))), "do not have a log-prob each"),
        (spoilt(**entry(-9999.0)), "do not have a log-prob each"),
        (spoilt(**entry(0.5)), "do not have a log-prob each"),
        (spoilt(weight_versions=None), "weights without a version"),
        (spoilt(weight_versions=[{"version": "default", "start": 0, "end": 4}]), "stale or foreign weights \\(default, not"),
    ],
)
def test_p4_an_answer_that_cannot_be_is_refused(spoil, says: str, server, engine_of, prompts_of) -> None:
    server.spoil = spoil
    with pytest.raises(EngineError, match=says):
        draw(engine_of(server), prompts_of(4))


@pytest.mark.slow
def test_p5_tokens_of_two_versions_are_refused(server, engine_of, prompts_of) -> None:
    engine = engine_of(server)
    engine.send_weights(1)
    server.spoil = spoilt(
        weight_versions=[{"version": server.label, "start": 0, "end": 2}, {"version": "other", "start": 2, "end": 4}]
    )
    with pytest.raises(EngineError, match="stale or foreign weights"):
        draw(engine, prompts_of(4))


@pytest.mark.slow
def test_a_support_that_is_cut_off_is_refused(server, engine_of, prompts_of) -> None:
    server.spoil = lambda answer: json.loads(json.dumps(answer).replace("-9999.0", "-2.0"))
    with pytest.raises(EngineError, match="9 tokens could have been drawn where top_k is 4"):
        draw(engine_of(server), prompts_of(4), Sampling(top_k=4, max_new_tokens=9))


@pytest.mark.slow
def test_a_min_p_that_was_not_kept_is_found(server, engine_of, prompts_of) -> None:
    with pytest.raises(EngineError, match=r"a token 1.00 nats below the likeliest could have been drawn where min_p is 0.5"):
        draw(engine_of(server), prompts_of(4), Sampling(top_k=4, min_p=0.5, max_new_tokens=9))


@pytest.mark.parametrize(
    ("facts", "sampling", "size", "says"),
    [
        ({"logprobs": "raw_logprobs"}, SAMPLING, 3, "raw_logprobs, which know no temperature"),
        ({"heads": 2}, SAMPLING, 3, "knows heads of 32, .*, the policy's have 16"),
        ({"vocabulary": 99}, SAMPLING, 3, "a vocabulary of 99, the policy one of 40"),
        ({"rows": 2}, SAMPLING, 3, "decodes 2 completions at a time, fewer than a group of 3"),
        ({"context": 12}, SAMPLING, 3, "sequences of 12 tokens, but a prompt and its completion may have 13"),
        ({}, Sampling(top_p=0.9), 3, "need a top_k from 1 to 128"),
        ({}, Sampling(top_k=200, max_new_tokens=4), 3, "need a top_k"),
    ],
)
def test_an_unfit_server_is_refused_with_the_remedy(facts, sampling, size, says, server, engine_of, prompts_of) -> None:
    server.facts |= facts
    options = {"num_attention_heads": facts.get("heads", 1)}
    if sampling.top_k == 200:
        options["vocabulary"] = server.facts["vocabulary"] = 500
    with pytest.raises(EngineError, match=says):
        draw(engine_of(server, **options), prompts_of(4), sampling, size)


def test_a_mixture_of_experts_is_refused_on_a_cpu(policy_of, server) -> None:
    engine = VllmEngine(
        policy_of("mixtral", dtype=torch.float32, num_attention_heads=1, num_key_value_heads=1), servers=[server.url]
    )
    with pytest.raises(EngineError, match=r"do not all reach its experts"):
        engine.send_weights(0)
    engine.close()
    server.facts["device"] = "cuda"
    engine = VllmEngine(engine.policy, servers=[server.url])
    engine.send_weights(0)
    expected = dict(buckets_of(engine.policy))
    assert server.weights.keys() == expected.keys()
    assert all(torch.equal(server.weights[name], weight) for name, weight in expected.items())
    engine.close()


def buckets_of(policy: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a float32 policy, as a colocated vLLM gets them."""
    for names, shapes, flat in buckets(policy, torch.float32):
        parts = flat.view(torch.float32).split([int(np.prod(shape)) for shape in shapes])
        for name, shape, part in zip(names, shapes, parts, strict=True):
            yield name, part.view(shape)


def test_a_server_without_the_plug_in_is_refused(server, engine_of) -> None:
    server.status["/collective_rpc"] = 500
    with pytest.raises(EngineError, match="groupwise serve"):
        engine_of(server).send_weights(0)


# ---- servers that are gone


@pytest.mark.slow
def test_p1_a_server_that_is_not_there_is_named(engine_of, server) -> None:
    engine = engine_of(server, patience=0.5)
    server.close()
    says = rf"no server has answered for 0.5 s: .*{server.url} does not exist: .*`groupwise serve MODEL`.*rollout.engine.patience"
    with pytest.raises(PeerError, match=says):
        engine.send_weights(0)


@pytest.mark.slow
def test_p2_the_only_server_that_dies_while_it_samples_is_waited_for_and_named(engine_of, server, prompts_of) -> None:
    engine = engine_of(server, patience=1.0)
    engine.send_weights(0)
    server.dies |= {"/inference/v1/generate", "/health"}
    with pytest.raises(PeerError, match=f"no server has answered for 1 s: .*{server.url} broke the connection off"):
        draw(engine, prompts_of(4, 5, 6))


@pytest.mark.slow
def test_p3_a_server_that_falls_silent_is_named(engine_of, server, prompts_of, monkeypatch) -> None:
    monkeypatch.setattr(member, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(pool, "POLL", 0.1)
    engine, silent = engine_of(server, patience=1.0), threading.Event()
    engine.send_weights(0)

    def fall_silent(body: dict[str, Any]) -> None:
        silent.set()
        server.until_hung_up()

    answer = server.do
    server.hold = fall_silent
    server.do = lambda path, body: server.until_hung_up() if silent.is_set() else answer(path, body)  # type: ignore[method-assign]
    with pytest.raises(PeerError, match=r"has given no answer for 0 s .GET /health"):
        draw(engine, prompts_of(4))


@pytest.mark.slow
def test_p3_a_server_that_answers_but_computes_nothing_is_named(engine_of, server, prompts_of, monkeypatch) -> None:
    monkeypatch.setattr(member, "STALLED", 0.5)
    monkeypatch.setattr(pool, "POLL", 0.1)
    server.hold = lambda body: server.until_hung_up()
    engine = engine_of(server, patience=1.0)
    engine.send_weights(0)
    answer = server.do
    server.do = lambda path, body: server.until_hung_up() if path == "/collective_rpc" else answer(path, body)  # type: ignore[method-assign]
    with pytest.raises(PeerError, match=rf"{server.url} answers, but has computed nothing for \d+ s: it hangs"):
        draw(engine, prompts_of(4))


@pytest.mark.slow
@pytest.mark.parametrize("why", ["it computes", "it compiles", "it takes weights"])
def test_p3_a_server_that_is_slow_is_waited_for(why: str, engine_of, server, prompts_of, monkeypatch) -> None:
    """As long as its tokens grow in number; until its very first one; and while it may not compute."""
    now = 0.0
    monkeypatch.setattr(member, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(pool, "POLL", 0.02)
    engine = engine_of(server, in_flight=True)
    engine.send_weights(0)
    monkeypatch.setattr(VersionedServer, "go_to", lambda *_, **__: threading.Event().wait(60))
    server.computed = 0.0 if why == "it compiles" else 5.0

    def work(_: dict[str, Any]) -> None:
        """Five times as long as a server may stand still, and looked at each time the clock has gone on."""
        nonlocal now
        if why == "it takes weights":
            engine.send_weights(1)
            until(lambda: all(one.moving for one in engine.servers.members.values()))
        for _ in range(20):
            server.computed += why == "it computes"
            now += member.STALLED / 4
            looks = server.calls.count("/metrics") + 2
            while server.calls.count("/metrics") < looks:
                time.sleep(0.005)

    server.hold = work
    assert len(draw(engine, prompts_of(4))) == 1


@pytest.mark.slow
def test_a_server_that_counts_nothing_is_refused(engine_of, server, prompts_of, monkeypatch) -> None:
    answer = server.do
    server.do = lambda path, body: "" if path == "/metrics" else answer(path, body)  # type: ignore[method-assign]
    server.hold = lambda body: server.until_hung_up()
    with pytest.raises(EngineError, match="does not say what it computes: start it without --disable-log-stats"):
        draw(engine_of(server), prompts_of(4))


@pytest.mark.slow
def test_a_server_that_works_for_another_run_is_refused_and_that_run_goes_on(server, engine_of, prompts_of, monkeypatch) -> None:
    monkeypatch.setattr(pool, "HELD", 0.5)
    ask = Lease.ask
    monkeypatch.setattr(Lease, "ask", lambda self, run, seconds: ask(self, run, 3600.0))  # however slow this machine is
    first, second = engine_of(server), engine_of(server)
    first.send_weights(0)
    with pytest.raises(EngineError, match=r"samples for another run \(.*, process \d+ on .*\): give each run its own servers"):
        second.send_weights(0)
    assert len(draw(first, prompts_of(4))) == 1
    assert {one["label"] for one in server.deliveries} == {f"{first._run}:0"}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["it ends", "it is killed"])
def test_a_server_of_a_run_that_is_over_works_for_the_next_one(how: str, server, engine_of, prompts_of, monkeypatch) -> None:
    monkeypatch.setattr(pool, "HELD", 2.0 if how == "it is killed" else 3600.0)
    first, second = engine_of(server), engine_of(server)
    first.send_weights(0)
    if how == "it is killed":
        monkeypatch.setattr(member.Member, "let_go", lambda *_: None)
    first.close()
    second.send_weights(0)
    assert len(draw(second, prompts_of(4))) == 1


@pytest.mark.slow
def test_a_run_ends_whose_server_works_for_another_one(server, engine_of, prompts_of, monkeypatch) -> None:
    """It was stopped for so long that it counted as killed."""
    monkeypatch.setattr(pool, "POLL", 0.1)
    first, second = engine_of(server), engine_of(server)
    first.send_weights(0)
    server.lease.end(first.servers._holder)
    server.lease.ask(second.servers._holder, 60.0)
    until(lambda: first.servers._failure is not None)
    with pytest.raises(EngineError, match=r"samples for another run .*: give each run its own servers"):
        draw(first, prompts_of(4))
    second.send_weights(0)
    assert len(draw(second, prompts_of(4))) == 1


def test_a_server_that_was_started_anew_gets_all_weights(server, engine_of) -> None:
    engine = engine_of(server)
    engine.send_weights(0)
    engine.send_weights(1)
    shutil.rmtree(server.mirror.folder)
    server.mirror = Mirror(server.mirror.folder)
    engine.send_weights(2)
    assert [one["full"] for one in server.deliveries] == [True, False, True]
    assert all(torch.equal(server.weights[name], weight) for name, weight in engine.policy.model.named_parameters())


def test_a_server_that_reads_only_damaged_patches_is_healed_at_once(server, engine_of, monkeypatch) -> None:
    """No full version lies behind the patch, so all weights are written for it."""
    engine = engine_of(server)
    engine.send_weights(0)
    with torch.no_grad():
        engine.policy.model.get_input_embeddings().weight.mul_(1.5)
    add = publisher.BlockFile.add
    monkeypatch.setattr(publisher.BlockFile, "add", lambda self, data, *more: add(self, data[:-5] + b"wrong", *more))
    damaged = engine._delivery._publisher.publish(engine.policy, 1)
    monkeypatch.undo()
    assert damaged.patch and not damaged.full
    monkeypatch.setattr(publisher.Publisher, "publish", lambda *_: damaged)
    engine.send_weights(1)
    assert [bool(one["error"]) for one in server.deliveries] == [False, True, False]
    assert server.deliveries[-1]["full"]
    assert all(torch.equal(server.weights[name], weight) for name, weight in engine.policy.model.named_parameters())
    assert server.label == damaged.label


def test_a_server_of_another_groupwise_is_refused_at_once(server, engine_of) -> None:
    del server.facts["format"]
    with pytest.raises(EngineError, match="started by another version of Groupwise: start it anew with `groupwise serve"):
        engine_of(server).send_weights(0)


def test_a_server_of_ones_own_that_ends_between_two_updates_is_named_by_how_it_ended(server, engine_of) -> None:
    engine = engine_of(server)
    engine.send_weights(0)
    server.dies.add("/health")

    def alive() -> None:
        raise EngineError("the vLLM server was killed by signal 9")

    engine.servers._alive = alive
    with pytest.raises(EngineError, match="killed by signal 9"):
        engine.send_weights(1)


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/resume"])
def test_an_update_that_fails_ends_at_once(path: str, engine_of, server, monkeypatch) -> None:
    monkeypatch.setattr(published, "UPDATE_SECONDS", 3600.0)  # whoever waits for the server waits too long for this test
    server.status[path] = 500
    with pytest.raises((EngineError, PeerError), match=path):
        engine_of(server).send_weights(0)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "https://a:1", "http://", "http://a:1/v1", "http://a:65536", "http://a:0", "http://a:b", "http://[::1]:1"],
)
def test_an_address_is_an_address(url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        Client(url)


@pytest.mark.slow
def test_a_page_of_somebody_elses_server_is_told_in_one_line() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(EngineError, match="answers GET /health with 501: <!DOCTYPE") as failure:
            Client(f"http://127.0.0.1:{other.server_port}").get("/health", timeout=5)
        other.shutdown()
    assert "\n" not in str(failure.value)


def test_a_server_is_named_once() -> None:
    """It would be told twice to take the same weights."""
    with pytest.raises(ConfigError, match="named twice: http://a:80 and http://a:80"):
        addresses_of(["http://A/", "http://a:80"])
