"""Whole runs on several processes: checkpoints that change hands, export, and what happens when a process fails."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from process_states import gone
from safetensors.torch import load_file

from groupwise.config.recipes import load_recipe
from groupwise.models.saving import save
from groupwise.runs.checkpoint import damage, latest
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.run import train

pytestmark = pytest.mark.slow  # several processes, each with a start of seconds


GROUP = {"group": {"beta": 0.05}}
REPETITION = {"rewards": [{"function": "repetition", "args": {"n": 1}}]}
"""For runs that are not about rewards: one that differs between completions, and is no process of its own on every rank."""
ONCE = {"save": {"every": 0}}
"""For runs that nothing interrupts."""


@pytest.fixture
def recipe(write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a recipe and returns its path."""
    monkeypatch.chdir(Path(__file__).parent)
    return lambda name, **changes: str(write_recipe(tmp_path, name, **(GROUP | changes)))


def final(tmp_path: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(tmp_path / "runs" / name / "final" / "model.safetensors")


def lines(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    return read_metrics(tmp_path / "runs" / name)


@pytest.mark.parametrize(("mode", "dtype"), [("ddp", "float32"), ("zero3", "float32"), ("zero3", "bfloat16")])
def test_a_checkpoint_of_three_goes_on_with_one_and_with_two(
    mode: str, dtype: str, recipe: Callable, ranks: Callable, tmp_path: Path
) -> None:
    changes = {"model": {"dtype": dtype}, "parallel": mode, "steps": 3} | REPETITION
    for _ in train(load_recipe(recipe("straight", **changes, **ONCE))):
        pass
    path = recipe("moved", **changes)
    ranks(3).run("whole_run", path=path, stop=1)
    for step in train(load_recipe(path)):
        assert step.number == 2  # it went on, and did not begin anew
        break
    ranks(2).run("whole_run", path=path)
    expected, found = final(tmp_path, "straight"), final(tmp_path, "moved")
    tolerance = 2e-5 if dtype == "float32" else 1e-2
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=tolerance, rtol=0)
    assert [line["step"] for line in lines(tmp_path, "moved")] == [1, 2, 3]
    if dtype == "float32":
        for ours, theirs in zip(lines(tmp_path, "moved"), lines(tmp_path, "straight"), strict=True):
            assert ours["reward"] == pytest.approx(theirs["reward"])
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


MOVING = {"group": {"beta": 0.05, "reference_refresh": 2, "reference_mix": 0.5}}


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        ({"parallel": "ddp"} | MOVING, (3,)),
        ({"parallel": "zero3"} | MOVING, (1, 3)),
        ({"parallel": {"name": "zero2", "offload": True}, "model": {"dtype": "bfloat16"}} | MOVING, (3,)),
        ({"parallel": "zero3", "model": {"lora": {"rank": 4}}, "steps": 3}, (2,)),
    ],
    ids=["ddp", "zero3", "offload", "lora"],
)
def test_p44_interrupted_equals_straight_bit_for_bit_on_as_many_processes(
    changes: dict[str, Any], stops: tuple[int, ...], recipe: Callable, ranks: Callable, tiny_policy: Callable, tmp_path: Path
) -> None:
    """Before the reference has moved, and after."""
    if "lora" in changes.get("model", {}):
        save(tiny_policy(), tmp_path / "base")
        changes = changes | {"model": changes["model"] | {"path": str(tmp_path / "base"), "scratch": None}}
    ranks(2).run("whole_run", path=recipe("straight", **changes, **REPETITION, **ONCE))
    path = recipe("broken", **changes, **REPETITION)
    for stop in (*stops, None):
        ranks(2).run("whole_run", path=path, stop=stop)
    expected, found = final(tmp_path, "straight"), final(tmp_path, "broken")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


LEARNERS: dict[str, dict[str, Any]] = {
    "critic": {"objective": "ppo", "critic": {"path": "BASE", "lr": 1e-3, "pretrain": 1}} | REPETITION,
    "teacher": {"objective": "distill", "rewards": [], "teacher": {"path": "BASE"}},
    "hint": {"objective": "distill", "rewards": [], "teacher": {"hint": "{answer} "}},
}


