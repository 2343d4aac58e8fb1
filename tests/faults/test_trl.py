"""The faults that TRL was put to as well (`page.TRL`), those that no other test here shows."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from groupwise.algorithms.advantages import Standardized
from groupwise.cli.commands import main
from groupwise.config.recipes import load_recipe, parse_stages
from groupwise.config.settings import DataSettings, ModelSettings, RewardSettings
from groupwise.data.load import load_data
from groupwise.data.tokenizers import make_tokenizer
from groupwise.errors import ConfigError, DataError, GroupwiseError, PeerError, RewardError, StorageError
from groupwise.models.loading import load_policy
from groupwise.models.saving import save
from groupwise.rewards.compose import build_rewards
from groupwise.rewards.find import Completions
from groupwise.rollout.vllm.client import Client
from groupwise.runs import checkpoint
from groupwise.runs.run import train
from groupwise.utils import files


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")


def same(left: Path, right: Path) -> bool:
    ours, theirs = weights(left), weights(right)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def finish(path: Path) -> Path:
    for _ in train(load_recipe(path)):
        pass
    return Path("runs") / path.stem


# ---------------------------------------------------------------- rewards


def batch(*texts: str, prompt: Any = "?", **columns: list[Any]) -> Completions:
    said = [{"role": "assistant", "content": text} for text in texts] if isinstance(prompt, list) else texts
    completions = [[one] for one in said] if isinstance(prompt, list) else texts
    return Completions(
        labels=[f"0/0#{n}" for n in range(len(texts))],
        prompts=[prompt] * len(texts),
        prompt_texts=["?"] * len(texts),
        texts=texts,
        completions=completions,
        columns=columns,
    )


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`call(code, **settings)`: the rewards of two completions by `judge` of this code."""
    monkeypatch.chdir(tmp_path)
    made = []

    def rewarded(code: str, **settings: Any) -> Any:
        (tmp_path / "trl_judge.py").write_text(f"import time\nimport numpy as np\n{code}\n")
        made.append(build_rewards([RewardSettings(function="trl_judge.py:judge", **settings)], columns=["answer"]))
        return made[-1].call(batch("4", "5", answer=["4", "5"]))

    yield rewarded
    for rewards in made:
        rewards.close()


@pytest.mark.trl(2, "the call is ended at its timeout, its samples are masked and counted")
def test_a_reward_that_sleeps_an_hour_is_ended(call: Callable) -> None:
    code = "def judge(completion):\n    time.sleep(3600 if completion == '4' else 0)\n    return 1.0"
    assert call(code, timeout=0.5) == [[None, 1.0]]


WRONG = (
    pytest.param("[float('nan'), 1.0]", r"'judge'.*nan", marks=pytest.mark.trl(3, "refused: the reward, the sample, the value")),
    pytest.param("[float('nan')] * 2", r"'judge'.*nan", marks=pytest.mark.trl(4, "refused, as above")),
    pytest.param("[1.0, float('inf')]", r"'judge'.*inf", marks=pytest.mark.trl(5, "refused, as above")),
    pytest.param("[1.0]", r"'judge'.*1 .*2", marks=pytest.mark.trl(7, "clear error with both lengths")),
    pytest.param(
        "['a', 'b']",
        r"'judge' returned str 'a' for completion 0/0#0",
        marks=pytest.mark.trl(8, "names the reward, the type and the place"),
    ),
    pytest.param("np.ones((2, 2))", r"'judge'.*\(2, 2\)", marks=pytest.mark.trl(9, "names the reward and the shape")),
    pytest.param("None", r"'judge'.*None", marks=pytest.mark.trl(10, "names the reward and what it must return")),
)


@pytest.mark.parametrize(("returned", "says"), WRONG)
def test_what_is_no_reward_is_refused_by_name(returned: str, says: str, call: Callable) -> None:
    with pytest.raises(RewardError, match=says):
        call(f"def judge(completions, **_):\n    return {returned}")


