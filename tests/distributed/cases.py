"""What the processes of these tests do.  Every function runs on all ranks at once and returns host values."""

from __future__ import annotations

import errno
import importlib
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hybrids import HYBRIDS, in_64_bits, ragged_texts, small_model
from rule_rewards import RuleRewards
from sample_texts import TOKENIZER
from scripted_vllm import Process
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    PretrainedConfig,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.distributed.expert_parallel import AllToAllEP

from groupwise.config.recipes import load_recipe
from groupwise.config.resolve import resolve
from groupwise.config.settings import (
    CriticSettings,
    EngineSettings,
    GroupSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    Recipe,
    RolloutSettings,
    ScratchSettings,
)
from groupwise.data.order import Order
from groupwise.data.tokenizers import make_tokenizer
from groupwise.distributed import comm, fsdp, layout, sharded_checkpoint, ulysses
from groupwise.errors import ConfigError, StorageError
from groupwise.models import backbone, saving, sharded
from groupwise.models.attention import PackedAttention
from groupwise.models.backbone import checkpointing
from groupwise.models.loading import make_policy, read_blueprint
from groupwise.models.lora import adapt
from groupwise.models.passes import reshard
from groupwise.models.policy import Policy, without_adapter
from groupwise.models.reward_head import add_head, wrap_scorer
from groupwise.models.scratch import scratch_model
from groupwise.models.sharded import frozen_copy, gathered, in_context, own_parts, shard
from groupwise.models.streaming import CheckpointReader
from groupwise.ops.linear_cross_entropy import head_logits
from groupwise.ops.query import Query
from groupwise.ops.recurrence import Recurrence, Segments
from groupwise.proof.passes import model_pass, run_pass
from groupwise.proof.prove import prove
from groupwise.records import Layout, Prompt, Rollout, RolloutGroup, Sampling
from groupwise.rollout.vllm.engine import VllmEngine
from groupwise.rollout.vllm.plugin.groupwise_versions import Mirror, VersionSource
from groupwise.rollout.vllm.publisher import Publisher
from groupwise.runs import checkpoint
from groupwise.runs.checkpoint import reader
from groupwise.runs.folder import choose_folder
from groupwise.runs.job import make_engine
from groupwise.runs.run import Run, train
from groupwise.runs.run_models import hold
from groupwise.training.critics import Critic
from groupwise.training.groups import SampledRollouts
from groupwise.training.objectives import OBJECTIVES, language_model
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.teachers import Teacher
from groupwise.utils import files

LONGEST = 12


def make(family: str, dtype: str, seed: int = 0, attention: str = "shared", hidden: int = 32) -> Policy:
    """A random model that is sharper than an initial one; in float64 with norms that are float64 too.

    family: also `balanced FAMILY`, a mixture whose experts are balanced by a loss.
    """
    tokenizer = make_tokenizer("arithmetic")
    balanced = family.startswith("balanced ")
    family = family.removeprefix("balanced ")
    model: Any
    if family == "qwen3_moe":
        model = mixture(tokenizer, seed)
    else:
        model = scratch_model(
            ScratchSettings(family=family, hidden=hidden, layers=2, heads=4, context=96),  # type: ignore[arg-type]
            vocabulary=len(tokenizer),
            eos_ids=(tokenizer.eos_token_id,),  # type: ignore[arg-type]
            pad_id=tokenizer.pad_token_id,  # type: ignore[arg-type]
            bos_id=tokenizer.bos_token_id,  # type: ignore[arg-type]
            seed=seed,
            kv_heads=None if family == "gpt2" else 2,
        )
    if balanced:
        model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5
    if dtype == "float64":
        model = model.to(torch.float64)
        for module in model.modules():
            for name, child in module.named_children():
                if type(child).__name__.endswith("RMSNorm") and not isinstance(child, nn.RMSNorm):
                    norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                    norm.weight = child.weight
                    setattr(module, name, norm)
    if dtype == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    precision = "autocast" if dtype == "autocast" else "float32"
    return make_policy(model, tokenizer, ModelSettings(dtype=precision, attention=attention))  # type: ignore[arg-type]


