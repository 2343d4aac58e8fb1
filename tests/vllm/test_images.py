"""Prompts with images on a real vLLM server: what it samples is what the policy scores."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from groupwise.cli import commands
from groupwise.config.settings import ScratchSettings
from groupwise.data.images import PromptImages, picture_of
from groupwise.data.tokenizers import arithmetic_tokenizer, with_image_marks
from groupwise.models.loading import make_policy
from groupwise.models.policy import Policy
from groupwise.models.scratch import image_encoder, image_ids_of, scratch_model
from groupwise.models.vision import seeing
from groupwise.records import Prompt, Rollout, Sampling
from groupwise.rollout.vllm.engine import VllmEngine
from groupwise.rollout.vllm.server import TORCHVISION
from groupwise.runs.metrics_log import read_metrics
from groupwise.training.passes import score
from groupwise.training.samples import sample_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def torchvision(environment: Path) -> None:
    """Skips where vLLM cannot serve a model that reads images."""
    if not list(environment.glob("lib/python3*/site-packages/torchvision")):
        pytest.skip(f"vLLM prepares images with torchvision: {environment}/bin/pip install --no-deps {TORCHVISION}")


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A small Qwen3-VL, whose logits are far from uniform."""
    tokenizer = with_image_marks(arithmetic_tokenizer())
    shape = ScratchSettings(family="qwen3_vl", hidden=64, layers=2, heads=2, context=256)
    eos, ids = [int(tokenizer.eos_token_id)], image_ids_of(tokenizer)
    model = scratch_model(shape, vocabulary=len(tokenizer), eos_ids=eos, pad_id=int(tokenizer.pad_token_id), image_ids=ids)
    for parameter in model.model.language_model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 4.0
    encoder = image_encoder()
    return replace(seeing(make_policy(model, tokenizer), encoder), image_files=encoder.files)


@pytest.fixture(scope="module")
def engine(policy: Policy) -> Iterator[VllmEngine]:
    found = VllmEngine(policy, max_rows=16)
    yield found
    found.close()


@pytest.fixture
def prompts(policy: Policy) -> list[Prompt]:
    """Two with the same ids and other images, one with two images of odd sizes, and one without any."""
    sizes = {"a": [(16, 24)], "b": [(16, 24)], "c": [(30, 21), (40, 8)]}
    prompts = []
    for seed, (name, images) in enumerate(sizes.items()):
        pictures = []
        ids = [7, 8]
        for height, width in images:
            pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            picture = picture_of(file.getvalue(), "a test")
            pictures.append(picture)
            ids += [policy.vision.token] * policy.vision.encoder.embeddings(picture)
            ids += [9]
        tokens = np.array([*ids, 10, 11], np.int64)
        prompts.append(Prompt(id=name, tokens=tokens, text="", images=PromptImages(tuple(pictures), tokens)))
    return [*prompts, Prompt(id="d", tokens=np.array([7, 8, 10, 11]), text="")]


def draw(engine: VllmEngine, prompts: list[Prompt], sampling: Sampling) -> dict[str, tuple[Rollout, ...]]:
    groups = engine.generate(prompts, group_size=4, sampling=sampling, seed=0)
    return {group[0].prompt.id: group for group in groups}


def largest_gap(policy: Policy, groups: dict[str, tuple[Rollout, ...]]) -> float:
    """The largest |sampled - scored| of a token."""
    rollouts = [rollout for group in groups.values() for rollout in group]
    scored = score(policy, [sample_of(rollout) for rollout in rollouts], max_tokens_per_microbatch=4096).logp
    gaps = [np.abs(logp - rollout.behavior_logp).max() for logp, rollout in zip(scored, rollouts, strict=True)]
    return float(max(gaps))


def test_what_is_sampled_behind_images_is_what_is_scored(engine: VllmEngine, policy: Policy, prompts: list[Prompt]) -> None:
    """With the first weights, and with others of the text; that the server computed the prompt's ids, the engine checks itself."""
    for version in range(2):
        engine.send_weights(version)
        groups = draw(engine, prompts, Sampling(max_new_tokens=12))
        assert largest_gap(policy, groups) < 1e-4
        for parameter in policy.model.model.language_model.parameters():
            if parameter.ndim > 1:
                parameter.data *= 1.1


def test_the_server_sees_the_image(engine: VllmEngine, prompts: list[Prompt]) -> None:
    """Two prompts whose ids are the same get other completions."""
    groups = draw(engine, prompts[:2], Sampling(temperature=0.0, max_new_tokens=12))
    assert groups["a"][0].tokens.tolist() != groups["b"][0].tokens.tolist()


def test_a_run_on_pictures_trains_on_what_servers_sampled(
    write_vllm_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two steps: the second is sampled with the weights that the first has made."""
    monkeypatch.chdir(tmp_path)
    scratch = {"family": "qwen3_vl", "hidden": 64, "layers": 2, "heads": 2, "context": 96, "tokenizer": "bpe:340"}
    data = {"task": "shapes", "task_args": {"scenes": "alike"}, "chat": True, "limit": 40, "eval_limit": 8}
    changes = {"model": {"scratch": scratch}, "data": data, "rollout": {"max_new_tokens": 6}, "optimizer": {"lr": 1e-2}}
    path = write_vllm_recipe(tmp_path, "run", steps=2, **changes)
    assert commands.main(["train", str(path), "--quiet"]) == 0
    steps = [line for line in read_metrics(tmp_path / "runs" / "run") if "grad_norm" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["mismatch/max"] < 1e-4
        assert line["grad_norm"] > 0