@pytest.mark.slow
@pytest.mark.trl(6, "ends after 3 steps without a single reward")
def test_none_for_all_ends_the_run(recipe: Callable, tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text("def judge(completions, **_):\n    return [None] * len(completions)\n")
    steps = train(load_recipe(recipe("r")))
    assert [next(steps).number, next(steps).number] == [1, 2]
    with pytest.raises(RewardError, match="said None for every completion of 3 steps"):
        next(steps)


@pytest.mark.trl(11, "advantages are finite (float64)")
def test_huge_rewards_have_finite_advantages(scored_group: Callable) -> None:
    (advantages,) = Standardized()([scored_group([1e38, -1e38, 3e38])])
    found = np.array([float(one[0]) for one in advantages])
    assert np.isfinite(found).all()
    assert np.abs(found).max() > 0.5


@pytest.mark.trl(12, "refused before weights are loaded")
def test_a_column_that_is_not_there_is_refused_while_rewards_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asks.py").write_text("def judge(completions, rating):\n    return [1.0] * len(completions)\n")
    with pytest.raises(ConfigError, match="'rating', which the data do not have"):
        build_rewards([RewardSettings(function="asks.py:judge")], columns=["answer"])


@pytest.mark.trl(37, "plain text and messages are both read")
@pytest.mark.parametrize("prompt", ["2 + 2 = ?", [{"role": "user", "content": "2 + 2 = ?"}]])
def test_a_math_reward_reads_text_and_messages(prompt: Any) -> None:
    with build_rewards([RewardSettings(function="accuracy")], columns=["answer"]) as rewards:
        assert rewards.call(batch("#### 4", "#### 5", prompt=prompt, answer=["4", "4"])) == [[1.0, 0.0]]


# ---------------------------------------------------------------- models and tokenizers


@pytest.fixture
def model(tiny_policy: Callable, tmp_path: Path) -> Path:
    """A checkpoint folder."""
    save(tiny_policy(), tmp_path / "model")
    return tmp_path / "model"


def changed(file: Path, **keys: Any) -> None:
    """A JSON file with other values; None takes a key away."""
    found = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "pad",
    [
        pytest.param(None, marks=pytest.mark.trl(13, "there is no padding")),
        pytest.param("eos", marks=pytest.mark.trl(15, "right: there is no padding")),
    ],
)
def test_pad_does_not_matter(pad: str | None, recipe: Callable, model: Path) -> None:
    settings = {"model": {"path": str(model), "scratch": None}, "steps": 2}
    clean = finish(recipe("clean", **settings))
    other = Path("other")
    shutil.copytree(model, other)
    tokens = json.loads((other / "tokenizer_config.json").read_text())
    changed(other / "tokenizer_config.json", pad_token=None if pad is None else tokens["eos_token"])
    eos = json.loads((other / "config.json").read_text())["eos_token_id"]
    changed(other / "config.json", pad_token_id=None if pad is None else eos if isinstance(eos, int) else eos[0])
    ours, theirs = weights(finish(recipe("other_pad", model={"path": str(other), "scratch": None}, steps=2))), weights(clean)
    # torch gives the row of an embedding's `padding_idx` no gradient where its token is read: nothing else knows of PAD.
    row = [eos, json.loads((model / "config.json").read_text())["pad_token_id"]]
    for found in (ours, theirs):
        found["model.embed_tokens.weight"][row] = 0.0
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.trl(14, "refused, with what to set")
def test_a_tokenizer_without_eos_is_refused(model: Path) -> None:
    changed(model / "tokenizer_config.json", eos_token=None)
    for name in ("config.json", "generation_config.json"):
        if (model / name).exists():
            changed(model / name, eos_token_id=None)
    with pytest.raises(GroupwiseError, match=r"(?i)eos"):
        load_policy(ModelSettings(path=str(model)))


@pytest.mark.trl(16, "refused before weights are read")
def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(model / "config.json", vocab_size=5)
    (model / "model.safetensors").unlink()
    with pytest.raises(GroupwiseError, match=r"(?i)vocabulary|vocab_size"):
        load_policy(ModelSettings(path=str(model)))


@pytest.mark.trl(17, "refused with the parameter's name")
def test_nan_in_a_weight_is_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in sorted(tensors) if "mlp" in name)
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(GroupwiseError, match=name.rpartition("model.")[2].replace(".", r"\.")):
        load_policy(ModelSettings(path=str(model)))


# ---------------------------------------------------------------- data


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., Any]:
    """`rows(prompts)`: what is read of a file with these prompts."""

    def read(prompts: list[Any]) -> Any:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
        return load_data(DataSettings(path=str(file)), make_tokenizer("arithmetic"), context=32, max_new_tokens=8, seed=0)

    return read


@pytest.mark.trl(19, "the row is reported and left out")
def test_an_empty_prompt_is_left_out(rows: Callable) -> None:
    data = rows(["1+1="] * 15 + [""])
    assert len(data.train) == 15
    assert "empty" in str(data.report)


@pytest.mark.trl(20, "left out and counted before step 1")
def test_a_prompt_that_is_too_long_is_left_out(rows: Callable) -> None:
    data = rows(["1+1="] * 15 + ["1+" * 200])
    assert len(data.train) == 15
    assert "longer than" in str(data.report)


@pytest.mark.trl(21, "left out and counted, with file and line")
def test_a_prompt_that_is_none_is_left_out(rows: Callable) -> None:
    data = rows(["1+1=", "1+1=", None])
    assert len(data.train) == 2
    assert sum(data.report.dropped.values()) == 1
    assert "rows.jsonl line 3: prompt is empty (null)" in str(data.report)


@pytest.mark.trl(22, "refused")
def test_no_rows_are_refused(rows: Callable) -> None:
    with pytest.raises(DataError, match="is empty"):
        rows([])


# ---------------------------------------------------------------- ends, and beginnings again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.trl(23, "143; the last whole step is saved")),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.trl(24, "130; the last whole step is saved")),
    ],
)
def test_a_signal_keeps_the_last_whole_step(number: int, code: int, recipe: Callable, forked: Any) -> None:
    path = recipe("r", steps=500)
    process, log = forked.start("train", path, "--quiet"), Path("runs/r/metrics.jsonl")
    while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) >= 3):
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait() == code, process.said
    done = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    newest = checkpoint.latest(Path("runs/r"))
    assert newest is not None
    assert checkpoint.step_of(newest) == done[-1] == len(done)


