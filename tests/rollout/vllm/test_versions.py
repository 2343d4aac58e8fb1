"""Published versions of the weights: their patches, what is refused of them, and how a mirror heals."""

from __future__ import annotations

import errno
import http.client
import itertools
import json
import os
import socket
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from groupwise.config.settings import LoraSettings
from groupwise.errors import PeerError
from groupwise.models.lora import adapt
from groupwise.models.policy import Policy
from groupwise.rollout.vllm import published as published_versions
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.plugin import groupwise_versions as versions
from groupwise.rollout.vllm.plugin.groupwise_versions import Mirror, VersionSource, WrongVersion, apply_patch, encode_patch
from groupwise.rollout.vllm.published import Published, VersionedServer, answer_of
from groupwise.rollout.vllm.publisher import AdapterPublisher, Publisher
from groupwise.rollout.vllm.version_server import VersionServer

RNG = np.random.default_rng(0)


def random_bits(kind: Any, size: int) -> np.ndarray:
    return RNG.integers(0, np.iinfo(kind).max, size, endpoint=True).astype(kind)


def changed(bits: np.ndarray, places: Any) -> np.ndarray:
    after = bits.copy()
    after[places] = ~after[places]
    return after


# ---- patches


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
@pytest.mark.parametrize(
    "places",
    [[], [0], [999], [0, 254], [0, 255], [0, 256], [254], [255, 510, 765], [3, 600, 601, 999], slice(None)],
    ids=str,
)
def test_a_patch_brings_the_bits_after_it(kind: Any, places: Any) -> None:
    before = random_bits(kind, 1000)
    after = changed(before, places)
    block, count = encode_patch(before, after)
    assert count == np.count_nonzero(before != after)
    found = before.copy()
    apply_patch(block, count, found)
    assert np.array_equal(found, after)


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
def test_every_difference_of_bits_survives(kind: Any) -> None:
    """Also from one end of the integers to the other, as between a small number and its negative."""
    before, after = random_bits(kind, 5000), random_bits(kind, 5000)
    before[:4], after[:4] = [0, -1 & np.iinfo(kind).max, 1 << 15, 0], [-1 & np.iinfo(kind).max, 0, (1 << 15) - 1, 1 << 15]
    found = before.copy()
    apply_patch(*encode_patch(before, after), found)
    assert np.array_equal(found, after)


def test_nan_and_negative_zero_are_numbers_like_others() -> None:
    before = np.array([0.0, 1.0, np.nan, 2.0], np.float32).view(np.uint32)
    after = np.array([-0.0, np.nan, np.nan, 2.0], np.float32).view(np.uint32)
    block, count = encode_patch(before, after)
    assert count == 2
    found = before.copy()
    apply_patch(block, count, found)
    assert np.array_equal(found, after)


BEFORE = random_bits(np.uint16, 1000)
BLOCK, COUNT = encode_patch(BEFORE, changed(BEFORE, [5, 700, 999]))
PLAIN = zlib.decompress(BLOCK)


@pytest.mark.parametrize(
    ("block", "count", "says"),
    [
        (BLOCK, 1001, "changes 1001 of 1000"),
        (BLOCK, -1, "changes -1 of 1000"),
        (BLOCK, 2, "has 5 places|does not inflate|places"),
        (BLOCK[:-3], COUNT, "does not inflate"),
        (BLOCK + b"more", COUNT, "does not inflate"),
        (b"no deflate at all", COUNT, "cannot be inflated"),
        (zlib.compress(bytes(100_000_000), 1), COUNT, "does not inflate"),
        (zlib.compress(b"\xff" * 4 + PLAIN), COUNT, "do not rise inside of 1000|does not inflate"),
        (zlib.compress(bytes(3) + PLAIN[-6:]), COUNT, "do not rise"),
        (zlib.compress(b"\x05\xff\xff\xff" + PLAIN[-6:]), COUNT, "places for 3 changes"),
    ],
)  # fmt: skip
def test_a_block_that_cannot_be_is_refused(block: bytes, count: int, says: str) -> None:
    """And changes nothing: not one number is written before all of it has been checked."""
    numbers = BEFORE.copy()
    with pytest.raises(WrongVersion, match=says):
        apply_patch(block, count, numbers)
    assert np.array_equal(numbers, BEFORE)


# ---- manifests


