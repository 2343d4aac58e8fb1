"""What must not change an update does not change it: micro-batches, packing, order, sharing, filler, skipping, recomputation.

Every preset, a rotary model and one with learned positions, lengths from 1 to the longest, empty and truncated completions,
constant groups and unscorable rows.  Gradients are compared in float64 to 1e-10 and in float32 to 1e-6, relative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.parts import describe
from groupwise.algorithms.table import ALGORITHMS
from groupwise.config.resolve import resolve
from groupwise.config.settings import CriticSettings, GroupSettings, OptimizerSettings
from groupwise.data.packing import pack
from groupwise.models.backbone import checkpointing
from groupwise.models.passes import BatchPass
from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.records import RolloutGroup, Sample
from groupwise.training.critics import Critic
from groupwise.training.loss import Loss
from groupwise.training.samples import weigh
from groupwise.training.signals import add_signals
from groupwise.training.teachers import Teacher

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


@pytest.fixture(scope="module")
def policies(tiny_policy: Callable) -> dict[tuple[str, torch.dtype], Policy]:
    return {(family, dtype): tiny_policy(family, dtype=dtype, scale=1.0) for family in ("gpt2", "llama") for dtype in TOLERANCE}


@pytest.fixture
def groups(scored_group: Callable) -> list[RolloutGroup]:
    """Five groups: ragged, with an empty completion, constant, with truncated and unscorable rows, a prompt of one token."""
    eos = 2
    return [
        scored_group([1.0, 0.0, 0.5, 0.0], [1, 12, 5, 3], id="0/0", seed=1, eos=eos),
        scored_group([0.0, 1.0, 1.0, 0.0], [7, 0, 2, 9], id="0/1", seed=2),
        scored_group([1.0, 1.0, 1.0, 1.0], [4, 6, 2, 8], id="0/2", seed=3, eos=eos),
        scored_group([1.0, 0.0, None, 0.0], [12, 12, 3, 5], id="0/3", seed=4, eos=eos, truncated=(0, 1)),
        scored_group([0.3, -0.2, 0.1, 0.0], [3, 1, 1, 10], id="0/4", seed=5, eos=eos, prompt=1),
    ]


def gradient(policy: Policy, algorithm: Algorithm, samples: Sequence[Sample], **options: object) -> dict[str, Tensor]:
    policy.model.zero_grad()
    tokens = float(sum(np.count_nonzero(sample.weight) for sample in samples))
    settings = {"max_tokens_per_microbatch": 10_000, "share": True} | options
    critic = critic_on(policy, algorithm)
    if critic is not None:  # it has moved since it said what the samples hold
        with torch.no_grad():
            critic.head.bias.add_(0.04)
    taught = {"teacher": teacher_of(policy, algorithm), "samples": samples}
    for batch in pack(samples, dtype=policy.dtype, **settings):  # type: ignore[arg-type]
        Loss(algorithm=algorithm, entropy_tokens=tokens, critic=critic, **taught)(BatchPass(policy, batch))[0].backward()
    heads = {} if critic is None else {"critic.weight": critic.head.weight.grad.clone()}  # no gradient moves its bias
    return heads | {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """The Euclidean norm of the difference, relative to the gradient's own."""
    difference = sum(float((found[name] - expected[name]).square().sum()) for name in expected) ** 0.5
    norm = sum(float(gradient.square().sum()) for gradient in expected.values()) ** 0.5
    assert norm > 0
    assert difference / norm < tolerance, difference / norm


def critic_on(policy: Policy, algorithm: Algorithm) -> Critic | None:
    """A value head that says something, where the algorithm asks for one."""
    if not algorithm.needs.critic:
        return None
    critic = Critic.on(policy, CriticSettings(), OptimizerSettings(), 1)
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.3, 0.5, critic.head.weight.shape[1])[None])
        critic.head.bias.fill_(0.1)
    return critic


def teacher_of(policy: Policy, algorithm: Algorithm) -> Teacher | None:
    """Other weights of the same model, where the algorithm asks for a teacher."""
    if not algorithm.needs.teacher:
        return None
    other = frozen_copy(policy)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(2.0)
    return Teacher(policy=other)


def prepare(policy: Policy, groups: list[RolloutGroup], algorithm: Algorithm) -> list[Sample]:
    critic = critic_on(policy, algorithm)
    reference = frozen_copy(policy) if algorithm.needs.reference else None
    if reference is not None:
        with torch.no_grad():
            for parameter in reference.model.parameters():
                parameter.mul_(0.9)
    teacher = teacher_of(policy, algorithm)
    groups = add_signals(groups, algorithm, reference=reference, teacher=teacher, critic=critic, max_tokens_per_microbatch=10_000)
    return weigh(groups, algorithm.credit(groups), algorithm)


VARIANTS: dict[str, GroupSettings] = {
    "plain": GroupSettings(group_size=4, dead_groups="exact"),
    "kl": GroupSettings(group_size=4, beta=0.04, dead_groups="exact"),
    "entropy": GroupSettings(group_size=4, entropy_bonus=0.01, dead_groups="exact"),
}


