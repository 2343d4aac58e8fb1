"""The engine on a real vLLM server: what it samples is what the policy scores, and what makes it differ is found."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from steps import score_rollouts

from groupwise.errors import EngineError, PeerError
from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.models.saving import save
from groupwise.models.sharded import frozen_copy
from groupwise.records import Finish, Prompt, Rollout, Sampling, Step
from groupwise.rollout import sampling as draws
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.stopping import Stopping
from groupwise.rollout.vllm import member, pool, publisher
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.engine import EXACT, VllmEngine
from groupwise.rollout.vllm.member import read_counters
from groupwise.rollout.vllm.published import FetchReport, VersionedServer
from groupwise.rollout.vllm.scoring import ScoringServers
from groupwise.rollout.vllm.version_server import VersionHandler
from groupwise.runs.engines import check_agreement
from groupwise.training.passes import score
from groupwise.training.samples import sample_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SAMPLING = Sampling(temperature=0.7, max_new_tokens=24)


@pytest.fixture(scope="module")
def engine(serving: Any) -> Iterator[VllmEngine]:
    """For the tests before the first that asks for `free`."""
    found = VllmEngine(serving.policy, servers=[serving.url])
    yield found
    found.close()


class FreeServer:
    """A server that works for no run, and the engines of a test that ask for it."""

    def __init__(self, serving: Any) -> None:
        self.url, self.policy, self.process = serving.url, serving.policy, serving.process
        self.engines: list[VllmEngine] = []

    def engine(self, policy: Policy, **options: Any) -> VllmEngine:
        self.engines.append(VllmEngine(policy, servers=[self.url], **options))
        return self.engines[-1]


@pytest.fixture
def free(engine: VllmEngine, serving: Any) -> Iterator[FreeServer]:
    """The server for engines of the test's own, which end with it: it works for one run at a time."""
    engine.close()
    found = FreeServer(serving)
    yield found
    for one in found.engines:
        one.close()


@pytest.fixture
def prompts() -> list[Prompt]:
    """Ragged ones; the longest fill blocks of the prefix cache."""
    rng = np.random.default_rng(0)
    return [Prompt(id=f"p{i}", tokens=rng.integers(5, 60, size=n), text="") for i, n in enumerate((1, 40, 66, 12, 33, 64))]


def draw(engine: Any, prompts: list[Prompt], sampling: Sampling = SAMPLING, seed: int = 0, size: int = 4) -> list[Rollout]:
    groups = {g[0].prompt.id: g for g in engine.generate(prompts, group_size=size, sampling=sampling, seed=seed)}
    return [rollout for prompt in prompts for rollout in groups[prompt.id]]


def gaps(policy: Policy, rollouts: list[Rollout]) -> np.ndarray:
    """|sampled - scored| of every token."""
    scored = score(policy, [sample_of(rollout) for rollout in rollouts], max_tokens_per_microbatch=4096).logp
    return np.concatenate([np.abs(logp - rollout.behavior_logp) for logp, rollout in zip(scored, rollouts, strict=True)])


