"""Images in prompts: packed and shared as one by one, as transformers computes them, and the tower once per image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_models import FAMILIES, checkpoint, exact, policy_of, prompt

from groupwise.data.images import Picture
from groupwise.data.packing import pack
from groupwise.errors import ConfigError
from groupwise.models import vision
from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.models.vision import Positions, Vision
from groupwise.proof.passes import PassResults, model_pass, run_pass, take_gradients
from groupwise.proof.prove import prove
from groupwise.proof.texts import NATIVE, TRANSFORMERS
from groupwise.records import Sample, Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.transformers import TransformersEngine
from groupwise.training.passes import score
from groupwise.training.samples import sample_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def policy(folder: Path) -> Policy:
    return policy_of(folder)


def samples_of(policy: Policy) -> list[Sample]:
    """Two groups whose ids are the same and whose images differ, one of two images, one without; a prompt alone."""
    rng = np.random.default_rng(3)
    prompts = [prompt(policy, "0/0", [3]), prompt(policy, "0/1", [6]), prompt(policy, "0/2", [1, 2])]
    prompts.append(replace(prompts[0], id="0/3", tokens=np.array([5, 9, 11, 4]), images=None))
    assert np.array_equal(prompts[0].tokens, prompts[1].tokens)
    samples = []
    for one, lengths in zip(prompts, ([4, 7, 2], [5, 3], [6, 1], [3]), strict=True):
        for size in lengths:
            completion, weight = rng.integers(5, 90, size), rng.random(size) + 0.1
            samples.append(Sample(group=one.id, prompt=one.tokens, images=one.images, completion=completion, weight=weight))
    return samples


def assert_alike(found: PassResults, expected: PassResults, tolerance: float) -> None:
    for one, other in zip(found.values, expected.values, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
    assert found.gradient.keys() == expected.gradient.keys()
    norm = max(float(gradient.norm()) for gradient in expected.gradient.values())
    for name, gradient in expected.gradient.items():
        assert float((found.gradient[name] - gradient).norm()) <= tolerance * norm, name


def one_by_one(policy: Policy, samples: Sequence[Sample]) -> PassResults:
    """Each sample in a stream of its own."""
    values = [run_pass(policy, [sample], gradients=False).values[0] for sample in samples]
    gradient: dict[str, torch.Tensor] = {}
    for sample in samples:
        for name, part in run_pass(policy, [sample], gradients=True).gradient.items():
            gradient[name] = gradient.get(name, 0.0) + part
    return PassResults(values, gradient)


def test_packed_and_shared_is_one_by_one_is_the_models_own_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = exact(policy_of(folder, torch.float64), monkeypatch)
    samples = samples_of(policy)
    expected = model_pass(policy, samples, gradients=True)
    assert_alike(run_pass(policy, samples, gradients=True), expected, 1e-10)
    assert_alike(run_pass(policy, samples[::-1], gradients=True)._replace(values=expected.values), expected, 1e-10)
    assert_alike(one_by_one(policy, samples), expected, 1e-10)


def test_the_image_matters(policy: Policy) -> None:
    """Else nothing here would show that another one was read."""
    samples = samples_of(policy)
    other = replace(samples[0], images=prompt(policy, "0/0", [9]).images)
    one, another = (run_pass(policy, [sample], gradients=False).values[0] for sample in (samples[0], other))
    assert np.abs(one - another).max() > 0.01


def test_a_prompt_stands_once_for_its_completions(policy: Policy) -> None:
    (batch,) = pack(samples_of(policy), 10_000)
    assert [span.place for span in batch.images].count(0) == 3
    assert len(batch.images) == 3 + 7


@pytest.mark.parametrize("engine", [NATIVE, TRANSFORMERS], ids=["native", "transformers"])
def test_what_is_sampled_is_proven(policy: Policy, engine: Any) -> None:
    assert prove(policy, sampler=engine, recompute=True).paths == ("scoring", "training", "recompute", "sampling")


SPECIALISED = ("Qwen3VL", "Qwen3_5")


def test_prompts_with_images_are_decoded_with_prepared_weights(policy: Policy) -> None:
    """On a CPU, where every step of the text is known; log-probs are those of the training pass."""
    engine = NativeEngine(policy, max_rows=4)
    known = type(policy.model).__name__.startswith(SPECIALISED)
    assert engine.path == ("specialised" if known else "module")
    prompts = [prompt(policy, "a", [3]), prompt(policy, "b", [6, 2]), prompt(policy, "c", [4])]
    prompts.append(replace(prompts[0], id="d", tokens=np.array([5, 9, 11, 4]), images=None))
    groups = engine.generate(prompts, group_size=3, sampling=Sampling(max_new_tokens=9), seed=0)
    rollouts = [rollout for group in groups for rollout in group]
    scored = score(policy, [sample_of(rollout) for rollout in rollouts], max_tokens_per_microbatch=500).logp
    for rollout, logp in zip(rollouts, scored, strict=True):
        np.testing.assert_allclose(rollout.behavior_logp, logp, rtol=0, atol=1e-5)


def test_both_engines_decode_the_same(policy: Policy) -> None:
    prompts = [prompt(policy, "a", [3]), prompt(policy, "b", [6]), prompt(policy, "c", [4, 5])]
    sampling, tokens = Sampling(temperature=0.0, max_new_tokens=12), []
    for engine in (NativeEngine(policy, max_rows=4), TransformersEngine(policy, max_rows=4)):
        groups = engine.generate(prompts, group_size=2, sampling=sampling, seed=0)
        tokens.append({group[0].prompt.id: [rollout.tokens.tolist() for rollout in group] for group in groups})
    assert tokens[0] == tokens[1]
    assert tokens[0]["a"] != tokens[0]["b"]


def test_the_tower_reads_an_image_once_for_all_that_a_step_does(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling, scoring and the update of four completions of each prompt; the text's modules run meanwhile."""
    calls: list[int] = []
    prepared: list[str] = []
    arrays = policy.vision.encoder.arrays

    def counted(pictures: Sequence[Picture]) -> dict[str, Any]:
        prepared.extend(picture.digest for picture in pictures)
        return arrays(pictures)

    monkeypatch.setattr(policy.vision.encoder, "arrays", counted)
    tower = getattr(policy.model.model, "visual", None) or policy.model.model.vision_tower
    handle = tower.register_forward_hook(lambda module, inputs, output: calls.append(1))
    prompts = [prompt(policy, "a", [3]), prompt(policy, "b", [6, 7])]
    engine = NativeEngine(policy, max_rows=3)
    groups = list(engine.generate(prompts, group_size=4, sampling=Sampling(max_new_tokens=5), seed=0))
    samples = [sample_of(rollout) for group in groups for rollout in group]
    score(policy, samples, max_tokens_per_microbatch=40)
    run_pass(policy, samples, gradients=True)
    handle.remove()
    assert policy.vision.passes == 3
    assert len(calls) <= 3
    assert len(prepared) == len(set(prepared)) == 3


