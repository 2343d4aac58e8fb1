"""Recorded steps computed again: bit for bit, with something changed, and from folders that are not whole."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file

from groupwise.cli import commands
from groupwise.config.recipes import load_recipe
from groupwise.errors import CheckpointError, ConfigError, DataError
from groupwise.inspection import replay as replaying
from groupwise.inspection.replay import replay
from groupwise.inspection.replay_report import as_dict, compared, pushes, render
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.rollout_files import read_step
from groupwise.runs.run import train
from groupwise.runs.run_files import CHECKSUMS

spec = importlib.util.spec_from_file_location("replay_runs", Path(__file__).with_name("replay_runs.py"))
assert spec is not None
assert spec.loader is not None
replay_runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(replay_runs)
CASES, recorded, wrong = replay_runs.CASES, replay_runs.recorded, replay_runs.wrong


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of five steps that kept the last two checkpoints.  Do not change it: `run` is a copy."""
    return recorded(tmp_path_factory.mktemp("kept") / "runs", "run", steps=5, group={"prompts_per_step": 3, "group_size": 3})


@pytest.fixture
def run(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "elsewhere" / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["packing", "adapter", "minibatches", "refill", "ahead", "schedule", "adaptive", "episodes"])
def test_runs_of_many_kinds_are_replayed_bit_for_bit(case: str, tmp_path: Path) -> None:
    """The other kinds, and more steps of each: `python tests/runs/replay_runs.py`."""
    folder = recorded(tmp_path, case, **CASES[case])
    replayed = [replay(folder, number) for number in (1, 3)]
    assert [wrong(one) for one in replayed] == [[], []]
    assert any(one.recorded.metrics["grad_norm"] > 0 for one in replayed), "nothing was trained"


@pytest.mark.slow
def test_each_step_is_replayed_from_wherever_its_weights_can_be_had(run: Path) -> None:
    """Checkpoints 4 and 5 are there; the folder was moved, and the data are asked for by nobody."""
    replayed = {number: replay(run, number) for number in (1, 3, 5)}
    assert [replayed[number].begun for number in replayed] == [0, 0, 4]
    for number in replayed:
        assert wrong(replayed[number]) == []
    ways = [
        "from the model that the run began with",
        "from the model that the run began with, by way of 2 recorded steps",
        "from checkpoint 4",
    ]
    assert [way for number, way in zip(replayed, ways, strict=True) if f"\n{way}\n" not in render(replayed[number])] == []
    compared_ = {figure.name for figure in replayed[5].figures}
    assert {"weights after the step", "optimizer after the step"} <= compared_
    assert "weights after the step" not in {figure.name for figure in replayed[3].figures}