def own_support(policy: Policy, rollout: Rollout) -> list[np.ndarray]:
    """What could have been drawn for each token, by the native engine's rules on the model's own logits."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]))
    with plain_attention(policy.model) as model, torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, rollout.prompt.tokens.size - 1 : -1]
    support = draws.draw(logits, torch.zeros(len(logits), dtype=torch.float64), rollout.sampling)[2]
    assert support is not None
    return [found[:size].numpy() for found, size in zip(support.ids_RC, support.size_R, strict=True)]


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLING,
        Sampling(temperature=1.3, max_new_tokens=24),
        Sampling(temperature=0.9, top_k=5, max_new_tokens=24),
        Sampling(temperature=1.1, top_k=8, top_p=0.8, max_new_tokens=24),
        Sampling(temperature=0.7, top_k=30, min_p=0.3, max_new_tokens=24),
        Sampling(temperature=0.0, max_new_tokens=24),
    ],
    ids=["cool", "warm", "top_k", "top_p", "min_p", "greedy"],
)
def test_what_is_sampled_is_what_is_scored(sampling: Sampling, engine: VllmEngine, prompts: list[Prompt]) -> None:
    rollouts = draw(engine, prompts, sampling)
    found = gaps(engine.policy, rollouts)
    assert found.size > 100 and found.max() < 1e-4
    assert any(rollout.finish is Finish.EOS for rollout in rollouts) or sampling.greedy
    if sampling.greedy:
        native = draw(NativeEngine(engine.policy, max_rows=8), prompts, sampling)
        assert [r.tokens.tolist() for r in rollouts] == [r.tokens.tolist() for r in native]
    if sampling.restricts:
        expected = [ids for rollout in rollouts for ids in own_support(engine.policy, rollout)]
        found_ids = [ids for rollout in rollouts for ids in rollout.support or ()]
        same = [set(ours) == set(theirs) for ours, theirs in zip(expected, found_ids, strict=True)]
        assert np.mean(same) > 0.99  # a token on the very edge may fall on either side
        assert any(ids.size < sampling.top_k for ids in found_ids) or (sampling.top_p == 1.0 and sampling.min_p == 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_ids_that_are_no_token_are_never_drawn(temperature: float, engine: VllmEngine, prompts: list[Prompt], monkeypatch) -> None:
    """And have no share in what is drawn from: log-probs are those of a policy that does not have them."""
    fewer = replace(engine.policy, vocabulary=engine.policy.vocabulary - 30)
    monkeypatch.setattr(engine, "policy", fewer)
    known = [replace(prompt, tokens=prompt.tokens % fewer.vocabulary) for prompt in prompts]
    rollouts = draw(engine, known, Sampling(temperature=temperature, max_new_tokens=24))
    assert max(int(rollout.tokens.max()) for rollout in rollouts) < fewer.vocabulary
    assert gaps(fewer, rollouts).max() < 1e-4


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_p12_log_probs_are_those_at_the_temperature_of_sampling(
    temperature: float, engine: VllmEngine, prompts: list[Prompt]
) -> None:
    """vLLM's own default are those at temperature 1: these would be off by far more."""
    rollouts = draw(engine, prompts, Sampling(temperature=temperature, max_new_tokens=24))
    assert gaps(engine.policy, rollouts).mean() < 1e-4
    raw = [replace(rollout, sampling=replace(rollout.sampling, temperature=1.0)) for rollout in rollouts]
    assert temperature == 1.0 or gaps(engine.policy, raw).mean() > 0.02


def test_the_distribution_is_the_native_engines(engine: VllmEngine) -> None:
    """First tokens of 800 completions: the counts of both engines differ by no more than chance."""
    prompt, count, sampling = Prompt(id="x", tokens=np.array([7, 9, 11]), text=""), 16, Sampling(temperature=1.0, max_new_tokens=1)
    tallies = []
    for source in (engine, NativeEngine(engine.policy, max_rows=64)):
        firsts = [r.tokens[0] for seed in range(50) for r in draw(source, [prompt], sampling, seed=seed, size=count)]
        tallies.append(np.bincount(firsts, minlength=engine.policy.vocabulary))
    both = tallies[0] + tallies[1]
    seen = both >= 10
    statistic = ((tallies[0] - tallies[1])[seen] ** 2 / both[seen]).sum()  # chi-square, `seen` - 1 degrees of freedom
    assert seen.sum() > 3 and statistic < seen.sum() + 5 * np.sqrt(2 * seen.sum())


def test_the_same_seed_draws_the_same_and_completions_of_a_group_differ(engine: VllmEngine, prompts: list[Prompt]) -> None:
    first, again, other = (draw(engine, prompts, seed=seed) for seed in (1, 1, 2))
    same = np.mean([np.array_equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True)])
    assert same > 0.9  # what else is in the batch may change a last bit
    assert np.mean([np.array_equal(a.tokens, b.tokens) for a, b in zip(first, other, strict=True)]) < 0.3
    assert len({r.tokens.tobytes() for r in first[4:8]}) > 1


def test_stop_strings_and_several_ends_are_those_of_the_native_engine(engine: VllmEngine, prompts: list[Prompt]) -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=24, stop=("1", "+"))
    rollouts = draw(engine, prompts, sampling)
    stopping = Stopping(engine.policy.eos_ids, sampling.stop, engine.policy.tokenizer)
    assert {rollout.finish for rollout in rollouts} >= {Finish.STOP}
    for rollout in rollouts:
        tokens = rollout.tokens.tolist()
        ends = [stopping.finish(tokens[: n + 1], 24) for n in range(len(tokens))]
        assert ends[:-1] == [None] * (len(tokens) - 1) and ends[-1] is rollout.finish


