"""Compiled blocks against uncompiled ones: values, gradients, number of graphs, what is refused, and what the proof finds."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from planted import TOKENIZER
from sample_texts import groups_of_texts
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from groupwise.config.recipes import load_recipe
from groupwise.config.settings import LoraSettings, ModelSettings
from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.models import compiled_blocks
from groupwise.models.backbone import checkpointing, layers
from groupwise.models.compiled_blocks import CompiledBlocks, refusal_of
from groupwise.models.loading import make_policy
from groupwise.models.lora import adapt
from groupwise.models.policy import Policy, without_adapter
from groupwise.models.reach import ATTRIBUTE
from groupwise.ops import operations, stream_operation
from groupwise.ops.attention import _Pieces
from groupwise.ops.operations import AttentionCall
from groupwise.ops.query import EVERYTHING, Query, Reach
from groupwise.ops.stream_operation import OpenStream
from groupwise.proof.passes import PassResults, run_pass
from groupwise.runs import compiling
from groupwise.runs.compiling import with_blocks
from groupwise.runs.job import make_job

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Graphs of another test are not used again."""
    torch._dynamo.reset()


def policy_of(dtype: Any = "float32", *, rank: int = 0, layers: int = 2) -> Policy:
    """A small random model; of an adapter both factors are filled."""
    torch.manual_seed(0)
    config = Qwen2Config(num_hidden_layers=layers, max_position_embeddings=256, **SIZES)
    policy = make_policy(Qwen2ForCausalLM(config), TOKENIZER, ModelSettings(device="cpu", dtype=dtype))
    if rank:
        policy = adapt(policy, LoraSettings(rank=rank), base="x", seed=0)
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    return policy


def differences(ours: PassResults, expected: PassResults) -> tuple[float, float]:
    """The largest of a log-prob, and of a gradient relative to its norm."""
    assert ours.gradient.keys() == expected.gradient.keys()
    value = max(float(np.abs(one - exact).max()) for one, exact in zip(ours.values, expected.values, strict=True))
    relative = [0.0]
    for name, gradient in ours.gradient.items():
        exact = expected.gradient[name]
        relative.append(float((gradient - exact).norm() / exact.norm().clamp_min(1e-12)))
    return value, max(relative)


def compared(policy: Policy, compiled: Policy, seed: int, *, recompute: bool = False, learn: bool = True) -> tuple[float, float]:
    """`differences` of one pass, with compiled blocks and without."""
    with checkpointing(policy, True) if recompute else nullcontext():
        ours, expected = (run_pass(one, groups_of_texts(seed), gradients=learn) for one in (compiled, policy))
    return differences(ours, expected)


