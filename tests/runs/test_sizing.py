"""The plan of a run without starting it: memory, work and traffic by formula, against what is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from groupwise.cli import commands
from groupwise.models.policy import Policy
from groupwise.models.shape import Shape
from groupwise.runs.sizing import H100, Load, forward_flops, prompts_of, rank, recomputed_flops, traffic

SEVEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "tie_word_embeddings": False, "max_position_embeddings": 32768,
}  # fmt: skip
LOAD = Load(prompts=128, group=16, prompt_tokens=512, completion_tokens=4096, budget=16384, rows=256, reference=True)


def shape(**changes: Any) -> Shape:
    return Shape.of(SEVEN | changes, 7_615_616_512, dtype="bfloat16")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_embeddings_and_head_are_counted_outside_of_the_blocks(family: str, tied: bool, tiny_policy: Callable[..., Policy]) -> None:
    model = tiny_policy(family).model
    count = sum(parameter.numel() for parameter in model.parameters())
    outside = count - sum(parameter.numel() for layer in model.model.layers for parameter in layer.parameters())
    model.config.tie_word_embeddings = tied
    untied = 0 if tied else model.config.vocab_size * model.config.hidden_size
    assert Shape.of(model.config.to_dict(), count, dtype="float32").outside == outside + untied


def test_parts_add_up_to_the_whole() -> None:
    alone = rank(shape(), LOAD, world=1, sharded="ddp", shards=1, prompts=128).memory
    assert alone.weights == 2 * 7_615_616_512
    assert alone.optimizer == 12 * 7_615_616_512
    for mode in ("zero2", "zero3"):
        part = rank(shape(), LOAD, world=64, sharded=mode, shards=8, prompts=2).memory
        for name in ("weights", "gradients", "optimizer", "reference"):
            assert getattr(part, name) * 8 == getattr(alone, name)
        assert part.whole == alone.weights
        far = rank(shape(), LOAD, world=64, sharded=mode, shards=8, offload=True, prompts=2).memory
        assert far.weights == far.gradients == far.optimizer == far.reference == 0
        assert far.host == sum(getattr(part, name) for name in ("weights", "gradients", "optimizer", "reference"))
    assert (
        rank(shape(), LOAD, world=64, sharded="zero3", shards=8, prompts=2).memory.peak
        < rank(shape(), LOAD, world=64, sharded="zero2", shards=8, prompts=2).memory.peak
        < alone.peak
    )


def test_prompts_are_dealt_out_evenly_to_processes() -> None:
    assert prompts_of(LOAD, 64) == [("ranks 0-63", 2)]
    assert prompts_of(LOAD, 3) == [("ranks 0-1", 43), ("rank 2", 42)]
    one, many = (rank(shape(), LOAD, world=n, sharded="zero3", shards=n, prompts=128 // n) for n in (1, 64))
    assert many.positions * 64 == one.positions == 128 * (512 + 16 * 4096)
    for phase in ("rollout", "reference", "update"):
        assert many.phases[phase].flops * 64 == pytest.approx(one.phases[phase].flops)
        assert one.phases[phase].sent.all == 0 < many.phases[phase].sent.all
    assert one.phases["update"].flops == 3 * one.phases["reference"].flops
    # Two operations for each parameter and token, and attention on top.
    body = shape().parameters - shape().outside
    assert forward_flops(shape(), 1000, 0, 0) == 2000 * body
    assert forward_flops(shape(), 1000, 2048, 0) == 2000 * body + 1000 * 4 * 28 * 3584 * 2048
    again = 2000 * (body - 28 * 3584 * 18944) + 1000 * 4 * 28 * 3584 * 2048
    assert recomputed_flops(shape(), 1000, 2048) == pytest.approx(again * 27 / 28), (
        "27 of 28 blocks, without their down projections"
    )
    kept, less = (rank(shape(), replace(LOAD, recompute=on), world=1, sharded="ddp", shards=1, prompts=128) for on in (False, True))
    every = kept.phases["update"].flops
    assert less.phases["update"].flops == pytest.approx(every + recomputed_flops(shape(), kept.positions, 2304))
    assert less.memory.activations < kept.memory.activations / 5


def test_bytes_sent_equal_a_calculation_by_hand() -> None:
    found, inside = shape(), 7 / 8
    whole = found.parameters
    assert traffic(found, sharded="ddp", world=8, shards=8)["update"].others == 2 * inside * whole * 4
    three, two = (traffic(found, sharded=mode, world=8, shards=8)["micro-batch"] for mode in ("zero3", "zero2"))
    assert two.copy == inside * whole * (2 + 4)
    assert three.copy - two.copy == inside * (whole - found.outside) * 2
    assert three.others == 0
    copies = traffic(found, sharded="zero3", world=64, shards=8)["micro-batch"]
    assert copies.copy == three.copy
    assert copies.others == 2 * inside * whole / 8 * 4
    one = rank(found, LOAD, world=64, sharded="zero3", shards=8, prompts=2).phases["update"]
    assert one.sent.copy == 9 * three.copy  # micro-batches
    assert one.seconds(H100, 8, 64) < one.seconds(H100, 64, 64)  # between nodes the way is slower


@pytest.fixture
def planned(
    tiny_policy: Callable[..., Policy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the command on a recipe whose checkpoint has no weights."""
    policy = tiny_policy()
    policy.save(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    tree = {
        "objective": "grpo", "steps": 3, "runs": str(tmp_path / "runs"), "model": {"path": str(tmp_path / "model")},
        "data": {"task": "addition", "limit": 300}, "rewards": [{"function": "accuracy"}],
        "rollout": {"max_new_tokens": 32}, "group": {"prompts_per_step": 100, "group_size": 8, "beta": 0.1},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "config.json").write_text(json.dumps(SEVEN))

    def run(*options: str) -> tuple[int, str]:
        code = commands.main(["train", str(tmp_path / "recipe.yaml"), *options])
        found = capsys.readouterr()
        return code, " ".join((found.out + found.err).split())

    return run


def test_a_dry_run_for_64_processes_needs_neither_them_nor_weights(planned: Callable, tmp_path: Path) -> None:
    other = ("--model-config", str(tmp_path / "config.json"), "model.dtype=bfloat16")
    code, text = planned("--dry-run", "--world", "64", *other, "parallel={name: zero3, shards: 8}")
    assert code == 0
    assert "processes 64, weights, gradients and optimizer state sharded over 8 (zero3), 8 copies" in text
    assert "ranks 0-35 2 x 8 completions, at most 512 tokens" in text
    assert "ranks 36-63 1 x 8 completions, at most 256 tokens" in text
    for part in (
        "weights 1.8 GiB",
        "gradients 3.5 GiB",
        "optimizer 10.6 GiB",
        "reference 1.8 GiB",
        "whole weights while sampling 14.2 GiB",
    ):
        assert part in text
    assert all(phase in text for phase in ("rollout ", "reference ", "update "))
    assert "by formula, not measured" in text
    assert not (tmp_path / "runs").exists()
    code, text = planned("--dry-run", "--nproc", "2")
    assert code == 0
    assert "processes 2, all weights on each" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--world", "64"), "--world plans what nobody starts: add --dry-run"),
        (("--model-config", "x.json"), "--model-config plans what nobody starts: add --dry-run"),
        (("--dry-run", "--model-config", "nowhere.json"), "no such file 'nowhere.json': give the config.json of a model"),
        (("--dry-run", "--world", "64", "parallel={name: zero3, shards: 7}"), "parallel.shards is 7, which does not divide the 64"),
        (("--dry-run", "parallel=zero4"), "parallel.name must be one of auto, ddp, zero2, zero3"),
        (("--dry-run", "parallel={name: zero3, shard: 7}"), "unknown key 'parallel.shard' (did you mean parallel.shards?)"),
        (("--dry-run", "parallel={name: zero3, shards: 1}"), "parallel.shards must be a whole number at least 2, or null; got 1"),
        (("--dry-run", "parallel={name: ddp, shards: 2}"), "shards and offload are for weights that are spread"),
        (("--dry-run", "parallel={name: zero3, offload: 1}"), "parallel.offload must be true or false; got 1"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: tuple[str, ...], says: str, planned: Callable) -> None:
    code, text = planned(*options)
    assert code == 2
    assert says in text