def test_new_weights_are_sampled_with_at_once(engine: VllmEngine, prompts: list[Prompt], moved: Callable) -> None:
    """Three updates of a model whose head is tied to its embedding: vLLM keeps a packed copy of the head on a CPU."""
    draw(engine, prompts)
    for _ in range(3):
        moved(engine.policy)
        assert gaps(engine.policy, draw(engine, prompts)).mean() > 0.1  # the servers have the old ones
        engine.send_weights(engine.version + 1)
        rollouts = draw(engine, prompts)
        assert gaps(engine.policy, rollouts).max() < 1e-4
        assert {int(v) for rollout in rollouts for v in rollout.version} == {engine.version}


def step(rollouts: list[Rollout], policy: Policy) -> Step:
    """A step that reports the mismatch of these rollouts, as training would."""
    return Step(number=1, metrics={"mismatch/mean": float(gaps(policy, rollouts).mean())})


def stops(engine: VllmEngine, rollouts: list[Rollout]) -> None:
    with pytest.raises(EngineError, match="sampled and scored log-probs differ by"):
        check_agreement(step(rollouts, engine.policy), engine)


def test_a_wrong_temperature_is_found(engine: VllmEngine, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    ask = VllmEngine._body

    def lie(*arguments: Any) -> dict[str, Any]:
        body = ask(*arguments)
        body["sampling_params"]["temperature"] = 1.0
        return body

    check_agreement(step(draw(engine, prompts), engine.policy), engine)
    monkeypatch.setattr(VllmEngine, "_body", lie)
    stops(engine, draw(engine, prompts))


def test_stale_weights_are_found(engine: VllmEngine, serving: Any, prompts: list[Prompt], moved: Callable) -> None:
    """By their log-probs where the server says a wrong version; by the version where it says it, and then they are renewed."""
    draw(engine, prompts)
    moved(engine.policy)
    stops(engine, draw(engine, prompts))
    Client(serving.url).post("/update_weight_version", {"new_version": "somebody else's"}, timeout=600)
    retries = engine.metrics()["servers/retries"]
    assert {int(v) for rollout in draw(engine, prompts) for v in rollout.version} == {engine.version}
    assert engine.metrics()["servers/retries"] > 0.0 == retries
    engine.send_weights(engine.version + 1)
    assert gaps(engine.policy, draw(engine, prompts)).max() < 1e-4


def test_a_missing_cache_reset_is_found(
    engine: VllmEngine, prompts: list[Prompt], moved: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(engine, prompts)  # fills the cache
    moved(engine.policy)
    post = VersionedServer._post
    left_out = ("/pause?mode=abort", "/reset_prefix_cache", "/resume")
    with monkeypatch.context() as patch:
        patch.setattr(VersionedServer, "_post", lambda self, path, *a: None if path in left_out else post(self, path, *a))
        engine.send_weights(engine.version + 1)
        stops(engine, draw(engine, prompts))
    engine.send_weights(engine.version + 1)
    assert gaps(engine.policy, draw(engine, prompts)).max() < 1e-4


def test_a_tied_head_kept_stale_is_found(
    engine: VllmEngine, serving: Any, prompts: list[Prompt], moved: Callable, tmp_path: Any
) -> None:
    """vLLM's own reload on a CPU renews the embedding and not the packed head: the trap that the plug-in closes."""
    draw(engine, prompts)
    moved(engine.policy)
    save(engine.policy, tmp_path)
    wire = Client(serving.url)
    wire.post("/pause?mode=abort", timeout=600)
    wire.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}, timeout=600)
    wire.post("/resume", timeout=600)
    stops(engine, draw(engine, prompts))
    engine.send_weights(engine.version + 1)
    assert gaps(engine.policy, draw(engine, prompts)).max() < 1e-4
    assert EXACT >= 1e-4


def test_p4_a_server_of_another_model_is_refused(free: FreeServer, tiny_policy: Callable) -> None:
    deeper = free.engine(tiny_policy("llama", layers=3, hidden=64, heads=2, kv_heads=1))
    with pytest.raises(EngineError, match=r"/update_weights|/finish_weight_update"):
        deeper.send_weights(0)
    deeper.close()
    engine = free.engine(free.policy)  # the server has survived it
    engine.send_weights(0)
    rollouts = draw(engine, [Prompt(id="a", tokens=np.array([5, 6, 7]), text="")])
    assert gaps(free.policy, rollouts).max() < 1e-4
    engine.close()