def mixture(tokenizer: Any, seed: int) -> Any:
    """A small Qwen3-MoE of four experts."""
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        mlp_only_layers=[], max_position_embeddings=96, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def parallel_of(mode: str | dict[str, Any]) -> ParallelSettings:
    """A name of `parallel`, or its keys."""
    return ParallelSettings(**({"name": mode} if isinstance(mode, str) else mode))


def spread(policy: Policy, mode: str | dict[str, Any]) -> Policy:
    """The policy as these processes hold it."""
    parallel = layout.decided(parallel_of(mode), 0, comm.world().size)
    layout.use(parallel, policy.device)
    if layout.spreads(parallel) and comm.world().size > 1:
        policy = shard(policy, parallel, policy.device)
    return in_context(policy, parallel, policy.device)


def prompts(count: int = 13) -> list[Prompt]:
    """Ragged, the first of a single token."""
    rng = np.random.default_rng(0)
    sizes = [1, *rng.integers(2, 14, size=count - 1)]
    return [Prompt(id=str(i), tokens=rng.integers(5, 60, size=int(size)), text=str(i)) for i, size in enumerate(sizes)]


def reward_of(rollout: Rollout) -> float | None:
    """By what was sampled: every fourth prompt gives a group of equal rewards, every seventh completion or so is unscorable."""
    if int(rollout.prompt.id) % 4 == 0:
        return 1.0
    word = zlib.crc32(rollout.tokens.tobytes())
    return None if word % 7 == 0 else word % 5 / 4


def online(
    objective: str = "grpo",
    mode: str | dict[str, Any] = "ddp",
    family: str = "llama",
    dtype: str = "float64",
    steps: int = 10,
    recompute: bool = False,
    max_tokens_per_microbatch: int = 150,
    engine: str = "native",
    lora: bool = False,
    dropout: float = 0.0,
    critic: str = "head",
    **group: Any,
) -> dict[str, Any]:
    """Train and return, on every rank, each step's metrics and gradient and the last weights."""
    settings = GroupSettings(**{"prompts_per_step": 5, "group_size": 4} | group)
    algorithm = resolve(objective, settings, LONGEST)
    policy = make(family, dtype)
    if lora:
        options = LoraSettings(rank=4)
        if dropout:
            options = LoraSettings(rank=4, dropout=dropout, modules_to_save=("lm_head", "embed_tokens"))
        policy = spread(adapt(policy, options, base=""), mode)
        reference = without_adapter(policy)
    else:
        reference = make(family, dtype, seed=1) if algorithm.needs.reference else None
        if reference is not None:
            reference.model.requires_grad_(False)
            reference = spread(reference, mode)
        policy = spread(policy, mode)
    updates = steps * settings.updates_per_rollout * settings.minibatches
    optimizer = Optimizer(policy.model, OptimizerSettings(lr=1e-3, clip_norm=0.5, weight_decay=0.1), updates)
    teacher = Teacher(policy=make(family, dtype, seed=3)) if algorithm.needs.teacher else None
    settings_of_rollouts = RolloutSettings(engine=EngineSettings(name=engine), max_rows=16)
    sampler = make_engine(policy, settings_of_rollouts)
    judge = critic_of(critic, policy, family, dtype, mode, updates) if algorithm.needs.critic else None
    rows = prompts()
    order = Order(len(rows), seed=0)
    gradients = watch(optimizer)
    found = [
        {
            **step.metrics,
            "tokens": tokens_of(step.groups),
            "unscorable": sum(int(np.isnan(group.reward).sum()) for group in step.groups),
            "alike": sum(bool(np.ptp(group.reward) == 0) for group in step.groups),
        }
        for step in train_online(
            policy,
            algorithm,
            SampledRollouts(
                algorithm=algorithm,
                engine=sampler,
                rewards=RuleRewards(reward_of, ("judge",)),
                draw=lambda k: [rename(rows[row], epoch) for epoch, row in order.take(k)],
                sampling=Sampling(temperature=0.9, max_new_tokens=LONGEST),
                steps=steps,
                seed=7,
                group=settings,
            ),
            optimizer,
            group=settings,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            reference=reference,
            critic=judge,
            teacher=teacher,
            checkpointing=recompute,
        )
    ]
    kept = weights(policy)
    if judge is not None:
        own = judge.head.named_parameters() if judge.shared else weights(judge.policy).items()
        kept |= {f"critic.{name}": np.array(fsdp.whole(torch.as_tensor(p).detach()).double()) for name, p in own}
    return {"steps": found, "gradients": gradients, "weights": kept}