@pytest.fixture
def published(policy_of: Callable[..., Policy], tmp_path: Path) -> Publisher:
    """Three versions of a tiny policy in bfloat16, of which the first is full."""
    policy = policy_of(dtype=torch.float32)
    publisher = Publisher(tmp_path / "run", "run", torch.bfloat16)
    for version in range(3):
        move(policy, version)
        publisher.publish(policy, version)
    return publisher


def move(policy: Policy, version: int) -> None:
    """Change some numbers of each parameter."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            change = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.add_(change * (torch.rand(parameter.shape, generator=generator) < 0.2))


def bits_of(publisher: Publisher, policy: Policy) -> dict[str, np.ndarray]:
    """The bits that a mirror should hold of a policy without an adapter."""
    found = {}
    for name, parameter in policy.model.named_parameters():
        found[name] = parameter.detach().to(publisher.dtype).reshape(-1).view(torch.int16).numpy().view(np.uint16)
    return found


def manifest_path(publisher: Publisher, version: int) -> Path:
    return publisher.folder / versions.folder_name(version) / versions.MANIFEST


def spoil(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def block(size: int = 4, count: int = 1) -> dict[str, Any]:
    """A file with one block, of the first range, as a manifest has it."""
    return {"name": "p", "size": size, "digest": "", "blocks": [[0, size, count]]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 99}, "has format 99; this plug-in reads 2"),
        ({"version": 3}, "says that it is of version 3"),
        ({"base": 7}, "patches version 7, which is not before it"),
        ({"run": "../../etc"}, "of a run called '../../etc'"),
        ({"dtype": "object"}, "numbers of type 'object'"),
        ({"shapes": {"w": [1 << 60]}}, "is no size"),
        ({"shapes": {"w": [-1]}}, "is no size"),
        ({"shapes": {"w": [True]}}, "is no size"),
        ({"shapes": {"w": [4]}}, "a gap or an overlap|does not cover"),
        ({"ranges": []}, "does not cover"),
        ({"patch": [{"name": "../../etc/passwd", "size": 0, "digest": "", "blocks": []}]}, "is no name of a file"),
        ({"patch": [{"name": "p", "size": 10, "digest": "", "blocks": [[0, 4, 1]]}]}, "do not fill p"),
        ({"patch": [{"name": "p", "size": 4, "digest": "", "blocks": [[10_000, 4, 1]]}]}, "a block of no range"),
        ({"patch": 5}, "cannot be read .TypeError"),
        ({"patch": [block(size=1 << 40)]}, r"a patch of 1099511627776 bytes for 1 changes in"),
        ({"patch": [block(count=1 << 40)]}, r"changes 1099511627776 of \d+ numbers"),
        ({"patch": [block(), block()]}, "two blocks for a range"),
        ({"full": [block(size=1 << 40)]}, r"has 1099511627776 bytes for the \d+ numbers"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(changes: dict[str, Any], says: str, published: Publisher, tmp_path: Path) -> None:
    spoil(manifest_path(published, 0), **changes)
    with pytest.raises(WrongVersion, match=says):
        Mirror(tmp_path / "mirror").go_to(VersionSource(str(published.folder)), 0)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", "[]", "{}"])
def test_a_manifest_that_is_none_is_refused(text: str, published: Publisher, tmp_path: Path) -> None:
    manifest_path(published, 0).write_text(text)
    with pytest.raises(WrongVersion, match="manifest of version 0 cannot be read"):
        Mirror(tmp_path / "mirror").go_to(VersionSource(str(published.folder)), 0)


def test_a_version_larger_than_the_memory_is_refused_before_it_is_taken(published: Publisher, tmp_path: Path) -> None:
    size = 1 << 40
    spoil(manifest_path(published, 0), shapes={"w": [size]}, ranges=[["w", 0, size, ""]], full=[], patch=[])
    spoil(manifest_path(published, 0), full=[{"name": "f", "size": 0, "digest": "", "blocks": []}])
    with pytest.raises(WrongVersion, match=r"takes 2199.02 GB, .*--shm-size"):
        Mirror(tmp_path / "mirror").go_to(VersionSource(str(published.folder)), 0)


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
@pytest.mark.parametrize("size", [1, 2, 1000, 70_000])
def test_no_patch_is_longer_than_its_range_lets_it_be(kind: Any, size: int) -> None:
    """Random bits deflate worst."""
    before = np.zeros(size, kind)
    block, count = encode_patch(before, random_bits(kind, size) | 1)
    assert len(block) <= versions.DEFLATED * versions.longest_patch(size, count, before.itemsize) + versions.DEFLATE_HEAD


def test_the_memory_of_a_mirror_is_taken_before_it_is_written_to(
    published: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is taken page by page ends the process when others have filled it meanwhile."""
    mirror, taken = Mirror(tmp_path / "mirror"), []
    tensors = Mirror.tensors

    def look(self: Mirror, manifest: versions.Manifest) -> dict[str, np.ndarray]:
        state = (self.folder / "weights").stat()
        taken.append(state.st_blocks * 512 >= state.st_size > 0)
        return tensors(self, manifest)

    monkeypatch.setattr(Mirror, "tensors", look)
    mirror.go_to(VersionSource(str(published.folder)), 0)
    assert taken == [True]