def test_weights_that_arrive_in_flight_draw_the_rest_of_a_completion(free: FreeServer, moved: Callable) -> None:
    """Tokens before are those of the old weights, tokens after those of the new ones, keys and values of the old ones included."""
    old, sampling = frozen_copy(free.policy), Sampling(temperature=1.3, max_new_tokens=90)
    engine = free.engine(free.policy, in_flight=True)
    engine.send_weights(7)
    prompts = [Prompt(id=str(i), tokens=np.array([7, 9 + i]), text="") for i in range(12)]
    found: list[Rollout] = []
    for _ in range(10):
        thread = threading.Thread(target=lambda: found.extend(draw(engine, prompts, sampling)))
        before = read_counters(Client(free.url)).computed
        thread.start()
        while read_counters(Client(free.url)).computed < before + 60:
            time.sleep(0.01)
        old = frozen_copy(free.policy)
        moved(free.policy)
        engine.send_weights(engine.version + 1)
        thread.join(60)
        if any(np.unique(rollout.version).size == 2 for rollout in found):
            break
        found.clear()
    mixed = [rollout for rollout in found if np.unique(rollout.version).size == 2]
    assert mixed
    assert {int(version) for r in found for version in r.version} <= {engine.version - 1, engine.version}
    for policy, version in ((old, engine.version - 1), (engine.policy, engine.version)):
        scored = score(policy, [sample_of(rollout) for rollout in mixed], max_tokens_per_microbatch=4096).logp
        for rollout, logp in zip(mixed, scored, strict=True):
            gap, drawn = np.abs(logp - rollout.behavior_logp), rollout.version == version
            assert gap[drawn].max() < 1e-4
            assert gap[~drawn].mean() > 0.05
    engine.close()


def test_p3_a_server_whose_engine_stands_still_is_named(
    free: FreeServer, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HTTP server goes on answering; the process that computes is stopped."""
    monkeypatch.setattr(member, "STALLED", 4.0)
    monkeypatch.setattr(member, "STARTING", math.inf)  # it has computed before: who took it for a new one would wait for ever
    engine = free.engine(free.policy, patience=5.0)
    draw(engine, prompts)
    table = subprocess.run(["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    parents = {int(pid): (int(parent), name) for pid, parent, name in (line.split(None, 2) for line in table.splitlines())}

    def below(pid: int) -> bool:
        return pid == free.process.pid or (pid in parents and below(parents[pid][0]))

    cores = [pid for pid, (_, name) in parents.items() if "EngineCore" in name and below(pid)]
    assert cores
    try:
        for pid in cores:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(PeerError, match=rf"{free.url} answers, but has computed nothing for \d+ s: it hangs"):
            draw(engine, prompts, seed=9)
    finally:
        for pid in cores:
            os.kill(pid, signal.SIGCONT)
    engine.close()
    engine = free.engine(free.policy)
    assert gaps(engine.policy, draw(engine, prompts, seed=10)).max() < 1e-4
    engine.close()


def test_episodes_are_sampled_turn_by_turn_as_they_are_scored(
    free: FreeServer, prompts: list[Prompt], scripted_environment: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several turns, answers between them and branches; sampled = scored, and every environment is told what was recorded."""
    engine = free.engine(free.policy)
    environment = scripted_environment(cut=0.3, cut_to="other", delays=0, turns=5)
    monkeypatch.setattr(engine, "environment", environment)
    rollouts = draw(engine, prompts[:4], Sampling(temperature=0.9, max_new_tokens=24))
    scored = score_rollouts(engine.policy, rollouts, max_tokens_per_microbatch=4096)
    found = np.concatenate([np.abs(s - r.behavior_logp)[r.trained] for s, r in zip(scored, rollouts, strict=True)])
    assert found.size > 50 and found.max() < 1e-4
    for rollout in rollouts:
        talk = environment.begun[rollout.prompt.id, rollout.index]
        assert talk.closed == [rollout.finish]
        spans = [rollout.tokens[turn.begin : turn.end].tolist() for turn in rollout.episode.turns]
        assert spans == [tokens for tokens, *_ in talk.heard]
    assert any(len(rollout.episode.turns) > 2 for rollout in rollouts)
    assert any(rollout.episode.branches for rollout in rollouts)
    engine.close()


# ---------------------------------------------------------------- a teacher on a server


def test_a_server_gives_given_tokens_the_log_probs_of_its_model(free: FreeServer, prompts: list[Prompt]) -> None:
    """Whatever it was asked to sample: by its raw logits, at temperature 1."""
    engine = free.engine(free.policy)
    rollouts = draw(engine, prompts, Sampling(temperature=1.0, max_new_tokens=24))
    servers = ScoringServers([free.url])
    servers.connect(free.policy.tokenizer)
    found = servers.logp([(rollout.prompt.tokens, rollout.tokens) for rollout in rollouts])
    expected = score(free.policy, [sample_of(rollout) for rollout in rollouts], max_tokens_per_microbatch=4096).logp
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=EXACT)
    engine.close()