def critic_of(kind: str, policy: Policy, family: str, dtype: str, mode: str | dict[str, Any], updates: int) -> Critic:
    """A head on the policy's backbone, or a backbone of its own, held as the policy is."""
    settings, optimizer = CriticSettings(lr=1e-3), OptimizerSettings(clip_norm=0.5)
    if kind == "head":
        return Critic.on(policy, settings, optimizer, updates)
    causal = make(family, dtype, seed=2)
    model = add_head(causal.model, causal.tokenizer, causal.eos_ids, "last", 0)
    return Critic.of(spread(wrap_scorer(model, causal.tokenizer), mode), settings, optimizer, updates)


def rename(prompt: Prompt, epoch: int) -> Prompt:
    return Prompt(id=str(int(prompt.id) + 100 * epoch), tokens=prompt.tokens, text=prompt.text)


def tokens_of(groups: Sequence[RolloutGroup]) -> list[list[int]]:
    return [rollout.tokens.tolist() for group in groups for rollout in group.rollouts]


def watch(optimizer: Optimizer) -> list[np.ndarray]:
    """The gradient of every step that is taken, whole, as the optimizer uses it."""
    seen: list[np.ndarray] = []
    take = optimizer.adamw.step

    def step() -> None:
        parts = [fsdp.whole(torch.zeros_like(m) if m.grad is None else m.grad) for m in optimizer.masters]
        seen.append(torch.cat([part.flatten().double() for part in parts]).numpy())
        take()

    optimizer.adamw.step = step  # type: ignore[method-assign,assignment]
    return seen


def weights(policy: Policy) -> dict[str, np.ndarray]:
    with gathered(policy) as plain:
        return {name: p.detach().double().numpy().copy() for name, p in plain.model.named_parameters()}


def not_finite(mode: str) -> dict[str, Any]:
    """Rank 1's share of the gradient is NaN at the second of three steps."""
    policy = spread(make("llama", "float32"), mode)
    optimizer = Optimizer(policy.model, OptimizerSettings(lr=1e-2), 3)
    taken, before = [], weights(policy)
    states = []
    for number in range(3):
        hidden = backbone.hidden(policy, torch.tensor([5, 6, 7]), torch.arange(3), attend_nothing)
        poison = float("nan") if number == 1 and comm.world().rank == 1 else 1.0
        (hidden.sum() * poison).backward()
        reshard(policy)
        taken.append(optimizer.step().skipped)
        states.append(weights(policy))
    same = [all(np.array_equal(a[n], b[n]) for n in a) for a, b in zip([before, *states], states, strict=False)]
    return {"skipped": taken, "unchanged": same, "nonfinite": optimizer.nonfinite}


def attend_nothing(query: Query) -> torch.Tensor:
    return query.query_THD + 0 * query.key_TKD.sum() + 0 * query.value_TKE.sum()


def whole_run(path: str, overrides: Sequence[str] = (), stop: int | None = None) -> dict[str, Any]:
    """A recipe, to its end or until after step `stop`, as the command runs it."""
    steps = train(load_recipe(path, overrides))
    seen = []
    for step in steps:
        seen.append(dict(step.metrics))
        if step.number == stop:
            steps.close()  # type: ignore[attr-defined]
            break
    return {"steps": seen}


def several_sizes(path: str, spread_from: int) -> dict[str, Any]:
    """A recipe to its end, with models spread from so many parameters on; whether its policy was."""
    before, layout.SHARDED_FROM = layout.SHARDED_FROM, spread_from
    try:
        recipe = load_recipe(path)
        with Run(recipe, comm.from_first(lambda: choose_folder(recipe))) as run, comm.peers():
            for _ in run.steps():
                pass
            return {"spread": run.job.policy.sharded}
    finally:
        layout.SHARDED_FROM = before


