"""Model rewards: the ids that are scored, step rewards, texts for foreign tokenizers, memory, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import encode_prompts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification

from groupwise.config.settings import ModelSettings, OptimizerSettings, RewardModelSettings, RewardSettings
from groupwise.data.encoding import Pair
from groupwise.data.sources import SourceRows
from groupwise.data.templates import Template
from groupwise.data.tokenizers import make_tokenizer
from groupwise.errors import ConfigError, RewardError
from groupwise.models import passes
from groupwise.models.policy import Policy
from groupwise.models.reward_head import Answer, add_head, load_scorer, score_tokens, wrap_scorer
from groupwise.models.saving import save
from groupwise.models.sharded import frozen_copy
from groupwise.records import Finish, Prompt, Rollout, Sampling
from groupwise.rewards.compose import build_rewards
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import update
from groupwise.training.preferences import reward_objective


@pytest.fixture
def folder(tiny_policy: Callable[..., Policy], tmp_path: Path) -> Callable[..., str]:
    """`folder(pooling)`: the folder of a random reward model."""

    def make(pooling: str = "last", name: str = "reward", **options: Any) -> str:
        causal = tiny_policy(**options)
        scorer = wrap_scorer(add_head(causal.model, causal.tokenizer, causal.eos_ids, pooling, seed=3), causal.tokenizer)  # type: ignore[arg-type]
        save(scorer, tmp_path / name)
        return str(tmp_path / name)

    return make


def group_of(policy: Policy, *texts: str, prompt: str = "12+3=", id: str = "0/0", truncated: tuple[int, ...] = ()) -> list[Rollout]:
    """A group of completions, EOS at the end of those that are not truncated."""
    question = Prompt(id=id, tokens=encode(policy, prompt), text=prompt, row={"prompt": prompt})
    rollouts = []
    for index, text in enumerate(texts):
        ids = encode(policy, text)
        ids = ids if index in truncated else np.append(ids, policy.eos_ids[0])
        finish = Finish.LENGTH if index in truncated else Finish.EOS
        rollouts.append(
            Rollout(
                prompt=question, index=index, tokens=ids, behavior_logp=np.zeros(ids.size), finish=finish,
                eos_ids=policy.eos_ids, sampling=Sampling(), text=text,
            )
        )  # fmt: skip
    return rollouts


def encode(policy: Policy, text: str) -> np.ndarray:
    return np.array(policy.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def build(policy: Policy, path: str, **args: Any) -> Any:
    return build_rewards([RewardSettings(function="model", args={"path": path, **args})], columns=[], tokenizer=policy.tokenizer)


def alone(path: str, rollout: Rollout) -> float:
    """transformers' own score of one completion."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return model(torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]))[None]).logits.item()


