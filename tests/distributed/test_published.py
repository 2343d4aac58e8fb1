"""Versions of the weights that several processes publish together: a mirror holds the policy's bits after each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "mode", "dtype", "adapter"),
    [
        ("llama", "zero3", "bfloat16", False),
        ("llama", "zero3", "float32", False),
        ("gpt2", "zero2", "bfloat16", False),
        ("mixtral", "zero3", "bfloat16", False),  # its experts lie stacked: a checkpoint has each of them
        ("llama", "zero3", "float32", True),
        ("llama", "ddp", "bfloat16", False),
        ("llama", {"tensor": 2}, "bfloat16", False),
        ("mixtral", {"expert": 2}, "bfloat16", False),
        ("llama", {"context": 2}, "bfloat16", False),
    ],
)
def test_after_every_version_the_mirror_has_the_bits_of_the_policy(
    family: str, mode: Any, dtype: str, adapter: bool, ranks: Callable, tmp_path: Path
) -> None:
    first, second = ranks(2).run("published", folder=str(tmp_path / "v"), family=family, mode=mode, dtype=dtype, adapter=adapter)
    assert first["wrong"] == []
    assert first["fetched"] == [(True, "")] + [(False, "")] * 4
    assert first["patches"][0] == 0
    assert max(first["patches"]) == 2, "one process wrote all that has changed"
    assert second["fetched"] == []


def test_of_two_copies_one_is_published(ranks: Callable, tmp_path: Path) -> None:
    """Shards of one process each: the second holds what the first does."""
    found = ranks(2).run(
        "published", folder=str(tmp_path / "v"), family="llama", mode={"name": "zero3", "shards": 1}, dtype="bfloat16"
    )
    assert found[0]["wrong"] == []
    assert max(found[0]["patches"]) == 1


def test_full_weights_are_published_by_shards_that_nobody_gathers(ranks: Callable, tmp_path: Path) -> None:
    found = ranks(2).run("gathers_of_publishing", folder=str(tmp_path / "v"))
    assert found == [0, 0]


@pytest.mark.parametrize("mode", ["ddp", "zero2"])
def test_servers_that_come_and_go_hold_what_both_processes_publish(mode: str, ranks: Callable, tmp_path: Path) -> None:
    """One is killed, one joins, one is started anew, one leaves: after every version each that is there has the policy's bits, and
    both processes sample with it.
    """
    found = ranks(2).run("published_to_a_pool", folder=str(tmp_path), mode=mode)
    both = ["patch-00000.bin", "patch-00001.bin"]
    for of_rank in found:
        assert of_rank["patches"] == [[], both, both, both, both]
        assert of_rank["drawn"] == [[0], [1], [2], [3], [4]]
    assert found[0]["wrong"] == []
    assert found[0]["servers"] == [2, 1, 2, 3, 2]