def logits_of(policy: Policy) -> np.ndarray:
    """Of some tokens, by the policy as it is held."""
    layout = Layout(start=(0,), length=(6,), prefix=(-1,), total=6)
    with torch.no_grad():
        hidden = backbone.hidden(policy, torch.tensor([5, 6, 7, 8, 9, 10]), torch.arange(6), PackedAttention(layout))
        logits = head_logits(hidden, policy.head).numpy().copy()
    reshard(policy)
    return logits


def export(folder: str, family: str, files: int) -> dict[str, Any]:
    """Exports a sharded policy tensor by tensor; returns how much of it this process held whole, and the policy's own logits."""
    sharded.SINGLE_FILE = 0 if files > 1 else 1 << 30
    policy = spread(make(family, "float32"), "zero3")
    assert policy.sharded
    held = sum(tensor.nbytes for tensor in own_parts(policy).values())
    if comm.world().first:
        Path(folder).mkdir()
    comm.wait()
    saving.export(policy, Path(folder))
    sharded.SINGLE_FILE = 1 << 30
    return {"held": held, "logits": logits_of(policy)}


def loaded(folder: str, mode: Any, scorer: bool = False) -> dict[str, Any]:
    """A checkpoint as these processes hold it: bytes of this one's part and of what it read, and the whole weights."""
    read: list[int] = []
    rows = CheckpointReader.rows

    def counted(self: CheckpointReader, name: str, part: slice) -> torch.Tensor:
        found = rows(self, name, part)
        read.append(found.nbytes)
        return found

    CheckpointReader.rows = counted  # type: ignore[method-assign]
    recipe = Recipe(objective="reward" if scorer else "grpo", model=ModelSettings(path=folder), parallel=parallel_of(mode))
    try:
        blueprint = read_blueprint(recipe.model)
        policy = hold(recipe, blueprint, OBJECTIVES["reward"].model if scorer else language_model)
    finally:
        CheckpointReader.rows = rows  # type: ignore[method-assign]
    own = sum(fsdp.own(parameter).nbytes for parameter in policy.model.parameters())
    reference = frozen_copy(policy)
    same = all(
        torch.equal(fsdp.own(a), fsdp.own(b)) and not b.requires_grad
        for a, b in zip(policy.model.parameters(), reference.model.parameters(), strict=True)
    )
    found = {"own": own, "read": sum(read), "reference": same, "weights": weights(policy), "places": places(policy)}
    return found | ({} if scorer else {"logits": logits_of(policy)})


def places(policy: Policy) -> list[str]:
    """What kinds of devices the parts are on."""
    return sorted({fsdp.own(parameter).device.type for parameter in policy.model.parameters()})


def held(mode: Any, dtype: str, family: str = "llama") -> dict[str, float]:
    """Bytes of this process after a backward pass and a step, by part; and the numbers it sent in it."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    counter = importlib.import_module("parallel").Counter()
    policy = spread(make(family, dtype), mode)
    optimizer = Optimizer(policy.model, OptimizerSettings(lr=1e-3), 1)
    layout = Layout(start=(0,), length=(6,), prefix=(-1,), total=6)
    with counter:
        hidden = backbone.hidden(policy, torch.tensor([5, 6, 7, 8, 9, 10]), torch.arange(6), PackedAttention(layout))
        head_logits(hidden, policy.head).float().logsumexp(-1).sum().backward()
        reshard(policy)
        gradients = sum(fsdp.own(master.grad).nbytes for master in optimizer.masters if master.grad is not None)
        optimizer.step()
    update = counter.numbers
    with counter, gathered(policy) as plain:
        whole = sum(parameter.nbytes for parameter in plain.model.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
        "weights": sum(fsdp.own(parameter).nbytes for parameter in policy.model.parameters()),
        "gradients": gradients,
        "optimizer": sum(fsdp.own(tensor).nbytes for tensor in optimizer.tensors().values()),
        "whole": whole,
        "update": update,
        "gathered": counter.numbers - update,
    }


def sampled(mode: Any, tokens: int) -> dict[str, float]:
    """The numbers that this process sends while it samples completions of up to so many tokens."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    counter = importlib.import_module("parallel").Counter()
    policy = spread(make("llama", "float32"), mode)
    engine = make_engine(policy, RolloutSettings(max_rows=16))
    sampling = Sampling(temperature=0.9, max_new_tokens=tokens)
    with counter:
        groups = list(engine.generate(comm.share(prompts(6)), group_size=4, sampling=sampling, seed=0))
    return {
        "sent": counter.numbers,
        "longest": max(len(rollout) for group in groups for rollout in group),
        "parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
    }


