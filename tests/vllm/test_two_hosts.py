"""Thirty updates on two vLLM servers, each on a host of its own: a network namespace with a cable to the trainer's."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.config.recipes import load_recipe
from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.rollout.vllm import version_server
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.plugin.groupwise_versions import Manifest, Mirror, folder_name
from groupwise.rollout.vllm.published import FetchReport, VersionedServer
from groupwise.runs.job import make_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS, DAMAGED = 30, 13
"""Updates, and the version whose patch is damaged on its way to the first server: one behind a full version and a patch."""
PROMPT = list(range(5, 50))
"""Longer than a block of the prefix cache."""


class Host:
    """A network namespace that sees nothing but a cable to this one, and a vLLM server in it."""

    def __init__(self, number: int, model: Path) -> None:
        self.name = f"groupwise-{os.getpid()}-{number}"
        self.here, self.there = f"10.79.{number}.1", f"10.79.{number}.2"
        self.url = f"http://{self.there}:8000"
        self.client = Client(self.url)
        self.log = model.parent / f"server-{number}.log"
        cable = f"gw{os.getpid() % 100_000}n{number}"
        run(f"ip netns add {self.name}")
        run(f"ip link add {cable} type veth peer name socket netns {self.name}")
        run(f"ip addr add {self.here}/24 dev {cable}")
        run(f"ip link set {cable} up")
        for line in ("link set lo up", f"addr add {self.there}/24 dev socket", "link set socket up"):
            run(f"ip -n {self.name} {line}")
        serve = [sys.executable, "-m", "groupwise", "serve", str(model), "--host", self.there, "--rows", "16", "--cache", "64M"]
        serve += ["--", "--load-format", "dummy", "--max-model-len", "96"]
        # Inside, mounts are private: an empty /dev/shm is the host's own, and so is the mirror in it.
        shared = model.parent / f"shm-{number}"
        shared.mkdir()
        inside = f"mount --bind {shared} /dev/shm && exec {' '.join(serve)}"
        self.shared = shared
        with self.log.open("wb") as file:
            command = ["ip", "netns", "exec", self.name, "sh", "-c", inside]
            self.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    def wait(self) -> None:
        """Until the server answers."""
        end = time.monotonic() + 3000
        while True:
            with contextlib.suppress(Exception):
                self.client.get("/health", timeout=5)
                return
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)

    def manifest(self) -> tuple[Mirror, Manifest]:
        """What the server's mirror holds."""
        (folder,) = self.shared.glob("groupwise-mirror-*")
        mirror = Mirror(folder)
        held = mirror.manifest()
        assert held is not None
        return mirror, held

    def close(self) -> None:
        """End the server; the cable goes with the namespace."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        run(f"ip netns del {self.name}")


def run(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True)


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skips, with what the system says, where no namespaces can be made by name."""
    if shutil.which("ip") is None:
        pytest.skip("no command `ip` here (iproute2)")
    probe = f"groupwise-probe-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no network namespaces here: {tried.stderr.strip()}")
    run(f"ip netns del {probe}")


@pytest.fixture
def hosts(namespaces: None, write_vllm_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: Any) -> Iterator[list[Host]]:
    monkeypatch.chdir(tmp_path)
    job = make_job(load_recipe(str(write_vllm_recipe(tmp_path, "model", rollout={"engine": "native"}))))
    job.policy.model.config.save_pretrained(tmp_path / "model")
    job.policy.tokenizer.save_pretrained(tmp_path / "model")
    job.close()
    made: list[Host] = []
    try:
        for number in range(2):
            made.append(Host(number, tmp_path / "model"))
        for host in made:
            host.wait()
        yield made
    finally:
        for host in made:
            host.close()


def answer(client: Client) -> tuple[list[int], np.ndarray, set[str]]:
    """The likeliest continuation of a server: its tokens, their log-probs, and the labels of the weights."""
    sampling = {"temperature": 0.0, "max_tokens": 24, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": PROMPT, "sampling_params": sampling}
    (choice,) = client.post("/inference/v1/generate", body, timeout=600)["choices"]
    logp = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]])
    return choice["token_ids"], logp, {span["version"] for span in choice["weight_versions"]}