@pytest.mark.parametrize("kind", LEARNERS)
def test_critics_and_teachers_are_sharded_saved_and_resumed(
    kind: str, recipe: Callable, ranks: Callable, tiny_policy: Callable, tmp_path: Path
) -> None:
    """Interrupted equals straight to the bit, and one process to rounding."""
    save(tiny_policy(), tmp_path / "base")
    changes = json.loads(json.dumps(LEARNERS[kind]).replace("BASE", f"{tmp_path}/base"))
    changes |= {"group": {"beta": 0.0, "minibatches": 2}, "optimizer": {"lr": 1e-3, "tokens_per_microbatch": 48}, "steps": 3}
    for _ in train(load_recipe(recipe("alone", **changes, **ONCE))):
        pass
    ranks(2).run("whole_run", path=recipe("straight", **changes, **ONCE, parallel="zero3"))
    path = recipe("broken", **changes, parallel="zero3")
    for stop in (2, None):
        ranks(2).run("whole_run", path=path, stop=stop)
    expected, found, alone = (final(tmp_path, name) for name in ("straight", "broken", "alone"))
    for name in expected:
        assert torch.equal(found[name], expected[name])
        # AdamW makes a step of 1e-3 of however small a gradient: a few weights hear how it was rounded, by one thread or two.
        torch.testing.assert_close(expected[name], alone[name], atol=2e-4, rtol=0)
        assert (expected[name] - alone[name]).abs().mean() < 1e-6, name


@pytest.mark.parametrize("kind", ["critic", "teacher"])
def test_models_of_several_sizes_are_sharded_the_same_way(
    kind: str, recipe: Callable, ranks: Callable, tiny_policy: Callable, tmp_path: Path
) -> None:
    """Else `auto` would spread the large teacher of a small policy: a pass would wait for one that no other process makes."""
    save(tiny_policy(hidden=64), tmp_path / "base")
    changes = json.loads(json.dumps(LEARNERS[kind]).replace("BASE", f"{tmp_path}/base"))
    changes |= {"group": {"prompts_per_step": 5, "beta": 0.0}, "optimizer": {"lr": 1e-3, "tokens_per_microbatch": 40}}
    changes |= {"steps": 2} | ONCE
    for _ in train(load_recipe(recipe("alone", **changes))):
        pass
    found = ranks(2).run("several_sizes", path=recipe("auto", **changes), spread_from=50_000)
    assert found == [{"spread": True}] * 2
    for name, weight in final(tmp_path, "alone").items():
        torch.testing.assert_close(final(tmp_path, "auto")[name], weight, atol=2e-5, rtol=0)


@pytest.mark.parametrize("objective", ["sft", "dpo", "reward"])
def test_data_set_objectives_are_shared_out_too(objective: str, recipe: Callable, ranks: Callable, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{i}+{i}=", "completion": "1" * (i % 5 + 1), "chosen": "12" * (i % 4 + 1), "rejected": "3"} for i in range(24)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common: dict[str, Any] = {
        "objective": objective,
        "steps": 2,
        "batch_size": 5,
        "data": {"task": None, "path": str(tmp_path / "rows.jsonl"), "eval_fraction": 0.2, "eval_limit": None},
        "rewards": [],
        **ONCE,
    }
    for _ in train(load_recipe(recipe("alone", **common))):
        pass
    for mode in ("ddp", "zero3"):
        ranks(2).run("whole_run", path=recipe(mode, **common, parallel=mode))
        expected, found = final(tmp_path, "alone"), final(tmp_path, mode)
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=0)
        for ours, theirs in zip(lines(tmp_path, mode), lines(tmp_path, "alone"), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert lines(tmp_path, mode)[-1]["eval/loss"] == pytest.approx(lines(tmp_path, "alone")[-1]["eval/loss"], rel=1e-4)


# ---- the command, started by torchrun, and what becomes of it


@pytest.fixture
def launch(forked: Any) -> Callable[..., Any]:
    """Starts the command with two processes.  Launcher and processes are forks, unless `fresh`: then they are new interpreters."""

    def start(path: str, *, mischief: str = "", fresh: bool = False) -> Any:
        command = ("train", path, "--nproc", "2", "--timeout", "300", "--quiet")
        # However long a process takes to save on a busy machine, the launcher waits for it.
        own = {"OMP_NUM_THREADS": "1", "MISCHIEF": mischief, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}
        return forked.start(*command, forks=not fresh, **own)

    return start


def descendants(process: Any) -> set[int]:
    """Ids of the launcher's processes, the reward workers included."""
    found: set[int] = set()
    todo = [process.pid]
    while todo:
        for started in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with suppress(OSError):  # it has ended since
                todo += (below := [int(pid) for pid in started.read_text().split()])
                found |= set(below)
    return found


@pytest.fixture(scope="module")
def undisturbed(
    ranks: Callable, write_recipe: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, torch.Tensor]]:
    """The last weights of two processes to which nothing happens, by what they hold."""

    @cache
    def of(mode: str) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("undisturbed")
        path = write_recipe(folder, "undisturbed", steps=4, parallel=mode, **GROUP, **ONCE)
        ranks(2).run("whole_run", path=str(path))
        return final(folder, "undisturbed")

    return of


