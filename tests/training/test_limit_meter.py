"""The limit meter against cases worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from groupwise.models.shape import Shape
from groupwise.records import Finish, Prompt, Rollout, Sampling, Scored, Step
from groupwise.training import limit_meter
from groupwise.training.limit_meter import Ceiling, Meter, forward_flops, stretch

SHAPE = Shape(
    parameters=1000 + 10 * 4 + 4, layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_width=3, vocabulary=10, tied=True
)
"""1000 parameters in the blocks: 2000 FLOPs a position, 4 x 2 x 6 = 48 a token that it sees, 2 x 10 x 4 = 80 for its logits."""


def group_of(name: str, m: int, lengths: tuple[int, ...], *, signals: tuple[str, ...] = (), written: int | None = None) -> Scored:
    prompt = Prompt(id=name, tokens=np.arange(m) + 1, text="")
    rollouts = tuple(
        Rollout(
            prompt=prompt, index=i, tokens=np.full(n, 5), behavior_logp=np.zeros(n), finish=Finish.LENGTH, eos_ids=(1,),
            sampling=Sampling(), text="", trained=np.arange(n) < (n if written is None else written),
        )
        for i, n in enumerate(lengths)
    )  # fmt: skip
    reward = np.arange(len(lengths), dtype=np.float64)
    columns = {name: tuple(np.zeros(n) for n in lengths) for name in signals}
    return Scored(rollouts=rollouts, names=("r",), rewards=reward[:, None], reward=reward, signals=columns)


def step_of(*groups: Scored, trained: tuple[bool, ...]) -> Step:
    weights = [[np.ones(len(r)) if use else np.zeros(0) for r in g.rollouts] for g, use in zip(groups, trained, strict=True)]
    return Step(number=1, metrics={"reward": 0.0}, timings={"rollout": 2.0}, groups=groups, columns={"weight": weights})


def test_a_forward_pass_by_hand() -> None:
    assert SHAPE.parameters - SHAPE.outside == 1000
    assert forward_flops(SHAPE, 1, 0, 0) == 2000
    assert forward_flops(SHAPE, 0, 1, 0) == 48
    assert forward_flops(SHAPE, 0, 0, 1) == 80
    assert stretch(0, 3) == 1 + 2 + 3
    assert stretch(5, 2) == 6 + 7


def test_one_live_and_one_dead_group_by_hand() -> None:
    """Live: prompt of 3, completions of 2 and 1.  Dead: prompt of 2, two completions of 1."""
    step = step_of(group_of("a", 3, (2, 1)), group_of("b", 2, (1, 1)), trained=(True, False))
    found = Meter(shape=SHAPE, ceiling=Ceiling(flops=1e6, bytes=1e4)).read(step)
    # Sampling: prompt a: 3 positions that see 1 + 2 + 3, one with logits; then one position of the first, which sees 4.
    live = (3 * 2000 + 6 * 48 + 80) + (2000 + 4 * 48 + 80)
    dead = 2 * 2000 + 3 * 48 + 80
    # An update of a: 2 positions that see 1 + 2; completions of 2 (see 3 + 4) and 1 (sees 3), logits at each.
    update = 3 * ((2 * 2000 + 3 * 48) + (2 * 2000 + 7 * 48 + 2 * 80) + (2000 + 3 * 48 + 80))
    assert found.metrics["limit/useful"] == pytest.approx((live + update) / (live + dead + update), rel=1e-12)
    assert found.metrics["limit/shared"] == 3 + 2
    assert found.metrics["limit/dead"] == 2
    assert found.metrics["limit/recomputed"] == 0
    # Decoding: one step, of one row: weights (1000 + 40 numbers of 4 bytes), keys and values of 3 + 1 tokens (2 x 2 x 3 numbers).
    read = (1000 + 40) * 4 + (3 + 1) * 12 * 4
    assert found.metrics["limit/bytes_per_token"] == pytest.approx(read / 5)
    prompts = (3 * 2000 + 6 * 48 + 80) + dead
    assert found.timings["ideal"] == pytest.approx((prompts + update) / 1e6 + read / 1e4)
    assert found.timings["rollout"] == 2.0
    assert found.metrics["reward"] == 0.0


def test_decoding_takes_as_long_as_what_bounds_it() -> None:
    step = step_of(group_of("a", 3, (2, 2)), trained=(True,))
    slow = Meter(shape=SHAPE, ceiling=Ceiling(flops=1e3, bytes=1e12)).read(step)
    flops = sum(flops_of_all(step)) + 2 * (2000 + 4 * 48 + 80)
    assert slow.timings["ideal"] == pytest.approx(flops / 1e3)
    halved = Meter(shape=SHAPE, ceiling=Ceiling(flops=1e3, bytes=1e12), processes=2).read(step)
    assert halved.timings["ideal"] == pytest.approx(flops / 2e3)


def flops_of_all(step: Step) -> tuple[float, float]:
    """Prompt and update of the group of 3 and (2, 2)."""
    return 3 * 2000 + 6 * 48 + 80, 3 * ((2 * 2000 + 3 * 48) + 2 * (2 * 2000 + 7 * 48 + 2 * 80))


@pytest.mark.parametrize(
    ("options", "signals", "recomputed", "passes"),
    [
        ({}, ("scored_logp",), 4, 1),
        ({"recompute": True, "updates": 3}, (), 12, 3),
        ({"threshold": True}, (), 4, 1),
        ({"recompute": True, "threshold": True, "updates": 2}, ("scored_logp",), 4 + 16, 5),
    ],
)
def test_recomputed_work_counts_as_spent_not_useful(options: dict, signals: tuple[str, ...], recomputed: int, passes: int) -> None:
    step = step_of(group_of("a", 3, (2, 2), signals=signals), trained=(True,))
    found = Meter(shape=SHAPE, ceiling=Ceiling(flops=1e6, bytes=1e6), **options).read(step)
    prompt, update = flops_of_all(step)
    useful = prompt + 2 * (2000 + 4 * 48 + 80) + options.get("updates", 1) * update
    assert found.metrics["limit/recomputed"] == recomputed
    assert found.metrics["limit/useful"] == pytest.approx(useful / (useful + passes * update / 3), rel=1e-12)


def test_a_reference_is_of_use_where_it_looked_at_what_was_trained() -> None:
    groups = [group_of(name, 3, (2, 2), signals=("reference_logp",)) for name in "ab"]
    found = Meter(shape=SHAPE, ceiling=Ceiling(flops=1e6, bytes=1e6)).read(step_of(*groups, trained=(True, False)))
    prompt, update = flops_of_all(step_of(groups[0], trained=(True,)))
    one = prompt + 2 * (2000 + 4 * 48 + 80) + update / 3
    assert found.metrics["limit/useful"] == pytest.approx((one + update) / (2 * one + update), rel=1e-12)


def test_what_the_policy_did_not_write_is_read_and_not_decoded() -> None:
    step = step_of(group_of("a", 3, (4,), written=2), trained=(True,))
    found = Meter(shape=SHAPE, ceiling=Ceiling(flops=1e6, bytes=1e6)).read(step)
    assert found.metrics["limit/bytes_per_token"] == pytest.approx(((1000 + 40) * 4 + 4 * 48) / 2)


def test_a_step_without_completions_is_left_as_it_is() -> None:
    step = Step(number=1, metrics={"loss": 1.0})
    assert Meter(shape=SHAPE, ceiling=Ceiling(1.0, 1.0)).read(step) is step


def test_the_ceiling_is_measured_once_for_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    monkeypatch.setattr(limit_meter, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(limit_meter, "measured", lambda device, dtype: measured.append(str(dtype)) or Ceiling(2e9, 3e9))
    for _ in range(2):
        limit_meter.ceiling.cache_clear()  # as another process would find it
        assert limit_meter.ceiling("cpu", "float32") == Ceiling(2e9, 3e9)
    assert measured == ["torch.float32"]
    limit_meter.ceiling("cpu", "bfloat16")
    assert measured == ["torch.float32", "torch.bfloat16"]
    (tmp_path / limit_meter.CEILINGS).write_text("{damaged")
    limit_meter.ceiling.cache_clear()
    assert limit_meter.ceiling("cpu", "float32").flops == 2e9
    assert list(json.loads((tmp_path / limit_meter.CEILINGS).read_text()).values()) == [{"flops": 2e9, "bytes": 3e9}]
    limit_meter.ceiling.cache_clear()


def test_a_measured_ceiling_is_within_reach_of_its_own_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limit_meter.SIDE, "cpu", 64)
    monkeypatch.setitem(limit_meter.COPIED, "cpu", 1 << 16)
    clock = iter(range(1000))
    monkeypatch.setattr(limit_meter.time, "perf_counter", lambda: 2.0 * next(clock))  # every call takes two seconds
    import torch

    assert limit_meter.measured("cpu", torch.float32) == Ceiling(flops=64**3, bytes=1 << 16)