def saved_while_training(folder: str, recipe: str) -> dict[str, Any]:
    """Weights and optimizer change while a checkpoint of them is written; what comes back is what they were."""
    started, go_on = threading.Event(), threading.Event()
    fingerprint = files.fingerprint

    def slow(path: Path) -> dict[str, Any]:
        started.set()
        assert go_on.wait(30)
        return fingerprint(path)

    with Run(load_recipe(recipe), Path(folder)) as run:
        steps = run.steps()
        next(steps)
        before = weights(run.job.policy), {n: fsdp.whole(t).numpy().copy() for n, t in run.job.tensors().items()}
        files.fingerprint = slow
        try:
            run._save()
            assert started.wait(30)
            with torch.no_grad():
                for tensor in [*run.job.tensors().values(), *run.job.policy.model.parameters()]:
                    fsdp.own(tensor).zero_()
            unfinished = checkpoint.latest(Path(folder)) is None
            comm.wait()
        finally:
            go_on.set()
            files.fingerprint = fingerprint
        run.saver.wait()
        newest = checkpoint.latest(Path(folder))
        assert newest is not None
        run.job.restore(checkpoint.load(newest), reader(newest))
        after = {n: fsdp.whole(t).numpy().copy() for n, t in run.job.tensors().items()}
        same = all(np.array_equal(after[name], tensor) for name, tensor in before[1].items()) and len(after) > 10
        steps.close()
    return {"unfinished": unfinished, "same": same, "weights": before[0], "newest": str(newest)}


def failing_save(folder: str, recipe: str, where: str) -> dict[str, Any]:
    """Rank 1's disk is full while it writes its part; what every process hears, and what lies there afterwards."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Run(load_recipe(recipe), Path(folder)) as run:
        steps = run.steps()
        next(steps)
        run._save()
        run.saver.wait()
        next(steps)
        run._whole = (2, run.job.optimizer.taken, run.job.data_state())
        target = {"policy": (sharded, "save_file"), "shards": (sharded_checkpoint.FileSystemWriter, "write_data")}[where]
        genuine, sharded.SINGLE_FILE = getattr(*target), 0  # both processes have a file of the policy to write
        if comm.world().rank == 1:
            setattr(*target, full)
        said = ""
        try:
            run._save()
            run.saver.wait()
        except StorageError as error:
            said = str(error)
        finally:
            setattr(*target, genuine)
            sharded.SINGLE_FILE = 1 << 30
        comm.wait()
        left = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
        comm.wait()
        steps.close()
    return {"said": said, "left": left, "newest": str(checkpoint.latest(Path(folder)))}


def proven(mode: Any, family: str, fault: str = "", dtype: str = "float32") -> str:
    """What the proof says of a policy as these processes hold it, with a fault planted in it on every process."""
    policy = spread(make(family, dtype), mode)
    block = policy.model.model.layers[0]
    if fault in FAULTS:
        FAULTS[fault](block)
    place, name, wrong = FAULTS_OF_EXCHANGE.get(fault, (ulysses.ContextGroup, "", None))
    with patch.object(place, name, wrong) if name else nullcontext():
        try:
            return prove(policy, longest=40).line[1]
        except ConfigError as error:
            return f"refused: {error}"


CHUNKED = {
    "attention_chunk_size": 8,
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 8,
    "attn_scale": 0.5,
    "head_dim": 8,
    "num_local_experts": 2,
    "intermediate_size_mlp": 48,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, "max_position_embeddings": 32}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 3,
}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8, "head_dim": 8}
ATTENDING: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "sinks and windows": (GptOssConfig, WINDOWED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "caps and windows": (Gemma2Config, WINDOWED | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "chunks and temperatures": (Llama4TextConfig, CHUNKED),
    "frequencies by length": (LlamaConfig, DYNAMIC),
    "values of another width": (DeepseekV3Config, LATENT),
}
"""Ways of attending, by families that know them."""


def split_apart(family: str, mode: Any, longest: int = 1000, recompute: bool = False, **fields: Any) -> tuple[float, float]:
    """How far a run's pass lies from the model's own pass in float64: log-probs, and gradients relative to their norms.

    longest: tokens of the longest text that is compared.   fields: of the model's config.
    """
    kind, usual = (ATTENDING | HYBRIDS)[family]
    model = small_model(kind, usual | fields).double()
    with in_64_bits(model):
        policy = spread(make_policy(model, TOKENIZER), mode)
        samples = [text for text in ragged_texts() if text.prompt.size + text.completion.size <= longest]
        expected = model_pass(policy, samples, gradients=True)
        with checkpointing(policy, recompute):
            found = run_pass(policy, samples, gradients=True)
    values = max(np.abs(ours - own).max() for ours, own in zip(found.values, expected.values, strict=True))
    gradients = 0.0
    for name, gradient in expected.gradient.items():
        gap = (found.gradient[name] - gradient).norm() / (gradient.norm() + 1e-6)
        gradients = max(gradients, float(gap))
    return float(values), gradients


def without_all_reduce(block: Any) -> None:
    """The last product of attention is that of this process's heads alone."""
    block.self_attn.o_proj.forward = lambda x: torch.nn.functional.linear(x, fsdp.own(block.self_attn.o_proj.weight))