@pytest.mark.parametrize(
    ("mode", "mischief", "rank", "says"),
    [
        ("ddp", "raise", 1, "rank 1: RewardError: .*the judge is tired"),
        ("zero3", "kill", 1, r"rank\s*: 1 .*\n.*exitcode\s*: -9"),
        ("zero3", "stop", 0, r"rank 1: PeerError: rank 0 \(process \d+ on .*\) has sent no heartbeat for 15 s"),
    ],
    ids=["raise", "kill", "stop"],
)
def test_p06_p07_p48_a_process_that_fails_ends_the_run_with_its_name(
    mode: str, mischief: str, rank: int, says: str, recipe: Callable, ranks: Callable, undisturbed: Callable, launch: Callable,
    tmp_path: Path,
) -> None:  # fmt: skip
    """All end with a status that is not 0, say where the last checkpoint is, and leave nothing behind; the same
    command goes on and comes to the same bits, as does the same recipe on two processes that stand ready.

    The first of these is the real command: fresh interpreters, torchrun's and those that it starts."""
    path = recipe("failing", parallel=mode)
    log = tmp_path / "runs" / "failing" / "metrics.jsonl"
    process = launch(path, mischief=f"{mischief}:{rank}:{log}", fresh=mischief == "raise")
    seen: set[int] = set()
    while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < 2):
        seen |= descendants(process)
        time.sleep(0.1)
    assert process.wait() != 0, process.said
    output = process.said
    assert re.search(says, output), output
    assert gone(*seen)
    named = [Path(path) for path in re.findall(r"the last checkpoint is (\S+);", output)]
    newest = latest(tmp_path / "runs" / "failing")
    assert named, output
    assert newest is not None
    # What is written in the background may get its name while a message is on its way.
    assert all(damage(path) is None and int(path.name) >= int(newest.name) - 1 for path in named), output
    if mischief == "raise":
        again = launch(path)
        assert again.wait() == 0, again.said
    else:  # how a run was begun that goes on makes no difference to where it is taken up
        ranks(2).run("whole_run", path=path)
    found = final(tmp_path, "failing")
    assert all(torch.equal(found[name], weight) for name, weight in undisturbed(mode).items())


def test_p48_the_first_process_names_another_that_is_silent(
    recipe: Callable, ranks: Callable, forked: Any, undisturbed: Callable, tmp_path: Path
) -> None:
    """As above, of the process that all others met at, and without a launcher."""
    path, log = recipe("silent", parallel="ddp"), tmp_path / "runs" / "silent" / "metrics.jsonl"
    first, second = forked.start_two("train", path, "--quiet", "--timeout", "300", MISCHIEF=f"stop:1:{log}")
    assert first.wait() != 0
    assert re.search(r"rank 0: PeerError: rank 1 \(process \d+ on .*\) has sent no heartbeat for 15 s", first.said), first.said
    assert second.wait() == -signal.SIGKILL, "the first one ends it"
    ranks(2).run("whole_run", path=path)
    found = final(tmp_path, "silent")
    assert all(torch.equal(found[name], weight) for name, weight in undisturbed("ddp").items())


@pytest.mark.parametrize(("mode", "blow"), [("zero3", signal.SIGINT), ("ddp", signal.SIGTERM)])
def test_c7_c8_a_run_that_is_told_to_end_leaves_a_checkpoint_of_the_last_whole_step(
    mode: str, blow: signal.Signals, recipe: Callable, launch: Callable, tmp_path: Path
) -> None:
    path = recipe("stopped", steps=500, parallel=mode, save={"every": 0})
    log = tmp_path / "runs" / "stopped" / "metrics.jsonl"
    process = launch(path)
    while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < 2):
        time.sleep(0.1)
    seen = descendants(process)
    process.send_signal(blow)
    assert process.wait() != 0, process.said
    output = process.said
    assert gone(*seen)
    assert (tmp_path / "runs" / "stopped" / "checkpoints").is_dir(), output
    (saved,) = (tmp_path / "runs" / "stopped" / "checkpoints").iterdir()
    assert int(saved.name) == len(lines(tmp_path, "stopped")), output
    assert damage(saved) is None
    if blow is signal.SIGTERM:
        assert re.search(
            rf"rank 0: ended by SIGTERM; the last checkpoint is {saved}; the same command continues from there", output
        ), output


