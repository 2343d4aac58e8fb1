"""Weights that are spread: read piece by piece, exported tensor by tensor, saved by all processes while training goes on."""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from transformers import AutoModelForCausalLM

from groupwise.config.settings import ModelSettings, ParallelSettings
from groupwise.distributed import sharded_checkpoint as shards
from groupwise.distributed.layout import decided
from groupwise.errors import CheckpointError, ConfigError
from groupwise.models.loading import read_blueprint
from groupwise.models.reward_head import make_scorer
from groupwise.models.saving import save
from groupwise.models.shape import Shape
from groupwise.models.streaming import empty_model
from groupwise.runs import checkpoint
from groupwise.runs.plan import Load, process_memory

spec = importlib.util.spec_from_file_location("cases_of_sharding", Path(__file__).with_name("cases.py"))
assert spec is not None and spec.loader is not None
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def bytes_of(folder: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    """`folder(family)`: a checkpoint."""

    def make(family: str) -> Path:
        save(cases.make(family, "float32"), tmp_path / family)
        return tmp_path / family

    return make


# ---- loading


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "gemma2", "mixtral"])
def test_a_model_without_numbers_is_the_checkpoints_model(family: str, folder: Callable) -> None:
    """The same names and shapes, and the buffers' numbers."""
    real = AutoModelForCausalLM.from_pretrained(folder(family))
    empty = empty_model(AutoModelForCausalLM, real.config, torch.float32)
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (real, empty)]
    assert shapes[0] == shapes[1]
    assert all(parameter.is_meta for parameter in empty.parameters())
    buffers = dict(empty.named_buffers())
    assert buffers.keys() == dict(real.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in real.named_buffers())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_no_process_reads_or_holds_more_than_its_part(family: str, folder: Callable, ranks: Callable) -> None:
    """Bytes of parameters, counted: a half each of two processes, but for rows that do not divide."""
    path = folder(family)
    whole = bytes_of(path)
    expected = {name: p.detach().double().numpy() for name, p in AutoModelForCausalLM.from_pretrained(path).named_parameters()}
    logits = AutoModelForCausalLM.from_pretrained(path)(input_ids=TOKENS).logits[0].detach().numpy()
    found = ranks(2).run("loaded", folder=str(path), mode="zero3")
    assert sum(one["own"] for one in found) == whole
    for one in found:
        assert one["read"] == one["own"]
        assert whole * 0.49 < one["own"] < whole * 0.51
        assert one["reference"]
        assert all(np.array_equal(one["weights"][name], weight) for name, weight in expected.items())
        np.testing.assert_allclose(one["logits"], logits[:, : one["logits"].shape[1]], atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_that_transformers_fuses_is_read_whole_and_spread(folder: Callable, ranks: Callable) -> None:
    path = folder("mixtral")
    expected = {name: p.detach().double().numpy() for name, p in AutoModelForCausalLM.from_pretrained(path).named_parameters()}
    for one in ranks(2).run("loaded", folder=str(path), mode="zero3"):
        assert one["read"] == 0
        assert one["own"] < bytes_of(path) * 0.6
        assert all(np.array_equal(one["weights"][name], weight) for name, weight in expected.items())


@pytest.mark.slow
def test_offloaded_shards_of_two_hold_half_of_the_weights(folder: Callable, ranks: Callable) -> None:
    path = folder("llama")
    for one in ranks(4).run("loaded", folder=str(path), mode={"name": "zero3", "shards": 2, "offload": True}):
        assert bytes_of(path) * 0.49 < one["own"] < bytes_of(path) * 0.51
        assert one["places"] == ["cpu"]


@pytest.mark.slow
def test_a_reward_model_is_read_in_pieces_too(folder: Callable, ranks: Callable, tmp_path: Path) -> None:
    """One that exists, with its head; of a language model the head is drawn, on every process the same."""
    settings = ModelSettings(path=str(folder("llama")))
    save(make_scorer(read_blueprint(settings), settings, pooling="last", seed=3), tmp_path / "scorer")
    expected = load_file(tmp_path / "scorer" / "model.safetensors")
    for one in ranks(2).run("loaded", folder=str(tmp_path / "scorer"), mode="zero3", scorer=True):
        assert one["read"] == one["own"] < bytes_of(tmp_path / "scorer") * 0.51
        assert all(np.array_equal(one["weights"][name], weight.double().numpy()) for name, weight in expected.items())
    first, second = ranks(2).run("loaded", folder=str(folder("llama")), mode="zero3", scorer=True)
    assert first["read"] == 0  # its head is in no file
    assert np.array_equal(first["weights"]["score.weight"], second["weights"]["score.weight"])
    assert np.any(first["weights"]["score.weight"])


def test_shards_must_divide_the_processes() -> None:
    with pytest.raises(ConfigError, match=r"parallel.shards is 3, which does not divide the 8 processes"):
        decided(ParallelSettings(name="zero3", shards=3), 10, 8)
    assert decided(ParallelSettings(), 2_000_000_000, 8) == ParallelSettings(name="zero3", shards=8)
    assert decided(ParallelSettings(), 2_000_000, 8).name == "ddp"


# ---- export


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_c14_a_sharded_policy_is_exported_as_a_plain_model_with_equal_logits(
    family: str, files: int, ranks: Callable, tmp_path: Path
) -> None:
    """Bit for bit those of the same model saved by transformers itself; with two files each process held a half of it."""
    found = ranks(2).run("export", folder=str(tmp_path / "ours"), family=family, files=files)
    policy = cases.make(family, "float32")
    save(policy, tmp_path / "theirs")
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / place).eval() for place in ("ours", "theirs")]
    for parameter in (parameter for model in models for parameter in model.parameters()):
        parameter.data = parameter.data.clone()  # MKL's last bits depend on where in a file, and so in memory, a weight begins
    ours, theirs = (model(input_ids=TOKENS).logits.detach() for model in models)
    assert torch.equal(ours, theirs)
    assert (tmp_path / "ours" / "config.json").read_text() == (tmp_path / "theirs" / "config.json").read_text()
    names = {place: {path.name for path in (tmp_path / place).iterdir()} for place in ("ours", "theirs")}
    if files == 1:
        assert names["ours"] == names["theirs"]
    else:
        index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)} <= names["ours"]
        whole = sum(one["held"] for one in found)
        assert all(one["held"] < 0.6 * whole for one in found)
    for one in found:
        np.testing.assert_allclose(one["logits"], ours[0, :, : one["logits"].shape[1]], atol=1e-5)