def heads_exchanged(block: Any) -> None:
    """Each process multiplies the heads of the other with its own rows of the matrix behind them."""
    product = block.self_attn.o_proj.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(2)]
        torch.distributed.all_gather(parts, x.detach().contiguous())
        return product(parts[1 - comm.world().rank].requires_grad_(x.requires_grad))

    block.self_attn.o_proj.forward = forward


def gradient_twice(block: Any) -> None:
    block.input_layernorm.weight.register_hook(lambda gradient: 2 * gradient)


def gradient_in_part(block: Any) -> None:
    """The norm of the heads learns from this process's heads alone."""
    block.self_attn.q_norm.forward.sum = lambda gradient: gradient


def experts_learn_twice(block: Any) -> None:
    block.mlp.experts.down_proj.register_hook(lambda gradient: 2 * gradient)


FAULTS = {
    "experts twice": experts_learn_twice,
    "without all-reduce": without_all_reduce,
    "heads exchanged": heads_exchanged,
    "gradient twice": gradient_twice,
    "gradient in part": gradient_in_part,
}


def published(folder: str, family: str, mode: Any, dtype: str, adapter: bool = False) -> dict[str, Any]:
    """Five versions of weights that move a little, and a mirror that follows them: where its bits are not the policy's."""
    policy = make(family, "float32")
    if adapter:
        policy = adapt(policy, LoraSettings(rank=2, targets="all-linear"), base="")
    policy = spread(policy, mode)
    served = getattr(torch, dtype)
    publisher = Publisher(Path(folder), "run", served, full_every=3)
    mirror = Mirror(Path(folder).with_name("mirror")) if comm.world().first else None
    wrong, fetched, patches = [], [], []
    for version in range(5):
        move(policy, version)
        manifest = publisher.publish(policy, version)
        patches.append(len(manifest.patch))
        with gathered(policy) as whole:
            plain = saving.merged(whole)
            stored = revert_weight_conversion(plain, {name: p.detach() for name, p in plain.named_parameters()})
        if mirror is None:
            continue
        found = mirror.go_to(VersionSource(folder), version)
        fetched.append((found.full, found.healed))
        held = mirror.tensors(manifest)
        assert held.keys() == stored.keys()
        for name, tensor in stored.items():
            bits = tensor.to(served).reshape(-1).view({2: torch.int16, 4: torch.int32}[served.itemsize])
            if not np.array_equal(bits.numpy(), held[name].view(bits.numpy().dtype)):
                wrong.append((version, name))
    comm.wait()
    return {"wrong": wrong, "fetched": fetched, "patches": patches}