def scored(policy: Policy, tokens: list[int]) -> np.ndarray:
    """The trainer's log-probs of a continuation."""
    with plain_attention(policy.model) as model, torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + tokens]), use_cache=False).logits[0]
    logp = torch.log_softmax(logits[len(PROMPT) - 1 : -1].double(), -1)
    return logp[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()


def equal_to_the_bit(host: Host, policy: Policy, version: int) -> bool:
    """Whether the server's mirror holds a policy's weights, all of them and bit by bit."""
    mirror, held = host.manifest()
    assert held.version == version
    bits = mirror.tensors(held)
    parameters = dict(policy.model.named_parameters())
    assert set(parameters) == set(bits)
    same = []
    for name, parameter in parameters.items():
        same.append(np.array_equal(parameter.detach().reshape(-1).view(torch.int32).numpy().view(np.uint32), bits[name]))
    return all(same)


def forged(patch: Path) -> bytes:
    """A patch that fits in every size, count and checksum, and brings another number: only the digest of the result can tell."""
    data = patch.read_bytes()
    manifest = json.loads((patch.parent / "manifest.json").read_text())
    _, size, count = manifest["patch"][0]["blocks"][0]
    plain = zlib.decompress(data[:size])
    for place in range(1, count):
        changed = bytearray(plain)
        changed[-place] ^= 2
        block = zlib.compress(bytes(changed), 1)
        if len(block) == size:
            return block + data[size:]
    raise AssertionError("no other number deflates to as many bytes")


def damage_once(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Change one patch on its way to one server; returns the list of what was changed."""
    damaged: list[str] = []
    copy = shutil.copyfileobj

    def send(file: Any, target: Any, length: int = 0) -> None:
        path = Path(str(getattr(file, "name", "")))
        if damaged or path.parent.name != folder_name(DAMAGED) or not path.name.startswith("patch"):
            copy(file, target, length or 1 << 20)
            return
        damaged.append(path.name)
        target.write(forged(path))

    monkeypatch.setattr(version_server.shutil, "copyfileobj", send)
    return damaged


def note_deliveries(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, FetchReport]]:
    """Returns the list of what each server has fetched: (address, version, report)."""
    noted: list[tuple[str, int, FetchReport]] = []
    go_to = VersionedServer.go_to

    def note(self: VersionedServer, published: Any, *, keep: bool) -> FetchReport:
        report = go_to(self, published, keep=keep)
        noted.append((self.client.url, published.version, report))
        return report

    monkeypatch.setattr(VersionedServer, "go_to", note)
    return noted


def test_thirty_updates_arrive_on_two_hosts_to_the_bit(
    hosts: list[Host], write_vllm_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every version both servers give the trainer's log-probs and hold its bits; one damaged patch is healed."""
    engine = {"name": "vllm", "servers": [host.url for host in hosts]}
    path = write_vllm_recipe(tmp_path, "run", rollout={"engine": engine}, steps=STEPS, optimizer={"lr": 1e-3})
    damaged, noted = damage_once(monkeypatch), note_deliveries(monkeypatch)
    job = make_job(load_recipe(str(path)))
    gaps, mismatches, sums = [], [], set()
    try:
        for step in job.loop(0):
            version = step.number
            mismatches.append(step.metrics["mismatch/max"])
            job.sampler.send_weights(version)  # behind the last step nobody else does
            for host in hosts:
                wait_for(noted, host.url, version)
                drawn, logp, labels = answer(host.client)
                assert [label.rpartition(":")[2] for label in labels] == [str(version)]
                gaps.append(float(np.abs(logp - scored(job.policy, drawn)).max()))
                sums.add(round(float(logp.sum()), 4))
                assert equal_to_the_bit(host, job.policy, version), (host.url, version)
    finally:
        job.close()
    assert len(mismatches) == STEPS and max(mismatches) < 1e-4 and max(gaps) < 1e-4
    assert len(sums) > STEPS / 2, "the policy has not moved"
    assert damaged == ["patch-00000.bin"]
    healed = [(url, version, report) for url, version, report in noted if report.healed]
    ((url, version, report),) = healed
    assert version == DAMAGED and report.full and "has another digest than its manifest says" in report.healed
    patches = [report.read_bytes for _, version, report in noted if version and not report.full]
    full = [report.read_bytes for _, version, report in noted if version == 0]
    print(json.dumps({
        "versions": len(noted), "mismatch": max(mismatches), "gap": max(gaps), "healed": [url, report.healed],
        "full bytes": full, "patch bytes": [min(patches), max(patches)],
        "seconds": [round(float(np.median([r.seconds for *_, r in noted])), 4), round(max(r.seconds for *_, r in noted), 4)],
    }, indent=1))  # fmt: skip


def wait_for(noted: list[tuple[str, int, FetchReport]], url: str, version: int) -> None:
    """Until a server has a version."""
    end = time.monotonic() + 600
    while not any(place == url and number == version for place, number, _ in noted):
        assert time.monotonic() < end, (url, version, noted[-3:])
        time.sleep(0.01)