@pytest.mark.slow
@pytest.mark.trl(25, "6; nothing half stays, the older ones are intact")
def test_a_full_disk_during_a_save(recipe: Callable, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sync = recipe("r", save={"every": 1}), files.sync

    def full(place: Path) -> None:
        if "000002" in str(place) and "checkpoints" in str(place):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(place)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", full)
        assert main(["train", str(path), "--quiet"]) == StorageError.exit_code == 6
    newest = checkpoint.latest(Path("runs/r"))
    assert newest is not None
    assert checkpoint.damage(newest) is None
    assert not list(Path("runs/r/checkpoints").glob("*000002*"))
    assert same(finish(path), straight)


def _cut(folder: Path) -> None:
    file = folder / "policy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def _flip(folder: Path) -> None:
    file = folder / "policy" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(_cut, marks=pytest.mark.trl(27, "named in a warning; the one before is used")),
        pytest.param(lambda folder: (folder / "policy" / "config.json").write_bytes(b""), marks=pytest.mark.trl(27)),
        pytest.param(lambda folder: (folder / "policy" / "config.json").unlink(), marks=pytest.mark.trl(27)),
        pytest.param(
            lambda folder: (folder / "trainer" / "tensors.safetensors").unlink(),
            marks=pytest.mark.trl(28, "named; the one before is used"),
        ),
        pytest.param(_flip, marks=pytest.mark.trl(29, "named; the one before is used")),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    harm: Callable[[Path], object], begun_run: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    path = begun_run(3)
    newest = checkpoint.latest(Path("runs/r"))
    assert newest is not None
    assert checkpoint.step_of(newest) == 2
    harm(newest)
    folder = finish(path)
    assert any("000002" in said and "going on from 000001" in said for said in caplog.messages)
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.trl(31, "there is no pickle to put it into")
def test_a_checkpoint_holds_no_pickle(recipe: Callable) -> None:
    next(iter(train(load_recipe(recipe("r", steps=1)))))
    newest = checkpoint.latest(Path("runs/r"))
    assert newest is not None
    kinds = {file.suffix for file in newest.rglob("*") if file.is_file()}
    assert kinds <= {".json", ".safetensors", ".jinja", ".txt", ".md", ""}
    (newest / "trainer" / "optimizer.pt").write_bytes(b"\x80\x04")
    assert "does not belong" in str(checkpoint.damage(newest))


# ---------------------------------------------------------------- recipes


def refused(**changes: Any) -> str:
    tree = {
        "objective": "grpo",
        "steps": 1,
        "model": {"scratch": {}},
        "data": {"task": "addition"},
        "rewards": [{"function": "exact"}],
    }
    with pytest.raises(ConfigError) as caught:
        parse_stages(yaml.safe_dump(tree | changes, sort_keys=False), "r.yaml")
    return str(caught.value)


@pytest.mark.trl(18, "refused with the recipe: out of range")
def test_a_learning_rate_of_1e30() -> None:
    assert "optimizer.lr" in refused(optimizer={"lr": 1e30})


@pytest.mark.trl(33, "line, key, and what was meant")
def test_a_misspelt_key() -> None:
    said = refused(optimizer={"learning_rat": 1e-5})
    assert "r.yaml:10: unknown key" in said
    assert "did you mean" in said


@pytest.mark.trl(34, "line, value and the choices")
def test_an_objective_that_is_none() -> None:
    said = refused(group={"surrogate": "nosuch"})
    assert all(part in said for part in ("r.yaml:10", "'nosuch'", "clipped", "cispo"))


@pytest.mark.trl(35, "both in the one list of mistakes")
def test_a_negative_epsilon_and_a_key_twice() -> None:
    text = "objective: grpo\nsteps: 1\nsteps: 2\nmodel: {scratch: {}}\ndata: {task: addition}\nrewards: [{function: exact}]\n"
    with pytest.raises(ConfigError, match=r"2 problems") as caught:
        parse_stages(text + "group: {surrogate: {name: clipped, low: -3}}\n", "r.yaml")
    assert "r.yaml:3" in str(caught.value)
    assert "r.yaml:7" in str(caught.value)


@pytest.mark.trl(36, "no such folder, and what is near")
def test_a_model_folder_that_is_misspelt(model: Path) -> None:
    said = refused(model={"path": str(model.with_name("modle"))})
    assert "no such folder" in said
    assert "model" in said


# ---------------------------------------------------------------- servers


@pytest.mark.trl(38, "ends at its deadline, names the server")
def test_a_server_that_accepts_and_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[Any] = []
        threading.Thread(target=lambda: held.append(server.accept()), daemon=True).start()
        port = server.getsockname()[1]
        begun = time.monotonic()
        with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{port} has given no answer for 1 s"):
            Client(f"http://127.0.0.1:{port}").get("/health", timeout=0.6)
        assert time.monotonic() - begun < 30
        for connection, _ in held:
            connection.close()