# ---- checkpoints


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A sharded run that saves when it is told to."""
    monkeypatch.chdir(Path(__file__).parent)
    tree = {
        "name": "run", "runs": str(tmp_path / "runs"), "seed": 3, "objective": "grpo", "steps": 4, "parallel": "zero3",
        "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 96, "tokenizer": "arithmetic"}},
        "data": {"task": "addition", "limit": 64, "eval_limit": 4},
        "rewards": [{"function": "judges.py:judge"}],
        "rollout": {"max_new_tokens": 8},
        "group": {"prompts_per_step": 3, "group_size": 3, "beta": 0.05, "reference_refresh": 1, "reference_mix": 0.5},
        "eval": {"k": 2, "at_start": False},
        "save": {"every": 0},
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@pytest.mark.slow
def test_what_changes_while_a_checkpoint_is_written_is_not_in_it(recipe: str, ranks: Callable, tmp_path: Path) -> None:
    """Saving returns before anything has its name, and training may go on; shards are read back bit for bit."""
    (tmp_path / "runs" / "run").mkdir(parents=True)
    found = ranks(2).run("saved_while_training", folder=str(tmp_path / "runs" / "run"), recipe=recipe)
    for one in found:
        assert one["unfinished"]
        assert one["same"]
    newest = Path(found[0]["newest"])
    assert checkpoint.damage(newest) is None
    saved = load_file(newest / "policy" / "model.safetensors")
    assert all(np.array_equal(saved[name].double().numpy(), found[0]["weights"][name]) for name in saved)
    assert {path.name for path in (newest / "trainer" / "shards").iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["policy", "shards"])
def test_c5_a_disk_that_is_full_for_one_process_is_named_by_all(where: str, recipe: str, ranks: Callable, tmp_path: Path) -> None:
    """Nothing half-written stays, and the checkpoint before is the last."""
    (tmp_path / "runs" / "run").mkdir(parents=True)
    given = {"folder": str(tmp_path / "runs" / "run"), "recipe": recipe, "where": where}
    for one in ranks(2).run("failing_save", **given):
        assert "No space left on device" in one["said"]
        assert "process 1" in one["said"]
        assert one["left"] == ["000001"]
        assert Path(one["newest"]).name in ("000001", "000002")  # closing the run saves once more


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "boom")


@pytest.fixture
def shard_folder(tmp_path: Path) -> Path:
    """Shards that one process wrote."""
    staged = shards.Staged(tmp_path / "shards", {"a": torch.arange(6.0).view(3, 2), "b": torch.ones(4, dtype=torch.bfloat16)})
    with pytest.warns(UserWarning, match="single process"):
        staged.write(None)
    return tmp_path / "shards"


def test_shards_come_back_and_must_fit(shard_folder: Path) -> None:
    into = {"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16)}
    shards.read(shard_folder, into)
    assert torch.equal(into["a"], torch.arange(6.0).view(3, 2))
    assert torch.equal(into["b"], torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"holds no a of shape \(2, 2\): it is of another model"):
        shards.read(shard_folder, {"a": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="holds no c of shape"):
        shards.read(shard_folder, {"c": torch.zeros(2)})


@pytest.mark.parametrize("what", ["bomb", "inside", "bytes", "text", "short"])
def test_x1_x2_an_index_that_holds_anything_else_is_refused_and_nothing_runs(what: str, shard_folder: Path, tmp_path: Path) -> None:
    """Even if the manifest was forged with it."""
    mark, index = tmp_path / "mark", shard_folder / ".metadata"
    genuine = pickle.loads(index.read_bytes())
    genuine.planner_data = Bomb(mark)
    written = {
        "bomb": pickle.dumps(Bomb(mark)),
        "inside": pickle.dumps(genuine),
        "bytes": pickle.dumps(Metadata(state_dict_metadata={"a": BytesStorageMetadata()})),
        "text": pickle.dumps("text"),
        "short": index.read_bytes()[:40],
    }
    index.write_bytes(written[what])
    with pytest.raises(CheckpointError, match="is no index of tensors"):
        shards.read(shard_folder, {"a": torch.zeros(3, 2)})
    assert not mark.exists()
    pickle.loads(written["bomb"])
    assert mark.exists(), "the bomb would not have gone off anyway"


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_c3_a_flipped_bit_in_a_shard_is_found_before_it_is_read(name: str, shard_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    temporary = checkpoint.begin(tmp_path / "run", 7, 0)
    assert temporary is not None
    (shard_folder).rename(temporary / "trainer" / "shards")
    checkpoint.complete(temporary, 7, lambda: (temporary / "trainer" / "state.json").write_text("{}"))
    final = checkpoint.path_of(tmp_path / "run", 7)
    assert checkpoint.latest(tmp_path / "run") == final
    file = final / "trainer" / "shards" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"trainer/shards/{name} is not what was written"):
        checkpoint.latest(tmp_path / "run")


# ---- sampling


@pytest.mark.slow
def test_p37_sharded_weights_are_gathered_once_per_rollout_and_not_per_token(ranks: Callable) -> None:
    """Ten times the tokens, and not a number more is sent."""
    few, many = (ranks(2).run("sampled", mode="zero3", tokens=tokens)[0] for tokens in (4, 60))
    assert many["longest"] > 5 * few["longest"]
    assert many["sent"] == few["sent"] == pytest.approx(many["parameters"] / 2, rel=0.02)
    assert ranks(2).run("sampled", mode="ddp", tokens=60)[0]["sent"] == 0


# ---- what the plan says


@pytest.mark.slow
@pytest.mark.parametrize(("size", "mode"), [(2, "ddp"), (2, "zero2"), (2, "zero3"), (4, {"name": "zero3", "shards": 2})])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_p34_the_plan_of_memory_and_traffic_is_what_is_counted(size: int, mode: Any, dtype: str, ranks: Callable) -> None:
    """Every part of a process's memory that is made of parameters, and every number that it sends, to what does not divide."""
    found = ranks(size).run("held", mode=mode, dtype=dtype)
    policy = cases.make("llama", dtype)
    shape = Shape.of(policy.model.config.to_dict(), found[0]["parameters"], dtype=dtype)
    parallel = decided(cases.parallel_of(mode), 0, size)
    load = Load(prompts=size, group=1, prompt_tokens=6, completion_tokens=0, max_tokens_per_microbatch=100)
    shards = parallel.shards or size
    planned = process_memory(shape, load, parallel, prompts=1, world=size)
    for one in found:
        assert one["weights"] == pytest.approx(planned.weights, rel=0.02)
        assert one["gradients"] == pytest.approx(planned.gradients, rel=0.02)
        assert one["optimizer"] == pytest.approx(planned.optimizer, rel=0.02)
        assert one["whole"] == (planned.whole or planned.weights)
        # A ring moves (n - 1) / n of a tensor to gather or to reduce it, and twice that for an all-reduce.
        inside, between = (shards - 1) / shards, (size // shards - 1) / (size // shards)
        if parallel.name == "ddp":
            assert one["update"] == pytest.approx(2 * (size - 1) / size * shape.parameters, rel=0.02)
            assert one["gathered"] == 0
            continue
        again = shape.parameters - shape.outside if parallel.name == "zero3" else 0
        update = inside * (2 * shape.parameters + again) + 2 * between * shape.parameters / shards
        assert one["update"] == pytest.approx(update, rel=0.02)
        assert one["gathered"] == pytest.approx(inside * shape.parameters, rel=0.02)
    if parallel.name != "ddp":
        assert sum(one["weights"] for one in found) * shards == planned.whole * size