@pytest.mark.parametrize(
    ("preset", "variant", "family", "dtype"),
    [  # every preset with every variant, with both models and in both types
        pytest.param(
            preset,
            list(VARIANTS)[(place + turn) % len(VARIANTS)],
            family,
            dtype,
            marks=() if (family, dtype) == ("llama", torch.float64) else pytest.mark.slow,
        )
        for place, preset in enumerate(ALGORITHMS)
        for turn, (family, dtype) in enumerate(
            [
                ("llama", torch.float64),
                ("gpt2", torch.float32),
                ("gpt2", torch.float64) if place % 2 else ("llama", torch.float32),
            ]
        )
    ],
)
def test_micro_batches_order_and_layout_do_not_change_the_gradient(
    preset: str, variant: str, family: str, dtype: torch.dtype, policies: dict, groups: list[RolloutGroup]
) -> None:
    """P1, P2, P3: micro-batch size; packing order; shared or repeated prompts; filler."""
    policy = policies[family, dtype]
    algorithm = resolve(preset, VARIANTS[variant], max_new_tokens=12)
    samples = prepare(policy, groups, algorithm)
    expected = gradient(policy, algorithm, samples)
    rng = np.random.default_rng(0)
    shuffled = [samples[i] for i in rng.permutation(len(samples))]
    for found in (
        gradient(policy, algorithm, samples, max_tokens_per_microbatch=1),
        gradient(policy, algorithm, samples, max_tokens_per_microbatch=37),
        gradient(policy, algorithm, shuffled, max_tokens_per_microbatch=50),
        gradient(policy, algorithm, samples, share=False),
        gradient(policy, algorithm, samples, fill=True),
    ):
        assert_same(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("preset", [name for name, row in ALGORITHMS.items() if row.skips_dead])
def test_skipping_samples_without_advantage_changes_no_gradient(preset: str, policies: dict, groups: list[RolloutGroup]) -> None:
    """P61: the constant group costs nothing and stays in the denominators."""
    policy = policies["llama", torch.float64]
    algorithm = resolve(preset, VARIANTS["plain"], max_new_tokens=12)
    samples = prepare(policy, groups, algorithm)
    live = [sample for sample in samples if sample.advantage.any()]
    if algorithm.needs.reward and "whitened" not in describe(algorithm.credit):  # over the batch: no advantage is 0
        assert len(live) < len(samples)
    assert algorithm.skips_dead
    assert_same(gradient(policy, algorithm, live), gradient(policy, algorithm, samples), 1e-12)


@pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo", "rloo", "ppo", "minillm"])
def test_gradient_checkpointing_changes_nothing(preset: str, policies: dict, groups: list[RolloutGroup]) -> None:
    policy = policies["gpt2", torch.float64]
    algorithm = resolve(preset, VARIANTS["kl"], max_new_tokens=12)
    samples = prepare(policy, groups, algorithm)
    expected = gradient(policy, algorithm, samples)
    with checkpointing(policy, True):
        found = gradient(policy, algorithm, samples)
    assert_same(found, expected, 1e-12)


@pytest.mark.parametrize("preset", ["dapo", "cispo", "vespo", "bnpo"])
def test_p04_a_masked_row_is_a_removed_row_for_token_normalised_losses(preset: str, policies: dict, scored_group: Callable) -> None:
    policy = policies["llama", torch.float64]
    algorithm = replace(resolve(preset, VARIANTS["plain"], max_new_tokens=12), truncated="mask")
    full = scored_group([1.0, 0.0, 0.5, 0.2], [5, 12, 7, 3], eos=2, truncated=(1,), seed=9)
    advantages = algorithm.credit([full])
    masked = weigh([full], advantages, algorithm)
    kept = [i for i in range(4) if i != 1]
    smaller = RolloutGroup(
        rollouts=tuple(full.rollouts[i] for i in kept), names=full.names, rewards=full.rewards[kept], reward=full.reward[kept]
    )
    removed = weigh([smaller], [[advantages[0][i] for i in kept]], algorithm)
    assert_same(gradient(policy, algorithm, masked), gradient(policy, algorithm, removed), 1e-12)


def test_a_truncated_completion_keeps_its_attention_when_it_leaves_the_loss(policies: dict, groups: list[RolloutGroup]) -> None:
    """Masking is a weight of 0: what remains is scored exactly as before."""
    policy = policies["llama", torch.float64]
    keep, mask = (resolve("grpo", GroupSettings(group_size=4, truncated=how), max_new_tokens=12) for how in ("keep", "mask"))
    kept, masked = prepare(policy, groups, keep), prepare(policy, groups, mask)
    assert len(kept) - len(masked) == 2
    weights = {id(sample.completion): sample.weight for sample in kept}
    assert all(np.array_equal(sample.weight, weights[id(sample.completion)]) for sample in masked)


def test_p17_the_ids_of_pad_and_eos_are_irrelevant(tiny_policy: Callable, groups: list[RolloutGroup]) -> None:
    """pad == eos, pad elsewhere, no pad at all: the same gradient, bit for bit."""
    results = []
    for pad in (None, "eos", "other"):
        policy = tiny_policy("llama", dtype=torch.float64, scale=3.0)
        tokenizer = policy.tokenizer
        tokenizer.pad_token = {None: None, "eos": tokenizer.eos_token, "other": tokenizer.convert_ids_to_tokens(7)}[pad]
        algorithm = resolve("grpo", VARIANTS["plain"], max_new_tokens=12)
        results.append(gradient(policy, algorithm, prepare(policy, groups, algorithm)))
    for found in results[1:]:
        assert all(torch.equal(found[name], results[0][name]) for name in found)