def published_to_a_pool(folder: str, mode: Any) -> dict[str, Any]:
    """Versions for servers of which one is killed, one joins, one is started anew, one leaves; and what all of them then hold."""
    policy = spread(make("llama", "float32", hidden=128), mode)  # heads of 32, which vLLM knows on a CPU
    pool = LivingServers(Path(folder), policy.model.config.vocab_size) if comm.world().first else None
    comm.wait()
    engine = VllmEngine(policy, servers=f"{folder}/servers.txt", patience=120.0)
    found: dict[str, Any] = {"patches": [], "drawn": [], "wrong": [], "servers": []}
    try:
        for version in range(5):
            if pool is not None:
                pool.disturb(version)
            comm.wait()
            move(policy, version)
            engine.send_weights(version)
            manifest = engine._delivery._newest  # type: ignore[union-attr]
            found["patches"].append([file.name for file in manifest.patch])  # type: ignore[union-attr]
            asked = comm.share(prompts(8))
            groups = list(engine.generate(asked, group_size=2, sampling=Sampling(max_new_tokens=6), seed=version))
            assert sorted(group[0].prompt.id for group in groups) == sorted(prompt.id for prompt in asked)
            found["drawn"].append(sorted({int(one) for group in groups for rollout in group for one in rollout.version}))
            with gathered(policy) as whole:
                weights = {name: parameter.detach().clone() for name, parameter in whole.model.named_parameters()}
            if pool is not None:
                found["servers"].append(len(pool.alive))
                found["wrong"] += [(version, *one) for one in pool.differing(weights, manifest.label)]  # type: ignore[union-attr]
            comm.wait()
    finally:
        engine.close()
        if pool is not None:
            pool.close()
    return found


class LivingServers:
    """Scripted servers that come and go, in a file that the trainers read again."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.named, self.vocabulary = folder / "servers.txt", vocabulary
        self.made = [self._new(), self._new()]
        self.alive = list(self.made)
        self._name()

    def _new(self) -> Process:
        return Process(vocabulary=self.vocabulary, context=96).wait()

    def _name(self) -> None:
        self.named.write_text("".join(f"{server.url}\n" for server in self.made))

    def disturb(self, version: int) -> None:
        """What happens before a version is published."""
        first = self.made[0]
        if version == 1:
            first.kill()
            self.alive.remove(first)
        if version == 2:
            self.made.append(self._new())
            self.alive.append(self.made[-1])
            self._name()
        if version == 3:
            first.start()
            self.alive.append(first.wait())
        if version == 4:
            self.alive.remove(self.made[1])
            self.made.pop(1).close()
            self._name()

    def differing(self, weights: dict[str, torch.Tensor], label: str) -> list[tuple[str, str]]:
        """Where a server's mirror has other bits than these, when all have come to the version."""
        wrong = []
        for server in self.alive:
            end = time.monotonic() + 300
            while server.label() != label:
                assert time.monotonic() < end, f"{server.url} has {server.label()}, not {label}"
                time.sleep(0.02)
            mirror = Mirror(server.mirror)
            held = mirror.tensors(mirror.manifest())  # type: ignore[arg-type]
            assert held.keys() == weights.keys()
            for name, tensor in weights.items():
                if not np.array_equal(held[name], tensor.reshape(-1).numpy().view(np.uint32)):
                    wrong.append((server.url, name))
        return wrong

    def close(self) -> None:
        """End them all."""
        for server in self.made:
            server.close()


def move(policy: Policy, version: int) -> None:
    """Change some numbers of most parameters, the same on however many processes."""
    for place, (name, parameter) in enumerate(policy.model.named_parameters()):
        if place % 5 == version % 5 or not (policy.adapter is None or name in policy.adapter.trained):
            continue
        generator = torch.Generator().manual_seed(100 * version + place)
        change = 0.01 * torch.randn(parameter.shape, generator=generator)
        change *= torch.rand(parameter.shape, generator=generator) < 0.1
        with torch.no_grad():
            fsdp.own(parameter).add_(layout.part_of(change.__getitem__, parameter))


