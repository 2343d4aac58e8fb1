"""A GGUF file with a damaged head is read as what it then says, or ends in one clear error, in little time and memory."""

from __future__ import annotations

import random
import resource
import time
from collections import Counter
from pathlib import Path

import gguf
import pytest
from gguf_files import byte_vocabulary, source_model, write_model

from groupwise.config.settings import ModelSettings
from groupwise.errors import GroupwiseError
from groupwise.models.gguf_header import read_header
from groupwise.models.loading import load_policy

SECONDS, MEGABYTES = 10.0, 200
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 264, "max_position_embeddings": 256}


def _flipped(content: bytes, head: int, draws: random.Random) -> bytes:
    """One bit of the head is another."""
    place = draws.randrange(head)
    return content[:place] + bytes([content[place] ^ 1 << draws.randrange(8)]) + content[place + 1 :]


def _random(content: bytes, head: int, draws: random.Random) -> bytes:
    """A head of which a part, or all but the format's name, is noise."""
    begin = draws.choice([4, 8, 24, draws.randrange(head)])
    end = draws.choice([head, min(begin + draws.randrange(1, 64), head)])
    return content[:begin] + draws.randbytes(max(end - begin, 0)) + content[end:]


def attack(folder: Path, kind: str, count: int) -> Counter[str]:
    """Load `count` damaged files; how many were loaded and how many refused."""
    file = folder / "tiny.gguf"
    vocabulary = byte_vocabulary()
    for key in ("ggml.tokens", "ggml.token_type"):
        vocabulary[key] = vocabulary[key][:264]
    write_model(file, source_model("llama, llama3", **SMALL), vocabulary=vocabulary)
    content = file.read_bytes()
    head = next(iter(read_header(file).tensors.values())).start
    load_policy(ModelSettings(path=str(file)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    damage = {"flipped": _flipped, "random": _random}[kind]
    outcomes: Counter[str] = Counter()
    for seed in range(count):
        file = folder / f"{seed}.gguf"
        file.write_bytes(damage(content, head, random.Random(seed)))
        begin = time.process_time()
        try:
            load_policy(ModelSettings(path=str(file)))
        except GroupwiseError:
            outcomes["refused"] += 1
        else:
            fields = gguf.GGUFReader(file).fields
            stated = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
            assert read_header(file).metadata == stated, f"{kind} {seed}"
            outcomes["loaded"] += 1
        assert time.process_time() - begin < SECONDS, f"{kind} {seed}"
        file.unlink()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES, f"{grown:.0f} MB"
    return outcomes


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_sample_of_damaged_heads_is_refused_or_read(tmp_path: Path) -> None:
    assert attack(tmp_path, "flipped", 30)["refused"]


@pytest.mark.slow
def test_one_bit_of_a_head_flipped_2000_times(tmp_path: Path) -> None:
    outcomes = attack(tmp_path, "flipped", 2000)
    assert outcomes["loaded"] > 20, outcomes
    assert outcomes["refused"] > 1000, outcomes


@pytest.mark.slow
def test_500_random_heads(tmp_path: Path) -> None:
    assert attack(tmp_path, "random", 500)["refused"] > 450
