"""Objectives on pairs and steps against plain, unpacked computations with transformers' own forward passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from groupwise.config.objectives import DATASET
from groupwise.config.recipes import make_recipe
from groupwise.config.settings import OptimizerSettings, PairSettings, RewardModelSettings
from groupwise.data.encoding import Pair, Solution
from groupwise.data.packing import pack
from groupwise.distributed.comm import World
from groupwise.errors import ConfigError
from groupwise.models import passes
from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.models.reward_head import add_head, wrap_scorer
from groupwise.runs.prepared import modelled
from groupwise.training.objectives import OBJECTIVES
from groupwise.training.offline import Objective, train_offline, validate
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import BatchPass, assess, update
from groupwise.training.preferences import (
    PROCESS,
    anchored,
    calibration,
    dpo_objective,
    preference_rows,
    reward_objective,
    with_replay,
)


def random_pairs(count: int = 5, margin: float = 0.0, seed: int = 0) -> list[Pair]:
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> np.ndarray:
        return rng.integers(5, 60, size=rng.integers(low, high))

    sides = [(ids(1, 8), np.append(ids(1, 9), 1), np.append(ids(1, 9), 1)) for _ in range(count)]
    return [Pair(id=str(i), prompt=p, chosen=c, rejected=r, margin=margin * i) for i, (p, c, r) in enumerate(sides)]


@pytest.fixture
def scorer(tiny_policy: Callable[..., Policy]) -> Callable[..., Policy]:
    def make(pooling: str = "mean", dtype: torch.dtype = torch.float64) -> Policy:
        causal = tiny_policy(dtype=dtype)
        model = add_head(causal.model, causal.tokenizer, causal.eos_ids, pooling, seed=1)  # type: ignore[arg-type]
        return wrap_scorer(model, causal.tokenizer)

    return make


def plain_states(policy: Policy, prompt: np.ndarray, completion: np.ndarray) -> torch.Tensor:
    """(n + 1, D): states of one sequence, from the prompt's last token on, by the model's own attention."""
    ids = torch.from_numpy(np.concatenate([prompt, completion]))
    return policy.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, prompt.size - 1 :]


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    return found


def packed_gradient(
    policy: Policy, objective: Objective, rows: list, max_tokens_per_microbatch: int
) -> tuple[float, dict[str, torch.Tensor]]:
    class Stop(Exception):
        pass

    class Never:
        def clear(self) -> None:
            policy.model.zero_grad()

        def step(self) -> None:
            raise Stop

    total = assess(
        policy,
        objective.loss,
        objective.samples(rows),
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        whole_groups=objective.whole_groups,
    ).loss
    with pytest.raises(Stop):
        update(
            policy,
            objective.loss,
            objective.samples(rows),
            Never(),
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            whole_groups=objective.whole_groups,
        )  # type: ignore[arg-type]
    return total, gradients(policy)


def close(ours: tuple[float, dict[str, torch.Tensor]], loss: torch.Tensor, policy: Policy) -> None:
    loss.backward()
    expected = gradients(policy)
    assert ours[0] == pytest.approx(loss.item(), rel=1e-9)
    assert ours[1].keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("max_tokens_per_microbatch", [1, 40, 1000])
@pytest.mark.parametrize("pooling", ["last", "mean", "sum"])
def test_the_reward_model_learns_what_bradley_terry_says(
    scorer: Callable[..., Policy], pooling: str, max_tokens_per_microbatch: int
) -> None:
    policy, pairs = scorer(pooling), random_pairs(margin=0.1)
    settings = RewardModelSettings(pooling=pooling, centering=0.03, lm_coefficient=0.2)  # type: ignore[arg-type]
    ours = packed_gradient(policy, reward_objective(settings), pairs, max_tokens_per_microbatch)
    tokens = sum(pair.chosen.size + pair.rejected.size for pair in pairs)
    loss = torch.zeros((), dtype=torch.float64)
    with plain_attention(policy.model):
        for pair in pairs:
            states = [plain_states(policy, pair.prompt, side) for side in (pair.chosen, pair.rejected)]
            read = [policy.model.score(state[1:])[:, 0] for state in states]
            pool = {"last": lambda scores: scores[-1], "mean": torch.mean, "sum": lambda scores: scores.sum() / 32}[pooling]
            chosen, rejected = map(pool, read)
            loss = loss - logsigmoid(chosen - rejected - pair.margin) / 5 + 0.03 * (chosen + rejected) ** 2 / 5
            for state, side in zip(states, (pair.chosen, pair.rejected), strict=True):
                logp = torch.log_softmax(state[:-1] @ policy.model.get_input_embeddings().weight.T, -1)
                loss = loss - 0.2 / tokens * logp.gather(1, torch.from_numpy(side)[:, None]).sum()
    close(ours, loss, policy)


@pytest.mark.parametrize("max_tokens_per_microbatch", [1, 1000])
@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_and_ipo(tiny_policy: Callable[..., Policy], kind: str, max_tokens_per_microbatch: int) -> None:
    policy, reference = (tiny_policy(dtype=torch.float64, seed=seed) for seed in (0, 1))
    pairs, beta = random_pairs(), 0.3
    rows = anchored(reference, pairs, max_tokens_per_microbatch=50)
    ours = packed_gradient(policy, dpo_objective(PairSettings(beta=beta, loss=kind)), rows, max_tokens_per_microbatch)  # type: ignore[arg-type]
    loss = torch.zeros((), dtype=torch.float64)

    def logp(model: Policy, pair: Pair, side: np.ndarray) -> torch.Tensor:
        with plain_attention(model.model):
            logits = plain_states(model, pair.prompt, side)[:-1] @ model.head.weight_VD.T
        found = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(side)[:, None])
        return found.mean() if kind == "ipo" else found.sum()

    for pair in pairs:
        gap = [logp(policy, pair, side) - logp(reference, pair, side).detach() for side in (pair.chosen, pair.rejected)]
        difference = gap[0] - gap[1]
        loss = loss + ((difference - 1 / (2 * beta)) ** 2 if kind == "ipo" else -logsigmoid(beta * difference)) / 5
    close(ours, loss, policy)


def test_before_the_first_step_dpo_sees_no_difference(tiny_policy: Callable[..., Policy]) -> None:
    policy = tiny_policy()
    found = validate(
        policy,
        dpo_objective(PairSettings()),
        anchored(policy, random_pairs(), max_tokens_per_microbatch=30),
        max_tokens_per_microbatch=500,
    )
    assert found.figures["loss"] == pytest.approx(np.log(2), abs=1e-5)


@pytest.mark.parametrize("max_tokens_per_microbatch", [1, 1000])
def test_the_process_reward_model_learns_step_labels(scorer: Callable[..., Policy], max_tokens_per_microbatch: int) -> None:
    policy = scorer("steps")
    rows = [
        Solution(
            id="0",
            prompt=np.array([7, 8]),
            completion=np.array([9, 9, 6, 1]),
            ends=np.array([1, 3]),
            labels=np.array([1.0, 0.0]),
        ),
        Solution(id="1", prompt=np.array([5]), completion=np.array([6, 1]), ends=np.array([1]), labels=np.array([0.25])),
    ]
    ours = packed_gradient(policy, PROCESS, rows, max_tokens_per_microbatch)
    loss = torch.zeros((), dtype=torch.float64)
    with plain_attention(policy.model):
        for row in rows:
            logit = policy.model.score(plain_states(policy, row.prompt, row.completion)[1:])[torch.from_numpy(row.ends), 0]
            labels = torch.from_numpy(row.labels)
            loss = loss - (labels * logsigmoid(logit) + (1 - labels) * logsigmoid(-logit)).sum() / 3
    close(ours, loss, policy)


def test_training_and_validation_are_the_same_function(scorer: Callable[..., Policy]) -> None:
    """Training on all pairs at once reports before its step what validation says of them, to the last metric."""
    policy, pairs = scorer(dtype=torch.float32), random_pairs()
    objective = reward_objective(RewardModelSettings(pooling="mean", centering=0.01, lm_coefficient=0.1))
    before = validate(policy, objective, pairs, max_tokens_per_microbatch=60).figures
    optimizer = Optimizer(policy.model, OptimizerSettings(lr=1e-3), 1)
    (step,) = train_offline(
        policy, objective, draw=lambda k: pairs, optimizer=optimizer, max_tokens_per_microbatch=200, batch_size=5, steps=1
    )
    for name in ("loss", "accuracy", "margin", "score/chosen", "score/rejected"):
        assert step.metrics[name] == pytest.approx(before[name], abs=1e-5), name
    assert validate(policy, objective, pairs, max_tokens_per_microbatch=60).figures["loss"] < before["loss"]


def test_validation_says_where_the_model_is_right(scorer: Callable[..., Policy]) -> None:
    pairs = random_pairs(40)
    found = validate(scorer(), reward_objective(RewardModelSettings(pooling="mean")), pairs, max_tokens_per_microbatch=500).figures
    longer = np.sign([pair.chosen.size - pair.rejected.size for pair in pairs])
    shares = {"shorter": (longer < 0).mean(), "same_length": (longer == 0).mean(), "longer": (longer > 0).mean()}
    parts = sum(share * found[f"accuracy/chosen_{name}"] for name, share in shares.items())
    assert found["accuracy"] == pytest.approx(parts)
    bins = [name for name in found if name.startswith("calibration/") and name.endswith("/pairs")]
    assert sum(found[name] for name in bins) == 40
    right = sum(found[name] * found[name.replace("pairs", "observed")] for name in bins)
    assert right / 40 == pytest.approx(found["accuracy"])


def test_calibration_of_a_model_that_knows_its_odds() -> None:
    rng = np.random.default_rng(0)
    gap = rng.normal(size=20_000) * 2
    right = rng.random(gap.size) < 1 / (1 + np.exp(-np.abs(gap)))
    assert calibration(np.where(right, np.abs(gap), -np.abs(gap)))["calibration/error"] < 0.02
    assert calibration(np.where(right, 9.0, -9.0))["calibration/error"] > 0.2


def test_new_pairs_from_a_policys_own_completions(scored_group: Callable) -> None:
    rows = preference_rows([scored_group([0.1, None, 0.9, 0.5]), scored_group([1.0, 1.0])])
    assert rows == [{"prompt": "?", "answer": "1", "chosen": "completion 2", "rejected": "completion 0"}]


def test_new_pairs_by_one_of_several_rewards(scored_group: Callable) -> None:
    group = scored_group([0.0, 1.0])
    two = replace(group, names=("reward", "judge"), rewards=np.array([[0.0, 5.0], [1.0, 2.0]]), weights=(1.0, 0.0))
    assert [row["chosen"] for row in preference_rows([two])] == ["completion 1"]
    assert [row["chosen"] for row in preference_rows([two], "judge")] == ["completion 0"]
    assert preference_rows([replace(two, rewards=np.array([[0.0, np.nan], [1.0, np.nan]]))], "judge") == []
    with pytest.raises(ConfigError, match="no reward is called 'jury'; there are: reward, judge"):
        preference_rows([two], "jury")


def test_older_pairs_of_a_file_need_no_arguments_of_the_task(tmp_path: Path) -> None:
    pairs = [{"prompt": f"what is {n}?", "chosen": "yes", "rejected": "no"} for n in range(9)]
    (tmp_path / "old.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    recipe = make_recipe(
        {
            "objective": "reward", "steps": 1, "batch_size": 4,
            "reward_model": {"replay": {"path": str(tmp_path / "old.jsonl"), "share": 0.25}},
            "model": {"scratch": {"hidden": 16, "layers": 1, "heads": 2, "tokenizer": "bytes"}},
            "data": {"task": "preferences", "limit": 12, "eval_limit": 4, "task_args": {"correctness": 0.6}},
        }
    )  # fmt: skip
    _, blueprint = modelled(recipe)
    assert len(OBJECTIVES["reward"].load(recipe, blueprint, None).train) == 16


def test_replay_is_the_share_that_was_asked_for() -> None:
    new, old = random_pairs(18), random_pairs(50, seed=1)
    mixed = with_replay(new, old, 0.1, seed=0)
    assert mixed[:18] == new and len(mixed) == 20 and all(pair in old for pair in mixed[18:])
    assert len({id(pair) for pair in mixed}) == 20


def test_the_table_has_a_row_for_every_objective() -> None:
    assert tuple(OBJECTIVES) == DATASET


def test_a_pair_is_never_cut_and_its_prompt_is_computed_once(
    scorer: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, pairs = scorer(dtype=torch.float32), random_pairs()
    objective = reward_objective(RewardModelSettings(pooling="last"))
    sizes: list[int] = []
    hidden = passes.hidden

    def counted(policy: Policy, tokens: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(tokens.numel())
        return hidden(policy, tokens, *rest)

    monkeypatch.setattr(passes, "hidden", counted)
    assess(policy, objective.loss, objective.samples(pairs), max_tokens_per_microbatch=1, whole_groups=True)
    expected = [p.prompt.size - 1 + p.chosen.size + p.rejected.size + 2 for p in pairs]
    assert sorted(sizes) == sorted(expected)


@pytest.mark.parametrize("objective", ["reward", "dpo", "prm"])
def test_a_process_without_work_adds_nothing(
    scorer: Callable[..., Policy], tiny_policy: Callable[..., Policy], objective: str
) -> None:
    """Sharded processes take the same number of micro-batches; one that has no pair left takes a position of filler."""
    pairs = random_pairs(1)
    solution = Solution(id="0", prompt=np.array([7]), completion=np.array([9, 1]), ends=np.array([1]), labels=np.array([1.0]))
    causal = tiny_policy()
    kinds = {
        "reward": (scorer(dtype=torch.float32), reward_objective(RewardModelSettings(lm_coefficient=0.5)), pairs),
        "dpo": (causal, dpo_objective(PairSettings()), anchored(causal, pairs, max_tokens_per_microbatch=50)),
        "prm": (scorer("steps", torch.float32), PROCESS, [solution]),
    }
    policy, found, rows = kinds[objective]
    (batch,) = pack(found.samples(rows), 100, world=World(1, 2), even=True, whole_groups=True)
    assert batch.layout.segments == 0
    value, seen_M = found.loss(BatchPass(policy, batch))
    value.backward()
    assert value.item() == 0.0 and seen_M.shape == (0,)