def test_a_second_run_on_the_same_server_is_refused_and_the_first_goes_on(
    free: FreeServer, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "HELD", 30.0)
    first, second = (free.engine(free.policy) for _ in range(2))
    first.send_weights(0)
    with pytest.raises(EngineError, match=r"samples for another run .*: give each run its own servers"):
        second.send_weights(0)
    assert gaps(first.policy, draw(first, prompts)).max() < 1e-4
    first.close()
    second.close()
    third = free.engine(free.policy)
    third.send_weights(0)
    third.close()


def move_some(policy: Policy, part: str) -> None:
    """Turn the sign of a twentieth of the numbers of the parameters whose name has this part.

    Sizes stay: log-probs of weights that grow are rounded more coarsely.
    """
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if part in name:
                parameter.mul_(1 - 2 * (torch.rand_like(parameter) < 0.05))


@pytest.mark.parametrize("shared", [False, True], ids=["http", "folder"])
def test_after_every_version_the_servers_log_probs_are_the_trainers(
    shared: bool, free: FreeServer, prompts: list[Prompt], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve versions: of all weights, of one layer, of the tied embedding alone; one patch is damaged on its way and healed."""
    options = {"weights_folder": str(tmp_path)} if shared else {}
    engine = free.engine(free.policy, full_every=5, **options)
    deliveries: list[FetchReport] = []
    go_to = VersionedServer.go_to
    monkeypatch.setattr(
        VersionedServer, "go_to", lambda self, *a, **k: (deliveries.append(go_to(self, *a, **k)), deliveries[-1])[1]
    )
    add = publisher.BlockFile.add

    def damage(self: publisher.BlockFile, data: bytes, *more: int) -> None:
        add(self, data[:-4] + b"oops" if "patch" in self._path.name else data, *more)

    parts = ["", "layers.1", "embed_tokens", "layers.0.mlp.up_proj", "norm", ""] * 2
    for version, part in enumerate(parts):
        move_some(free.policy, part)
        with monkeypatch.context() as patch:
            if version == 7:
                patch.setattr(publisher.BlockFile, "add", damage)
            engine.send_weights(version)
        rollouts = draw(engine, prompts, seed=version)
        assert gaps(free.policy, rollouts).max() < 1e-4, (version, part)
        assert {int(v) for rollout in rollouts for v in rollout.version} == {version}
    full = [version for version, delivery in enumerate(deliveries) if delivery.full]
    assert full == [0, 7], "the damaged patch is the only one that was not used"
    sizes = {part: delivery.read_bytes for part, delivery in zip(parts[1:6], deliveries[1:6], strict=True)}
    assert sizes["norm"] < sizes["layers.1"] < deliveries[0].read_bytes / 4
    engine.close()


def test_sampling_goes_on_while_a_version_is_fetched(
    free: FreeServer, prompts: list[Prompt], moved: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked, go_on = free.engine(free.policy, in_flight=True), threading.Event(), threading.Event()
    engine.send_weights(1)
    old = frozen_copy(free.policy)
    moved(free.policy)
    send = VersionHandler.do_GET

    def hold(self: VersionHandler) -> None:
        asked.set()
        assert go_on.wait(60)
        send(self)

    monkeypatch.setattr(VersionHandler, "do_GET", hold)
    many = [replace(prompt, id=f"{prompt.id}/{copy}") for prompt in prompts for copy in range(8)]
    groups = engine.generate(many, group_size=4, sampling=SAMPLING, seed=0)
    during = list(next(groups))
    engine.send_weights(2)  # returns at once
    assert asked.wait(60)
    before = read_counters(Client(free.url)).computed
    for group in groups:
        during += group
    assert read_counters(Client(free.url)).computed > before + 100
    go_on.set()
    assert {int(v) for rollout in during for v in rollout.version} == {1}
    assert gaps(old, during).max() < 5e-4
    after = draw(engine, prompts)
    assert {int(v) for rollout in after for v in rollout.version} == {2}
    assert gaps(free.policy, after).max() < 1e-4
    engine.close()