def test_a_metric_that_this_version_does_not_compute_is_no_difference(run: Path) -> None:
    """Another version's, or one that a reward function logged."""
    lines = read_metrics(run)
    written = [line | ({"log/seen": 3.0} if line["step"] == 5 else {}) for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    (run / "checksums.txt").unlink()
    replayed = replay(run, 5)
    assert replayed.same
    assert [note for note in replayed.notes if "log/seen" in note] == ["log/seen: no metrics that a replay computes"]


def test_without_a_model_the_loss_and_its_gradient_are_the_runs(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    replayed = replay(run, 4, model=False)
    assert replayed.same
    assert replayed.begun is None
    assert [figure.name for figure in replayed.figures] == ["rewards, added up", "advantages", "loss, closed form"]
    assert sum(replayed.again.gradient) > 0.1


@pytest.mark.slow
def test_of_several_passes_the_last_one_is_replayed(tmp_path: Path) -> None:
    """What was recorded of a token's gradient is of the last update."""
    folder = recorded(tmp_path, "passes", **CASES["passes"], steps=1)
    replayed = replay(folder, 1, model=False)
    assert as_dict(replayed)["pass"] == "last"
    then, now = replayed.recorded.columns["gradient"], replayed.again.column("gradient")
    pairs = [(one, np.abs(other)) for group in zip(then, now, strict=True) for one, other in zip(*group, strict=True) if one.size]
    assert sum(column.sum() for column, _ in pairs) > 0.1
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)
    # Entropies are recorded of the first: where one of two losses reads them, both are of that pass.
    beside = replay(folder, 1, ["group.entropy_bonus=1e-6"], model=False)
    assert beside.changed is not None
    assert as_dict(beside)["pass"] == "first" and "loss, first pass" in (both := compared(beside.again, beside.changed))
    assert both["loss, first pass"][0] == pytest.approx(both["loss, first pass"][1], abs=1e-4) != replayed.again.loss


@pytest.mark.slow
def test_a_loss_with_an_entropy_bonus_has_its_closed_form_by_the_recorded_entropies(tmp_path: Path) -> None:
    replayed = replay(recorded(tmp_path, "bonus", **CASES["bonus"]), 1, model=False)
    assert replayed.again.without is None
    assert next(figure for figure in replayed.figures if figure.name == "loss, closed form").same


def learnt(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without speed and what the sampling cost: a replay does not sample."""
    return {name: value for name, value in metrics.items() if not name.startswith(replaying.TIMES)}


def test_another_algorithm_does_what_training_with_it_does(kept: Path, tmp_path: Path) -> None:
    """The other run takes its step from the same checkpoint: same weights, seed and data order, so the same completions."""
    changes = ["objective=dr_grpo", "group.surrogate.high=0.28", "group.minibatches=3", "optimizer.lr=0.003"]
    replayed = replay(kept, 5, changes)
    other = tmp_path / "other"
    shutil.copytree(kept / "checkpoints" / "000004", other / "checkpoints" / "000004")
    tree = yaml.safe_load((kept / "config.yaml").read_text())
    tree |= {"name": "other", "runs": str(tmp_path), "objective": "dr_grpo"}
    tree["group"] |= {"surrogate": {"name": "clipped", "high": 0.28}, "minibatches": 3}
    tree["optimizer"] |= {"lr": 0.003}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(tree))
    (taken,) = train(load_recipe(tmp_path / "other.yaml"))
    assert replayed.changed is not None
    assert replayed.changed.step is not None
    assert replayed.changed.learner is not None
    assert [r.text for g in taken.groups for r in g.rollouts] == [r.text for g in replayed.recorded.groups for r in g.rollouts]
    assert learnt(replayed.changed.step.metrics) == learnt(taken.metrics)
    assert taken.metrics["grad_norm"] != replayed.recorded.metrics["grad_norm"], "the change changes nothing"
    weights = load_file(other / "final" / "model.safetensors")
    mine = dict(replayed.changed.learner.policy.model.named_parameters())
    assert all(np.array_equal(weights[name].numpy(), mine[name].detach().numpy()) for name in weights)
    assert replayed.same, "the recorded configuration is replayed beside it"


@pytest.mark.slow
def test_a_change_behind_steps_without_a_checkpoint_takes_them_as_they_were(run: Path) -> None:
    near = replay(run, 5, ["group.beta=0.1"])  # needs a reference, which the run did not keep
    shutil.rmtree(run / "checkpoints")
    far = replay(run, 5, ["group.beta=0.1"])
    assert (near.begun, far.begun) == (4, 0)
    assert near.changed is not None
    assert far.changed is not None
    assert near.changed.step is not None
    assert far.changed.step is not None
    assert near.changed.step.metrics["kl"] > 0
    for name in ("loss", "grad_norm", "kl"):
        assert near.changed.step.metrics[name] == far.changed.step.metrics[name], name


def test_what_a_change_does_to_every_token(run: Path) -> None:
    replayed = replay(run, 4, ["rewards.0.weight=-1", "rewards.1.weight=-0.5"], model=False)
    assert replayed.changed is not None
    flips = pushes(replayed.again, replayed.changed)
    pushed = sum(int(np.count_nonzero(column)) for group in replayed.again.column("gradient") for column in group)
    assert pushed > 0
    assert flips["pushed the other way"] == pushed, "rewards of the opposite sign push everything the other way"
    assert sum(flips.values()) == sum(len(r) for g in replayed.recorded.groups for r in g.rollouts)
    assert compared(replayed.again, replayed.changed).keys() == {"mean |advantage|", "loss, last pass", "sum of |dLoss/dlog-prob|"}


def test_numbers_that_were_altered_are_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / CHECKSUMS).unlink()
    lines = read_metrics(run)
    lines[3]["grad_norm"] *= 1 + 1e-7
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert commands.main(["replay", str(run), "--step", "4"]) == 1
    assert "NOT the same: grad_norm\n" in capsys.readouterr().out
    assert commands.main(["replay", str(run), "--step", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True
    rewrite(run, 4, lambda table: table.set_column(*place(table, "reward"), pa.array([1.0] * len(table))))
    replayed = replay(run, 4, model=False)
    assert {figure.name for figure in replayed.figures if not figure.same} >= {"rewards, added up", "advantages"}


def place(table: pa.Table, name: str) -> tuple[int, str]:
    return table.schema.get_field_index(name), name


def rewrite(run: Path, step: int, change: Callable[[pa.Table], pa.Table]) -> None:
    (run / CHECKSUMS).unlink(missing_ok=True)
    path = run / "rollouts" / f"{step:06d}.parquet"
    pq.write_table(change(pq.read_table(path)), path)


def test_what_is_missing_or_damaged_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"completions of step 9 are not in .*steps 1 to 5"):
        replay(run, 9)
    with pytest.raises(ConfigError, match=r"is no run folder: it has no config\.yaml"):
        replay(tmp_path, 1)
    for column in ("advantages", "behavior_logp", "prompt_ids", "finish"):
        shutil.copy(run / "rollouts" / "000002.parquet", tmp_path / "whole.parquet")
        rewrite(run, 2, lambda table, column=column: table.drop_columns([column]))
        with pytest.raises(DataError, match=rf"(step 2 of|000002\.parquet) .*no column '?{column}"):
            replay(run, 2)
        shutil.copy(tmp_path / "whole.parquet", run / "rollouts" / "000002.parquet")
    path = run / "rollouts" / "000003.parquet"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"000003\.parquet is damaged"):
        replay(run, 3)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match=r"metrics\.jsonl of .* has no line of step 2"):
        replay(run, 2)


def test_unreachable_weights_are_named_with_the_reason(run: Path) -> None:
    file = run / "checkpoints" / "000004" / "policy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"oops")
    replayed = replay(run, 5)
    assert replayed.begun == 0
    assert replayed.same
    assert "from checkpoint 4, which is damaged: policy/model.safetensors is not what was written" in replayed.notes[0]
    (run / "rollouts" / "000002.parquet").unlink()
    replayed = replay(run, 5)
    assert replayed.begun is None
    assert "completions of step 2 are not in" in replayed.notes[0]
    with pytest.raises(CheckpointError, match="needs log-probs of a reference"):
        replay(run, 5, ["group.beta=0.1"])
    assert "farther than --reach 1" in replay(run, 4, reach=1).notes[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("rollout.temperature=0.5", r"--set rollout\.temperature: the completions are those that were recorded"),
        ("group.group_size=4", "the completions are those that were recorded"),
        ("objective=dpo", "runs that sample completions, not for 'dpo'"),
        ("objective=grppo", "did you mean grpo"),
        ("objective=ppo", "ppo learns from a critic"),
        ("objective=distill", "learns from a teacher"),
        ("group.surrogate.hihg=0.3", "has no such keyword"),
        ("group.minibatches=0", "group.minibatches"),
        ("group.beta", "an override is written key=value"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(run: Path, change: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replay(run, 4, [change], model=False)


def test_another_machine_is_told_apart(run: Path) -> None:
    environment = json.loads((run / "environment.json").read_text())
    environment["attempts"][0]["versions"]["torch"] = "2.1.0"
    environment["attempts"][0]["kernels"] = "the package is not installed: run `pip install`"
    (run / CHECKSUMS).unlink()
    (run / "environment.json").write_text(json.dumps(environment))
    lines = read_metrics(run)
    lines[4]["grad_norm"] *= 1 + 1e-6
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    replayed = replay(run, 5)
    assert replayed.apart is not None
    assert "torch 2.1.0 then" in replayed.apart
    assert "kernels the package is not installed then, " in replayed.apart
    assert replayed.same, "rounding elsewhere is no difference"
    lines[4]["grad_norm"] *= 1.1
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [figure.name for figure in replay(run, 5).figures if not figure.same] == ["grad_norm"]


def test_a_replay_leaves_the_folder_as_it_is(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    replay(run, 5, ["objective=gspo"])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert read_step(run, 5).number == 5


def test_a_step_whose_sampler_was_wrong_is_told(run: Path) -> None:
    assert replay(run, 5).mismatch is None

    def shifted(table: pa.Table) -> pa.Table:
        column = [np.roll(values, 1).astype(np.float32).tolist() for values in table.column("behavior_logp").to_pylist()]
        return table.set_column(*place(table, "behavior_logp"), pa.array(column, pa.list_(pa.float32())))

    rewrite(run, 5, shifted)
    replayed = replay(run, 5)
    assert not replayed.same
    assert replayed.mismatch is not None
    assert replayed.mismatch.endswith(f"more than rounding explains (0.0001): run groupwise check {run}")
    assert replayed.mismatch in render(replayed)
    assert replay(run, 5, model=False).mismatch is None, "which needs the model"