def test_the_ids_that_are_scored_are_the_ids_that_were_trained_on(
    tiny_policy: Callable[..., Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair, and a policy that samples exactly its two completions: the backbone reads the same streams both times."""
    policy = tiny_policy()
    chosen, rejected = group_of(policy, "15", "1 5.")
    pair = Pair(id="0", prompt=chosen.prompt.tokens, chosen=chosen.tokens, rejected=rejected.tokens)
    scorer = wrap_scorer(add_head(frozen_copy(policy).model, policy.tokenizer, policy.eos_ids, "mean", seed=3), policy.tokenizer)
    scorer.model.requires_grad_(True)
    objective = reward_objective(RewardModelSettings(pooling="mean"))
    read: list[tuple[list[int], list[int]]] = []
    original = passes.hidden

    def hidden(policy: Policy, tokens: torch.Tensor, position: torch.Tensor, *further: Any) -> torch.Tensor:
        read.append((tokens.tolist(), position.tolist()))
        return original(policy, tokens, position, *further)

    monkeypatch.setattr(passes, "hidden", hidden)
    optimizer = Optimizer(scorer.model, OptimizerSettings(lr=1e-3), 1)
    update(scorer, objective.loss, objective.samples([pair]), optimizer, max_tokens_per_microbatch=100, whole_groups=True)
    save(scorer, tmp_path)
    rewards = build(policy, str(tmp_path))
    read_in_training, read[:] = list(read), []
    rewards.score([[chosen, rejected]])
    assert read[-1:] == read_in_training  # what stands before is the probe of the loaded model
    assert read[-1][0].count(policy.eos_ids[0]) == 2


def test_scores_are_transformers_own(tiny_policy: Callable[..., Policy], folder: Callable[..., str]) -> None:
    policy, path = tiny_policy(), folder()
    groups = [group_of(policy, "15", "1", "7+8=15."), group_of(policy, "4", "44", prompt="2+2=", id="0/1", truncated=(1,))]
    scored = build(policy, path, tokens_per_microbatch=14).score(groups)
    expected = [[alone(path, rollout) for rollout in group] for group in groups]
    for group, wanted in zip(scored, expected, strict=True):
        np.testing.assert_allclose(group.reward, wanted, atol=1e-6)


def test_several_reward_models_and_functions_combine(tiny_policy: Callable[..., Policy], folder: Callable[..., str]) -> None:
    policy = tiny_policy()
    paths = [folder(name="a", seed=1), folder(name="b", seed=2)]
    settings = [
        RewardSettings(function="model", name=path[-1], weight=weight, args={"path": path})
        for path, weight in zip(paths, (2.0, -0.5), strict=True)
    ]
    settings.append(RewardSettings(function="soft_overlong", args={"max_tokens": 4, "cache": 4}))
    rewards = build_rewards(settings, columns=[], tokenizer=policy.tokenizer)
    group = group_of(policy, "15", "1")
    (scored,) = rewards.score([group])
    expected = [2 * alone(paths[0], r) - 0.5 * alone(paths[1], r) - len(r) / 4 for r in group]
    np.testing.assert_allclose(scored.reward, expected, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_step_rewards_add_up_to_the_models_score(
    tiny_policy: Callable[..., Policy], folder: Callable[..., str], pooling: str
) -> None:
    policy, path = tiny_policy(), folder(pooling)
    group = group_of(policy, "1+2=3\n3+4=7\n7", "15", "1\n\n2\n")
    (whole,), (steps,) = build(policy, path).score([group]), build(policy, path, steps="newline").score([group])
    np.testing.assert_allclose(steps.reward, whole.reward, atol=1e-6)
    ends = [np.flatnonzero(~np.isnan(signal)).tolist() for signal in steps.signals["process"]]
    assert ends == [[5, 11, 13], [2], [1, 4, 5]]
    assert "process" not in whole.signals


def test_a_process_reward_model_gives_probabilities_at_step_ends(
    tiny_policy: Callable[..., Policy], folder: Callable[..., str]
) -> None:
    policy, path = tiny_policy(), folder("steps")
    (scored,) = build(policy, path, steps="newline").score([group_of(policy, "1+2=3\n7", "15")])
    for signal in scored.signals["process"]:
        known = signal[~np.isnan(signal)]
        assert ((known > 0) & (known < 1)).all()
    with pytest.raises(ConfigError, match="say how completions are cut"):
        build(policy, path)


def test_another_tokenizer_reads_the_text(tiny_policy: Callable[..., Policy], folder: Callable[..., str]) -> None:
    """The reward model's ids are its own encoding of prompt and completion, EOS included unless the completion was cut off."""
    policy = tiny_policy()
    tokenizer = make_tokenizer("bytes")
    tokenizer.chat_template = None
    path = folder(tokenizer=tokenizer)
    group = group_of(policy, "15", "1", truncated=(1,))
    (scored,) = build(policy, path).score([group])
    eos = tokenizer.eos_token_id
    texts = [tokenizer("12+3=15")["input_ids"] + [eos], tokenizer("12+3=1")["input_ids"]]
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    expected = [model(torch.tensor([ids])).logits.item() for ids in texts]
    np.testing.assert_allclose(scored.reward, expected, atol=1e-6)


def test_another_tokenizer_with_a_chat_template(tiny_policy: Callable[..., Policy], folder: Callable[..., str]) -> None:
    policy, tokenizer = tiny_policy(), make_tokenizer("bytes")
    path = folder(tokenizer=tokenizer)
    (scored,) = build(policy, path).score([group_of(policy, "15")])
    ids = tokenizer("<|user|>12+3=<|end|><|assistant|>15<|end|>")["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    assert scored.reward[0] == pytest.approx(model(torch.tensor([ids])).logits.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("row", "wording"),
    [
        ({"prompt": "12+3="}, {}),
        ({"prompt": [{"role": "user", "content": "12+3="}]}, {}),
        ({"messages": [{"role": "user", "content": "12+3="}, {"role": "assistant", "content": "?"}]}, {}),
        ({"a": 12, "b": 3}, {"format": "{a}+{b}="}),
    ],
    ids=["text", "prompt", "messages", "template"],
)
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_another_tokenizer_reads_the_policys_messages_without_its_chat_template(
    tiny_policy: Callable[..., Policy], folder: Callable[..., str], row: dict[str, Any], wording: dict[str, Any], chat: bool
) -> None:
    """In whatever form the row has them, the recipe's system message included."""
    policy, tokenizer = tiny_policy(), make_tokenizer("bytes")
    tokenizer.chat_template = "{% for m in messages %}({{ m.role }}) {{ m.content }}\n{% endfor %}" if chat else None
    path = folder(tokenizer=tokenizer)
    template = Template(tokenizer=policy.tokenizer, chat=True, system="add", **wording)
    (prompt,), _ = encode_prompts(SourceRows("rows", [row]), template, max_tokens=60)
    rollouts = [replace(rollout, prompt=prompt) for rollout in group_of(policy, "15")]
    (scored,) = build(policy, path).score([rollouts])
    read = "(system) add\n(user) 12+3=\n(assistant) 15\n" if chat else "add\n12+3=15"
    ids = tokenizer(read)["input_ids"] + [tokenizer.eos_token_id]
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    assert scored.reward[0] == pytest.approx(model(torch.tensor([ids])).logits.item(), abs=1e-6)


def test_what_cannot_be_scored_is_refused(tiny_policy: Callable[..., Policy], folder: Callable[..., str], tmp_path: Path) -> None:
    policy = tiny_policy()
    path = folder()
    with pytest.raises(ConfigError, match=r"needs args: \{path"):
        build_rewards([RewardSettings(function="model")], columns=[], tokenizer=policy.tokenizer)
    with pytest.raises(ConfigError, match="no argument 'pth'"):
        build(policy, path, pth=1)
    with pytest.raises(ConfigError, match="has no parts"):
        build(policy, path, steps="newline")
    with pytest.raises(ConfigError, match="no such folder"):
        build(policy, str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="another tokenizer"):
        build(policy, folder("mean", name="other", tokenizer=make_tokenizer("bytes")), steps="newline")
    with pytest.raises(RewardError, match=r"reads 96 tokens.*5 \+ 101"):
        build(policy, path).score([group_of(policy, "1" * 100)])
    settings = RewardSettings(function="model", args={"path": path}, timeout=1.0)
    with pytest.raises(ConfigError, match="leave timeout out"):
        build_rewards([settings], columns=[], tokenizer=policy.tokenizer)


def test_a_score_that_is_not_finite_ends_the_run(
    tiny_policy: Callable[..., Policy], folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, path = tiny_policy(), folder()
    rewards, group = build(policy, path), group_of(policy, "15")
    rewards.score([group])
    monkeypatch.setattr(
        "groupwise.models.reward_head.score_tokens",
        lambda policy, answers, max_tokens_per_microbatch: [np.full(3, np.nan)] * len(answers),
    )
    with pytest.raises(RewardError, match="nan for completion 0 of row 0 "):
        rewards.score([group])


class _Peak(TorchDispatchMode):
    """Largest number of bytes of tensors made inside that were alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak = 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


@contextmanager
def peak() -> Iterator[_Peak]:
    with _Peak() as mode:
        yield mode


@pytest.mark.slow
def test_peak_memory_is_that_of_one_micro_batch(tiny_policy: Callable[..., Policy], folder: Callable[..., str]) -> None:
    """64 prompts x 8 completions take what one full micro-batch takes, and every score equals the one alone."""
    policy, path = tiny_policy(), folder(hidden=256, layers=1)
    rng = np.random.default_rng(0)
    texts = [["".join(rng.choice(list("0123456789+="), size=rng.integers(1, 12))) for _ in range(8)] for _ in range(64)]
    groups = [group_of(policy, *row, prompt=f"{i}+{i * 7}=", id=f"0/{i}") for i, row in enumerate(texts)]
    max_tokens_per_microbatch = 1024
    rewards = build(policy, path, tokens_per_microbatch=max_tokens_per_microbatch)
    rewards.score(groups[:1])  # loads the model
    positions = [sum(len(rollout) + 1 for rollout in group) + group[0].prompt.tokens.size - 1 for group in groups]
    count = int(np.searchsorted(np.cumsum(positions), max_tokens_per_microbatch))  # groups that just fit into one micro-batch
    assert sum(positions[:count]) > 0.85 * max_tokens_per_microbatch
    with peak() as planned:
        rewards.score(groups[:count])
    with peak() as whole:
        scored = rewards.score(groups)
    assert whole.peak < 1.1 * planned.peak * max_tokens_per_microbatch / sum(positions[:count])
    for group, result in zip(groups[::16], scored[::16], strict=True):
        (single,) = rewards.score([group[:1]])
        assert result.reward[0] == pytest.approx(single.reward[0], abs=1e-6)


@pytest.mark.slow
def test_trl_takes_it_as_a_reward(tiny_policy: Callable[..., Policy], folder: Callable[..., str], tmp_path: Path) -> None:
    """A step of TRL's GRPOTrainer with our folder as `reward_funcs`: the logits it trains on are our scores of those ids."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    save(tiny_policy(), tmp_path / "policy")
    path = folder()
    scorer = load_scorer(ModelSettings(path=path))
    trainer = trl.GRPOTrainer(
        model=str(tmp_path / "policy"),
        reward_funcs=path,
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "trl"), per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
            max_steps=1, use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "12+3="}, {"prompt": "4+4="}]),
    )  # fmt: skip
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    trainer.reward_funcs[0].register_forward_hook(
        lambda _model, _args, kwargs, out: seen.append((kwargs["input_ids"], kwargs["attention_mask"], out.logits[:, 0])),
        with_kwargs=True,
    )
    trainer.train()
    assert seen
    for ids, mask, logits in seen:
        rows = [row[keep.bool()].numpy() for row, keep in zip(ids, mask, strict=True)]
        ours = score_tokens(scorer, [Answer(str(i), row[:1], row[1:]) for i, row in enumerate(rows)], max_tokens_per_microbatch=100)
        np.testing.assert_allclose([values[-1] for values in ours], logits.detach().numpy(), atol=1e-5)
