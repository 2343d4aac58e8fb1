"""What a vLLM server is sent of a prompt with images, and what it must answer."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from image_models import checkpoint, policy_of, prompt
from PIL import Image

from groupwise.data.images import picture_of
from groupwise.errors import EngineError
from groupwise.models.policy import Policy
from groupwise.rollout.vllm.images import check_tokens, image_request, local_prompt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return policy_of(checkpoint(tmp_path_factory.mktemp("checkpoint")))


def test_an_image_is_one_placeholder_and_a_picture_of_the_towers_size(policy: Policy) -> None:
    """Of sizes that are no multiple of a patch's too: a server that resizes with another library would see other pixels."""
    asked = prompt(policy, "a", [3, 4])
    odd = picture_of(_png(21, 35), "a test")
    encoder, token = policy.vision.encoder, policy.vision.token
    body = image_request(asked.images, policy.vision)
    assert body["token_ids"].count(token) == 2
    expected = asked.tokens[asked.tokens != token]
    assert [one for one in body["token_ids"] if one != token] == expected.tolist()
    assert [part["type"] for part in body["content_parts"]] == ["image_url"] * 2
    sent = [base64.b64decode(part["url"].partition(",")[2]) for part in body["content_parts"]]
    file = io.BytesIO()
    encoder.resized(odd).save(file, "PNG")
    for picture, data in zip((*asked.images.pictures, odd), (*sent, file.getvalue()), strict=True):
        seen, wanted = encoder.arrays([picture_of(data, "what is sent")]), encoder.arrays([picture])
        assert all(np.array_equal(seen[name], wanted[name]) for name in wanted)
        with Image.open(io.BytesIO(data)) as image:
            assert image.size[0] % 8 == image.size[1] % 8 == 0


def test_images_that_follow_each_other_are_one_placeholder_each(policy: Policy) -> None:
    asked = prompt(policy, "a", [3, 4])
    token = policy.vision.token
    run = asked.tokens[asked.tokens == token]
    beside = type(asked.images)(asked.images.pictures, np.concatenate([asked.tokens[:1], run, asked.tokens[-2:]]))
    ids = image_request(beside, policy.vision)["token_ids"]
    assert ids == [*asked.tokens[:1].tolist(), token, token, *asked.tokens[-2:].tolist()]


def test_vllm_in_this_process_gets_the_same_pictures(policy: Policy) -> None:
    asked = prompt(policy, "a", [3, 4])
    body = image_request(asked.images, policy.vision)
    local = local_prompt(body)
    assert local["prompt_token_ids"] == body["token_ids"]
    for image, picture in zip(local["multi_modal_data"]["image"], asked.images.pictures, strict=True):
        assert np.array_equal(np.asarray(image), np.asarray(policy.vision.encoder.resized(picture)))
    assert local_prompt({"token_ids": [1, 2]}) == {"prompt_token_ids": [1, 2]}


@pytest.mark.parametrize("wrong", ["fewer", "other", "none"])
def test_an_answer_to_other_ids_is_refused(wrong: str, policy: Policy) -> None:
    asked = prompt(policy, "0/7", [3])
    tokens = asked.tokens.tolist()
    check_tokens("a server", asked, {"prompt_token_ids": tokens})
    other = [tokens[0], tokens[1] + 1, *tokens[2:]]
    answer, says = {
        "fewer": (tokens[:-1], f"the trainer has {len(tokens)} tokens and the server has read {len(tokens) - 1}. .*preprocessor"),
        "other": (other, f"token 1 is {tokens[1]} in the trainer and {tokens[1] + 1} in the server. .*preprocessor"),
        "none": (None, r"does not say which tokens of row 7 \(epoch 0\) it has read.*groupwise serve"),
    }[wrong]
    with pytest.raises(EngineError, match=says):
        check_tokens("a server", asked, {"prompt_token_ids": answer})


def _png(height: int, width: int) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