def test_embeddings_that_are_not_kept_are_computed_again(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = samples_of(policy)
    expected = run_pass(policy, samples, gradients=False).values
    monkeypatch.setattr(vision, "KEPT_BYTES", 1)
    monkeypatch.setattr(vision, "PIXELS_AT_ONCE", 1)
    for _ in range(2):
        for sample, value in zip(samples, expected, strict=True):
            np.testing.assert_allclose(run_pass(policy, [sample], gradients=False).values[0], value, atol=2e-5)


def neighbours(read: Callable[..., Any]) -> Callable[..., Any]:
    """Embeddings of the image before, for each image."""

    def swapped(self: Vision, policy: Policy, prompts: Any) -> Any:
        features = read(self, policy, prompts)
        digests = list(features)
        return {digest: features[other] for digest, other in zip(digests, digests[-1:] + digests[:-1], strict=True)}

    return swapped


def moved(own: Callable[..., Positions], places: int, offset: int) -> Callable[..., Positions]:
    """Positions that are off by one, in the prompt or behind it."""

    def wrong(self: Vision, policy: Policy, images: Any) -> Positions:
        found = own(self, policy, images)
        return Positions(found.place_3m + places, found.offset + offset)

    return wrong


def leaking(own: Callable[..., Any]) -> Callable[..., Any]:
    """The placeholder's embedding takes a gradient, though its value is the image's."""

    def wrong(self: Vision, policy: Policy, tokens_T: Any, *stream: Any) -> Any:
        run, inputs, attend = own(self, policy, tokens_T, *stream)
        embedding = policy.model.get_input_embeddings()(tokens_T[None])
        return run, inputs | {"inputs_embeds": inputs["inputs_embeds"] + embedding - embedding.detach()}, attend

    return wrong


def causal(own: Callable[..., Any]) -> Callable[..., Any]:
    """The tokens of an image see those before them alone."""

    def wrong(self: Vision, *stream: Any) -> Any:
        run, inputs, attend = own(self, *stream)
        return run, inputs, getattr(attend, "attend", attend)

    return wrong


FAULTS = {
    "image of the neighbour": ("read", neighbours),
    "positions of the prompt off by one": ("of_prompt", lambda own: moved(own, 1, 0)),
    "positions behind the prompt off by one": ("of_prompt", lambda own: moved(own, 0, 1)),
    "placeholder trained": ("spliced", leaking),
    "tokens of an image that do not see one another": ("spliced", causal),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_at_load(fault: str, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = FAULTS[fault]
    kind = type(policy.vision)
    if (plant is causal) != (kind is vision.BlockVision) and (plant is causal or name == "of_prompt"):
        pytest.skip("positions of Gemma 3 are places, and it alone has images that see all of themselves")
    monkeypatch.setattr(kind, name, plant(getattr(kind, name)))
    with pytest.raises(ConfigError, match="does not equal the model's own forward pass"):
        prove(policy, sampler=NATIVE)


def test_the_tower_takes_no_gradient_and_is_saved_as_it_was(policy: Policy) -> None:
    run_pass(policy, samples_of(policy), gradients=False)
    text = policy.model.model.language_model
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert trained and len(trained) <= len([*text.parameters()]) + 1
    with plain_attention(policy.model):
        assert take_gradients(policy) == {}