def gathers_of_publishing(folder: str) -> int:
    """How many tensors are gathered to publish two versions of sharded weights."""
    policy = spread(make("llama", "float32"), "zero3")
    publisher, count = Publisher(Path(folder), "run", torch.bfloat16), 0
    whole = torch.distributed.tensor.DTensor.full_tensor

    def gather(self: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return whole(self)

    torch.distributed.tensor.DTensor.full_tensor = gather  # type: ignore[method-assign]
    try:
        for version in range(2):
            move(policy, version)
            publisher.publish(policy, version)
    finally:
        torch.distributed.tensor.DTensor.full_tensor = whole  # type: ignore[method-assign]
    return count


ALL_HEADS, BEGUN = ulysses.StreamPart.all_heads, ulysses.StreamPart.__init__


def heads_turned(self: Any, x: torch.Tensor, heads: int) -> torch.Tensor:
    return ALL_HEADS(self, x, heads).flip(1)


def later_positions(self: Any, context: Any, *columns: Any) -> None:
    """The second process's positions are one too high."""
    BEGUN(self, context, *columns)
    self.position_T = self.position_T + context.rank


CONVOLVED, RULED = ulysses.ExchangedStates.convolve, ulysses.ExchangedStates.rule
EXCHANGED = ulysses._exchanged


def own_stream(x: torch.Tensor) -> Recurrence:
    """States that begin anew at each process's positions."""
    return Recurrence(Segments([0], [len(x)], len(x)))


def tail_dropped(self: Any, place: Any, x: torch.Tensor, *weights: Any, silu: bool) -> torch.Tensor:
    return own_stream(x).convolve(place, x, *weights, silu=silu)


def state_dropped(self: Any, place: Any, *columns: torch.Tensor) -> torch.Tensor:
    return own_stream(columns[0]).rule(place, *columns)


def state_of_the_neighbour(self: Any, place: Any, *columns: torch.Tensor) -> torch.Tensor:
    """Each head's state fades as that of the head beside it."""
    query, key, value, decay, *beta = columns
    return RULED(self, place, query, key, value, decay.roll(1, 1), *beta)


def ranks_reversed(self: Any, place: Any, *columns: torch.Tensor) -> torch.Tensor:
    """States pass through the last process's positions first."""
    with patch.object(ulysses, "_exchanged", lambda parts, group: EXCHANGED(parts, group).flip(0)):
        return RULED(self, place, *columns)


def channels_of_the_neighbour(self: Any, place: Any, x: torch.Tensor, weight: torch.Tensor, *bias: Any, silu: bool) -> torch.Tensor:
    return CONVOLVED(self, place, x, weight.roll(1, 0), *bias, silu=silu)


COMBINED = AllToAllEP._combine_tokens


def tokens_turned(self: Any, output: torch.Tensor, state: Any) -> torch.Tensor:
    return COMBINED(self, output.flip(0), state)


def experts_silent(self: Any, output: torch.Tensor, state: Any) -> torch.Tensor:
    """The second process's experts give nothing back."""
    return COMBINED(self, output * (1 - comm.world().rank), state)


FAULTS_OF_EXCHANGE = {
    "experts silent": (AllToAllEP, "_combine_tokens", experts_silent),
    "tokens turned": (AllToAllEP, "_combine_tokens", tokens_turned),
    "tail dropped": (ulysses.ExchangedStates, "convolve", tail_dropped),
    "channels of the neighbour": (ulysses.ExchangedStates, "convolve", channels_of_the_neighbour),
    "state dropped": (ulysses.ExchangedStates, "rule", state_dropped),
    "state of the neighbour": (ulysses.ExchangedStates, "rule", state_of_the_neighbour),
    "ranks reversed": (ulysses.ExchangedStates, "rule", ranks_reversed),
    "no exchange": (ulysses, "_exchanged", lambda parts, group: parts.clone()),
    "heads turned": (ulysses.StreamPart, "all_heads", heads_turned),
    "positions off": (ulysses.StreamPart, "__init__", later_positions),
    "counted twice": (ulysses.ContextGroup, "own_share", lambda self, loss: loss),
    "not summed": (ulysses.ContextGroup, "sum", lambda self, tensor: None),
}