@pytest.mark.parametrize("when", ["weights", "adapter"])
def test_memory_that_others_take_first_is_named(
    when: str, published: Publisher, adapters: AdapterPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at what is free and the taking of it."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    mirror = Mirror(tmp_path / "mirror")
    go_to = mirror.go_to if when == "weights" else mirror.adapter
    source = VersionSource(str(published.folder if when == "weights" else adapters.folder))
    with pytest.raises(WrongVersion, match=r"takes 0.00 GB, and .* GB free \(No space left on device\).*--shm-size"):
        go_to(source, 1)
    assert not (mirror.folder / "weights").exists() and mirror.manifest() is None


# ---- a mirror


def test_a_mirror_follows_by_patches_and_a_late_one_catches_up(published: Publisher, tmp_path: Path) -> None:
    early, late = Mirror(tmp_path / "early"), Mirror(tmp_path / "late")
    source = VersionSource(str(published.folder))
    assert early.go_to(source, 0).full
    assert late.go_to(source, 0).full
    steps = [early.go_to(source, 1), early.go_to(source, 2)]
    assert not any(step.full for step in steps)
    assert not late.go_to(source, 2).full
    for name, bits in early.tensors(published.last).items():
        assert np.array_equal(bits, late.tensors(published.last)[name])
    assert early.go_to(source, 2).read_bytes < 20_000, "what is there is not read again"


@pytest.mark.parametrize("damage", ["a byte of a patch", "a digest", "a patch is missing", "its end is missing"])
def test_a_damaged_patch_is_found_and_healed_from_the_last_full_version(
    damage: str, policy_of: Callable[..., Policy], tmp_path: Path
) -> None:
    """The patch to version 1 is damaged; version 2 is full as well, so version 3 can be read without it."""
    policy = policy_of(dtype=torch.float32)
    publisher = Publisher(tmp_path / "run", "run", torch.bfloat16, full_every=2)
    mirror, source = Mirror(tmp_path / "mirror"), VersionSource(str(tmp_path / "run"))
    publisher.publish(policy, 0)
    mirror.go_to(source, 0)
    for version in (1, 2, 3):
        move(policy, version)
        publisher.publish(policy, version)
    patch = publisher.folder / versions.folder_name(1) / "patch-00000.bin"
    data = bytearray(patch.read_bytes())
    if damage == "a byte of a patch":
        data[len(data) // 2] ^= 1
        patch.write_bytes(data)
    elif damage == "its end is missing":
        patch.write_bytes(data[:-10])
    elif damage == "a patch is missing":
        patch.unlink()
    else:
        stored = json.loads(manifest_path(publisher, 1).read_text())
        stored["ranges"][0][3] = "0" * 32
        spoil(manifest_path(publisher, 1), ranges=stored["ranges"])
    found = mirror.go_to(source, 3)
    assert found.full and found.healed
    held = mirror.tensors(publisher.last)
    assert all(np.array_equal(held[name], bits) for name, bits in bits_of(publisher, policy).items())


def test_a_patch_that_fits_and_is_another_ones_is_found_by_the_result(published: Publisher, tmp_path: Path) -> None:
    """Every size and count is right: nothing but the digest of the result can tell."""
    mirror, source = Mirror(tmp_path / "mirror"), VersionSource(str(published.folder))
    mirror.go_to(source, 0)
    folder = published.folder / versions.folder_name(1)
    stored = json.loads((folder / versions.MANIFEST).read_text())
    blocks, data, offset = [], b"", 0
    patch = (folder / "patch-00000.bin").read_bytes()
    for place, size, count in stored["patch"][0]["blocks"]:
        plain = bytearray(zlib.decompress(patch[offset : offset + size]))
        plain[-1] ^= 2
        block = zlib.compress(bytes(plain), 1)
        blocks.append([place, len(block), count])
        data += block
        offset += size
    (folder / "patch-00000.bin").write_bytes(data)
    spoil(folder / versions.MANIFEST, patch=[stored["patch"][0] | {"size": len(data), "blocks": blocks}])
    with pytest.raises(WrongVersion, match="has another digest than its manifest says"):
        mirror.go_to(source, 1)
    assert mirror.manifest() is None, "a mirror that was spoilt holds nothing"
    assert published.publish_full().full
    assert mirror.go_to(source, 2).full


def test_a_mirror_of_another_run_is_filled_anew(published: Publisher, policy_of: Callable[..., Policy], tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "mirror")
    mirror.go_to(VersionSource(str(published.folder)), 2)
    other = Publisher(tmp_path / "other", "other", torch.float32)
    policy = policy_of("gpt2", dtype=torch.float32)
    other.publish(policy, 3)
    assert mirror.go_to(VersionSource(str(other.folder)), 3).full
    assert mirror.manifest().label == "other:3"
    held = mirror.tensors(other.last)
    for name, parameter in policy.model.named_parameters():
        assert np.array_equal(held[name].view(np.float32), parameter.detach().numpy().reshape(-1))


def test_two_processes_share_a_mirror(published: Publisher, tmp_path: Path) -> None:
    """What one has fetched the other sees, also after the file of weights was replaced."""
    first, second = Mirror(tmp_path / "mirror"), Mirror(tmp_path / "mirror")
    source = VersionSource(str(published.folder))
    first.go_to(source, 0)
    second.tensors(second.manifest())
    assert not second.go_to(source, 0).full
    versions.Mirror._forget(first)
    first.go_to(source, 2)
    name = next(iter(published.last.shapes))
    assert np.array_equal(second.tensors(second.manifest())[name], first.tensors(published.last)[name])


# ---- a publisher


def test_what_does_not_change_is_not_written(policy_of: Callable[..., Policy], tmp_path: Path) -> None:
    policy = policy_of(dtype=torch.float32)
    publisher = Publisher(tmp_path / "run", "run", torch.bfloat16)
    publisher.publish(policy, 0)
    assert publisher.publish(policy, 1).patch == ()
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[0, 0] += 1.0
    (patch,) = publisher.publish(policy, 2).patch
    assert [block.count for block in patch.blocks] == [1]
    assert patch.size < 40


def test_changes_too_small_for_the_servers_type_wait_until_they_are_not(policy_of: Callable[..., Policy], tmp_path: Path) -> None:
    """A patch is made of what servers compute with: float32 weights that round to the same bfloat16 have not changed for them."""
    policy = policy_of(dtype=torch.float32)
    publisher = Publisher(tmp_path / "run", "run", torch.bfloat16)
    weight = policy.model.get_input_embeddings().weight
    with torch.no_grad():
        weight[0, 0] = 1.0
    publisher.publish(policy, 0)
    counts = []
    for version in range(1, 5):
        with torch.no_grad():
            weight[0, 0] += 2**-9  # half a unit in the last place of bfloat16 is 2**-8
        counts.append(sum(block.count for file in publisher.publish(policy, version).patch for block in file.blocks))
    assert counts == [0, 0, 1, 0]


def test_old_versions_go_when_no_server_can_need_them(policy_of: Callable[..., Policy], tmp_path: Path) -> None:
    policy = policy_of(dtype=torch.float32)
    publisher = Publisher(tmp_path / "run", "run", torch.bfloat16, full_every=3)
    for version in range(8):
        move(policy, version)
        publisher.publish(policy, version)

    def left() -> list[str]:
        return sorted(path.name for path in publisher.folder.iterdir())

    publisher.forget(5)
    assert left() == ["v000003", "v000004", "v000005", "v000006", "v000007"]
    assert Mirror(tmp_path / "mirror").go_to(VersionSource(str(publisher.folder)), 5).full
    publisher.forget(7)
    assert left() == ["v000006", "v000007"]
    publisher.close()
    assert not publisher.folder.exists()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["weights", "adapters"])
def test_no_version_is_published_again(
    kind: str, version: int, published: Publisher, adapters: AdapterPublisher, policy_of: Callable[..., Policy]
) -> None:
    """A server may have read it, and would go on with what it has."""
    policy = adapt(policy_of(dtype=torch.float32), LoraSettings(rank=2), base="")
    publisher = published if kind == "weights" else adapters
    publisher.publish(policy, 3)
    with pytest.raises(AssertionError, match=f"version {version} of run was published before"):
        publisher.publish(policy, version)


def test_a_version_without_its_manifest_is_no_version(published: Publisher, tmp_path: Path) -> None:
    """The manifest comes last, whole: a trainer that dies before has published nothing."""
    (published.folder / versions.folder_name(3)).mkdir()
    (published.folder / versions.folder_name(3) / "patch-00000.bin").write_bytes(b"half")
    with pytest.raises(WrongVersion, match="cannot be read"):
        Mirror(tmp_path / "mirror").go_to(VersionSource(str(published.folder)), 3)


@pytest.mark.parametrize("longest", [100, 1024, 1 << 24])
def test_long_tensors_are_published_in_parts(longest: int, policy_of: Callable[..., Policy], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("groupwise.rollout.vllm.weight_ranges.LONGEST_RANGE", longest)
    policy = policy_of(dtype=torch.float32)
    publisher = Publisher(tmp_path / "run", "run", torch.bfloat16)
    mirror, source = Mirror(tmp_path / "mirror"), VersionSource(str(tmp_path / "run"))
    for version in range(2):
        move(policy, version)
        publisher.publish(policy, version)
        mirror.go_to(source, version)
    held = mirror.tensors(publisher.last)
    assert all(np.array_equal(held[name], bits) for name, bits in bits_of(publisher, policy).items())


def test_an_adapter_is_merged_where_a_server_takes_whole_weights(policy_of: Callable[..., Policy], tmp_path: Path) -> None:
    policy = adapt(policy_of(dtype=torch.float32), LoraSettings(rank=2), base="")
    publisher = Publisher(tmp_path / "run", "run", torch.float32)
    shapes = publisher.publish(policy, 0).shapes
    assert not any("lora" in name or "base_layer" in name for name in shapes)


def test_healing_takes_no_second_memory_of_the_weights(published: Publisher, tmp_path: Path) -> None:
    """A file that is removed while it is mapped has its memory until the last process lets go of it."""
    mirror, source = Mirror(tmp_path / "mirror"), VersionSource(str(published.folder))
    mirror.go_to(source, 1)
    held = mirror.tensors(published.last)
    assert mirror.go_to(source, 0).full
    mapped = Path("/proc/self/maps").read_text()
    assert f"{mirror.folder}/weights" in mapped and f"{mirror.folder}/weights (deleted)" not in mapped
    assert held


# ---- adapters alone


@pytest.fixture
def adapters(policy_of: Callable[..., Policy], tmp_path: Path) -> AdapterPublisher:
    """Two versions of an adapter."""
    policy = adapt(policy_of(dtype=torch.float32), LoraSettings(rank=2), base="")
    publisher = AdapterPublisher(tmp_path / "adapters", "run", torch.float32)
    for version in range(2):
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if name in policy.adapter.trained:
                    parameter.fill_(version + 0.5)
        publisher.publish(policy, version)
    return publisher


def test_each_adapter_has_a_folder_of_its_own(adapters: AdapterPublisher, tmp_path: Path) -> None:
    mirror, source = Mirror(tmp_path / "mirror"), VersionSource(str(adapters.folder))
    folders = [mirror.adapter(source, version) for version in range(2)]
    for version, folder in enumerate(folders):
        saved = load_file(folder / "adapter_model.safetensors")
        assert saved and all((tensor == version + 0.5).all() for tensor in saved.values())
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
    mirror.drop_adapter("run:0")
    assert [folder.exists() for folder in folders] == [False, True]


@pytest.mark.parametrize("damage", ["a byte", "the end", "all"])
def test_a_damaged_adapter_is_refused(damage: str, adapters: AdapterPublisher, tmp_path: Path) -> None:
    path = adapters.folder / versions.folder_name(1) / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "a byte":
        data[-1] ^= 1
    path.write_bytes(data if damage == "a byte" else data[:-1])
    if damage == "all":
        path.unlink()
    mirror = Mirror(tmp_path / "mirror")
    with pytest.raises(WrongVersion, match=r"another digest|too early|cannot be read"):
        mirror.adapter(VersionSource(str(adapters.folder)), 1)
    assert not list(mirror.folder.glob("adapter-run*"))


def test_weights_are_no_adapter(published: Publisher, tmp_path: Path) -> None:
    with pytest.raises(WrongVersion, match="version 1 is no adapter"):
        Mirror(tmp_path / "mirror").adapter(VersionSource(str(published.folder)), 1)


def test_old_adapters_go(adapters: AdapterPublisher) -> None:
    adapters.forget(1)
    assert [path.name for path in adapters.folder.iterdir()] == ["v000001"]


def test_tokens_of_an_adapter_carry_its_label_where_the_weights_under_it_are_the_runs() -> None:
    def answer(label: str) -> dict[str, Any]:
        return {"id": 1, "choices": [{"index": 0, "weight_versions": [{"version": label, "start": 0, "end": 3}]}]}

    assert answer_of(answer("run.base:0"), "run:7") == answer("run:7") | {"id": 1}
    for foreign in ("default", "run:6", "other.base:0"):
        assert answer_of(answer(foreign), "run:7") == answer(foreign)


# ---- a server that is brought to a version


class Fetching:
    """A connection to a server that fetches; `read` says how many bytes it has read at each question."""

    name = "the server"

    def __init__(self, read: Callable[[int], int], until: int) -> None:
        self.read, self.until, self.asked = read, until, 0

    def post(self, path: str, body: Any, *, timeout: float | None) -> Any:
        if body["method"] == "groupwise_fetched":
            self.asked += 1
        assert self.asked < 200, "it is asked for ever"
        state = {"error": "", "done": self.asked >= self.until, "read_bytes": self.read(self.asked)}
        return {"results": [state | {"full": True, "healed": "", "seconds": 0.0, "folder": ""}]}


def fetch(connection: Fetching) -> Any:
    return VersionedServer(cast(Client, connection))._fetch(Published(3, "run:3", "/versions"))


def test_a_fetch_that_reads_nothing_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(published_versions, "time", SimpleNamespace(monotonic=lambda: 10.0 * next(clock), sleep=lambda _: None))
    with pytest.raises(PeerError, match=r"the server has read 5 bytes of version 3 of the weights, and no more for 600 s"):
        fetch(Fetching(lambda asked: min(asked, 5), until=1000))


def test_a_fetch_that_goes_on_reading_may_take_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(published_versions, "time", SimpleNamespace(monotonic=lambda: 200.0 * next(clock), sleep=lambda _: None))
    assert fetch(Fetching(lambda asked: asked, until=150)).read_bytes == 150


# ---- the trainer's HTTP server


@pytest.fixture
def server(published: Publisher) -> Any:
    with VersionServer(published.folder, "127.0.0.1") as server:
        yield server


def test_a_mirror_reads_from_the_trainers_address(server: VersionServer, published: Publisher, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "mirror")
    source = VersionSource(server.url, server.token)
    assert mirror.go_to(source, 1).full
    assert not mirror.go_to(source, 2).full
    direct = Mirror(tmp_path / "direct")
    direct.go_to(VersionSource(str(published.folder)), 2)
    assert mirror.manifest().ranges == direct.manifest().ranges


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-Open\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: " + b"b" * 70_000], ids=["ssh", "a long line"]
)
def test_a_source_that_speaks_no_http_is_a_wrong_one(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=speak)
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(WrongVersion, match="cannot be read"):
            VersionSource(f"http://127.0.0.1:{port}").manifest(0)
        thread.join()


@pytest.mark.parametrize("token", ["", "guess"])
def test_without_the_secret_nothing_is_handed_out(token: str, server: VersionServer, tmp_path: Path) -> None:
    with pytest.raises(WrongVersion, match="401"):
        Mirror(tmp_path / "mirror").go_to(VersionSource(server.url, token), 0)


@pytest.mark.parametrize(
    "path",
    ["/", "/v000000/", "/v000000/../../secret", "/../secret", "/v000000/%2e%2e/secret", "//etc/passwd", "/v000009/manifest.json"],
)
def test_nothing_but_files_of_versions_is_handed_out(path: str, server: VersionServer, published: Publisher) -> None:
    (published.folder.parent / "secret").write_text("secret")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", path, headers={"Authorization": f"Bearer {server.token}"})
    answer = connection.getresponse()
    assert answer.status == 404 and answer.read() == b""
    connection.close()