PRECISIONS = {"float32": (2e-5, 1e-4), "float64": (1e-10, 1e-10), "autocast": (0.05, 0.05)}
"""Bounds of differences.  Autocast rounds products at other places.  Norms of transformers compute in float32, fused ones in
float64: there compiled blocks are compared with transformers' own."""
SWITCH = "GROUPWISE_TEST_INDUCTOR"
asked = pytest.mark.skipif(SWITCH not in os.environ, reason=f"compiles C++ for minutes: set {SWITCH}=1")
CASES = [(dtype, "aot_eager") for dtype in PRECISIONS] + [pytest.param("float32", "inductor", marks=asked)]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "backend"), CASES)
def test_streams_of_any_length_share_the_graphs_of_blocks(dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five lengths, three blocks, with gradients and without: two graphs."""
    of_values, of_gradients = PRECISIONS[dtype]
    policy = policy_of("float32" if dtype == "float64" else dtype, layers=3)
    if dtype == "float64":
        monkeypatch.setattr(operations, "_chosen", operations.Operations())
        policy.model.double()
    compiled = replace(policy, blocks=CompiledBlocks(backend))
    counters.clear()
    graphs = []
    for seed in range(5):
        value, gradient = compared(policy, compiled, seed)
        assert value < of_values and gradient < of_gradients, (value, gradient)
        value, _ = compared(policy, compiled, seed, learn=False)
        assert value < of_values, value
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [2] * 5
    assert not stream_operation._streams, "no stream is kept behind a pass"
    assert all("forward" not in vars(block) for block in layers(policy)), "blocks are as they were"


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_adapters_and_recomputation_run_in_compiled_blocks(recompute: bool) -> None:
    policy = policy_of(rank=2)
    compiled = replace(policy, blocks=CompiledBlocks("aot_eager"))
    counters.clear()
    for seed in range(3):
        value, gradient = compared(policy, compiled, seed, recompute=recompute)
        assert value < 2e-5 and gradient < 1e-3, (value, gradient)  # some of an adapter's are sums that nearly vanish
    assert counters["stats"]["unique_graphs"] == 2, "the first block, whose input has no gradient, and the others"
    value, _ = compared(without_adapter(policy), without_adapter(compiled), 0, learn=False)
    assert value < 2e-5, "without the adapter"


@pytest.mark.slow
def test_blocks_of_another_family_hand_the_stream_down() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, eos_token_id=0))
    policy = make_policy(model, TOKENIZER, ModelSettings(device="cpu"))
    value, gradient = compared(policy, replace(policy, blocks=CompiledBlocks("eager")), 0)
    assert value < 2e-5 and gradient < 1e-4, (value, gradient)


def with_eager_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run graphs as they are, without a compiler's kernels, which takes a part of the time."""
    monkeypatch.setattr(compiling, "CompiledBlocks", lambda: CompiledBlocks("eager"))


class HalvesKeysGradients(_Pieces):
    """Attention whose backward pass loses half of what reaches the keys."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, *rest = _Pieces.backward(ctx, *grads)
        assert key is not None
        return query, 0.5 * key, *rest


def halved(stream: OpenStream, query: Query) -> AttentionCall:
    call = stream.attention.pieces_call(query.heads, query, EVERYTHING)
    return AttentionCall(HalvesKeysGradients, call.arguments)


def unscaled(stream: OpenStream, query: Query) -> AttentionCall:
    return stream.attention.pieces_call(query.heads, query._replace(scale=1.0), EVERYTHING)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [halved, unscaled])
def test_the_proof_finds_a_fault_of_compiled_blocks(fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`on` ends with it, and says that the blocks are at fault; `auto` goes on without them."""
    with_eager_graphs(monkeypatch)
    monkeypatch.setattr(stream_operation, "_call", fault)
    policy = policy_of()
    with pytest.raises(ConfigError, match=r"with compiled blocks: .*does not equal.*set model.compile to off"):
        with_blocks(policy, "on", longest=40, recompute=False)
    kept, ((label, text),) = with_blocks(policy, "auto", longest=40, recompute=False)
    assert kept.blocks is None and label == "compile" and "does not equal" in text


@pytest.mark.slow
def test_auto_keeps_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    with_eager_graphs(monkeypatch)
    policy = policy_of()
    for gain, compiled in ((1.04, False), (1.06, True)):
        monkeypatch.setattr(compiling, "gain_of", lambda *_, gain=gain: gain)
        kept, ((_, text),) = with_blocks(policy, "auto", longest=40, recompute=True)
        assert (kept.blocks is not None) == compiled and f"{gain:.2f} x" in text


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "sft"])
def test_a_step_of_a_run_is_that_of_uncompiled_blocks(objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same completions, loss and gradient, by a job that says in its plan what it compiles."""
    with_eager_graphs(monkeypatch)
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}", "answer": f"{i + 1}"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "rule.py").write_text("def first(completion): return float(ord(completion[:1] or ' ') % 2)\n", encoding="utf-8")
    tree: dict[str, Any] = {
        "objective": objective,
        "name": "r",
        "runs": str(tmp_path / "runs"),
        "steps": 2,
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 2, "context": 64, "tokenizer": "arithmetic"}},
    }
    if objective == "grpo":
        tree |= {"rewards": [{"function": "rule.py:first"}], "rollout": {"max_new_tokens": 8}}
        tree |= {"group": {"prompts_per_step": 2, "group_size": 4}}
    figures = []
    for choice in ("off", "on"):
        tree["model"]["compile"] = choice
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        job = make_job(load_recipe(str(tmp_path / "recipe.yaml")))
        assert (job.policy.blocks is not None) == (choice == "on") == any(label == "compile" for label, _ in job.plan)
        step = next(job.loop(0))
        scored = [np.abs(logp).sum() for group in step.current_logp for logp in group]
        figures.append([step.metrics["loss"], step.metrics["grad_norm"], *scored])
        job.close()
    np.testing.assert_allclose(*figures, rtol=1e-4, atol=1e-6)


def test_auto_compiles_where_every_process_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a compiler would train without compiled blocks, and the others would wait for what it measures."""
    monkeypatch.setattr(compiling, "prove", lambda *_, **__: None)
    monkeypatch.setattr(compiling, "gain_of", lambda *_: 2.0)
    policy = policy_of()
    kept, _ = with_blocks(policy, "auto", longest=40, recompute=False)
    assert kept.blocks is not None
    monkeypatch.setattr(comm, "gather", lambda items: [*items, "no compiler there"])
    kept, ((_, text),) = with_blocks(policy, "auto", longest=40, recompute=False)
    assert kept.blocks is None and text == "off: no compiler there"


@pytest.mark.parametrize("recompute", [False, True])
def test_auto_times_passes_as_the_run_makes_them(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, wrapped = policy_of(), set()

    def note(one: Policy, *_: Any, **__: Any) -> None:
        wrapped.add("forward" in vars(layers(one)[0]))

    monkeypatch.setattr(compiling, "run_pass", note)
    compiling.gain_of(policy, policy, 40, recompute)
    assert wrapped == {recompute}


def test_off_compiles_nothing_and_says_nothing() -> None:
    policy = policy_of()
    assert with_blocks(policy, "off", longest=40, recompute=False) == (policy, [])


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Policy:
    """A machine on which torch.compile finds no compiler: on Linux it looks for g++ alone."""
    monkeypatch.setattr(compiled_blocks, "COMPILER", "g++")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang++" if name == "clang++" else None)
    monkeypatch.delenv("CXX", raising=False)
    return policy_of()


def with_dropout(_: pytest.MonkeyPatch) -> Policy:
    return adapt(policy_of(), LoraSettings(rank=2, dropout=0.1), base="x", seed=0)


def one_by_one(_: pytest.MonkeyPatch) -> Policy:
    return replace(policy_of(), attention="single")


def sharded(_: pytest.MonkeyPatch) -> Policy:
    return replace(policy_of(), shards=object())  # type: ignore[arg-type]


REFUSED: dict[str, Callable[[pytest.MonkeyPatch], Policy]] = {
    r"C\+\+ compiler on a CPU, and 'g\+\+' was not found": without_compiler,
    "lora.dropout": with_dropout,
    "'single'": one_by_one,
    "spread over processes": sharded,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_compiled_is_refused_with_the_reason(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = REFUSED[reason](monkeypatch)
    with pytest.raises(ConfigError, match=f"(?s)model.compile is 'on', but .*{reason}.*; set model.compile to off"):
        with_blocks(policy, "on", longest=40, recompute=False)
    kept, ((label, _),) = with_blocks(policy, "auto", longest=40, recompute=False)
    assert kept is policy and label == "compile"


def test_on_a_gpu_windows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("autocast")
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    monkeypatch.setattr(compiled_blocks, "find_spec", lambda _: object())
    assert refusal_of(policy) is None
    setattr(policy.model.model.layers[1].self_attn, ATTRIBUTE, Reach(window=8))
    reason = refusal_of(policy)
    assert reason is not None and "FlexAttention" in reason