TOLD = """
import os, signal
from pathlib import Path
from groupwise.distributed import comm
summed, log = comm.sum_gradients, Path({log!r})

def told(parameters):  # looks before the sum: behind it the first process may be a step ahead
    due = os.environ["RANK"] == "1" and log.exists() and len(log.read_text().splitlines()) >= 2
    summed(parameters)
    if due:
        signal.raise_signal(signal.SIGTERM)

comm.sum_gradients = told
"""


def test_c7_c8_who_has_given_its_gradients_away_ends_after_the_step(recipe: Callable, forked: Any, tmp_path: Path) -> None:
    """The first process takes the step with them: did this one end at once, it could not finish it, nor save the one before."""
    path, log = recipe("told", steps=500, parallel="ddp", save={"every": 0}), tmp_path / "runs" / "told" / "metrics.jsonl"
    both = forked.start_two("train", path, "--quiet", "--timeout", "300", first=TOLD.format(log=str(log)))
    assert [process.wait() for process in both] == [143, 143], "\n".join(process.said for process in both)
    (saved,) = (tmp_path / "runs" / "told" / "checkpoints").iterdir()
    assert int(saved.name) == len(lines(tmp_path, "told")) >= 3


BEST: dict[str, Any] = {
    "steps": 8, "optimizer": {"lr": 1e-2}, "group": {"prompts_per_step": 4, "group_size": 4},
    "rewards": [{"function": "judges.py:brief"}, {"function": "judges.py:lengthy", "weight": 0.0}],
    "eval": {"every": 2, "k": 2, "best": "rewards/lengthy", "stop_after": 2}, "save": {"every": 50},
}  # fmt: skip
"""It learns short completions, and the best evaluation is that of long ones: the first."""


@pytest.mark.parametrize(
    ("mode", "model"),
    [("ddp", {}), ("zero3", {}), ("zero3", {"lora": {"rank": 4}}), ("ddp", {"lora": {"rank": 4}})],
    ids=["ddp", "zero3", "zero3-lora", "ddp-lora"],
)
def test_the_best_model_of_two_processes_is_exported(
    mode: str,
    model: dict[str, Any],
    write_recipe: Callable[..., Path],
    ranks: Callable,
    tiny_policy: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one go, and broken off behind the best evaluation; and what is exported is what one process exports."""
    monkeypatch.chdir(Path(__file__).parent)
    changes = BEST | {"parallel": mode, "model": model}
    if model:
        save(tiny_policy(), tmp_path / "base")
        changes = changes | {"model": model | {"path": str(tmp_path / "base"), "scratch": None}}
    ranks(2).run("whole_run", path=str(write_recipe(tmp_path, "straight", **changes)))
    folder = tmp_path / "runs" / "straight"
    end = json.loads((folder / "done.json").read_text())
    assert "the model of step 2, the best by held-out rewards/lengthy" in end["exported"]
    assert (end["step"], end["stopped"]) == (6, "no better rewards/lengthy in 2 evaluations (eval.stop_after)")
    found = final(tmp_path, "straight")
    assert all(torch.isfinite(weight).all() for weight in found.values())

    stopped = str(write_recipe(tmp_path, "stopped", **(changes | {"steps": 2, "eval": BEST["eval"] | {"every": 2}})))
    ranks(2).run("whole_run", path=stopped)
    at_two = final(tmp_path, "stopped")
    last = final_of_step(folder, 6)
    for name, weight in found.items():
        torch.testing.assert_close(weight, at_two[name], atol=0 if mode == "ddp" else 1e-6, rtol=0)
    assert last is None or not all(torch.equal(found[name], last[name]) for name in found)

    broken = str(write_recipe(tmp_path, "broken", **changes))
    for stop in (3, 5, None):
        ranks(2).run("whole_run", path=broken, stop=stop)
    assert all(torch.equal(final(tmp_path, "broken")[name], found[name]) for name in found)

    alone = str(write_recipe(tmp_path, "alone", **(changes | {"parallel": "ddp"})))
    for _ in train(load_recipe(alone)):
        pass
    for name, weight in found.items():
        torch.testing.assert_close(final(tmp_path, "alone")[name], weight, atol=1e-3, rtol=0)


def final_of_step(folder: Path, step: int) -> dict[str, torch.Tensor] | None:
    """The weights of a checkpoint, where it holds all of them."""
    file = folder / "checkpoints" / f"{step:06d}" / "policy" / "model.safetensors"
    return load_file(file) if file.exists() else None
