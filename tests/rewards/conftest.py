"""Groups of completions to score, made from their texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from groupwise.records import Finish, Prompt, Rollout, Sampling


@pytest.fixture
def group() -> Callable[..., list[Rollout]]:
    """`group("4", "5", answer="4")`: completions of one prompt, a token per character and an EOS (id 0); columns by keyword.

    A `prompt` that is messages is what the chat template was given.
    """

    def make(*texts: str, id: str = "0/0", text: str = "2+2=", **row: Any) -> list[Rollout]:
        chat = row.get("prompt")
        messages = tuple(chat) if isinstance(chat, list) else None
        prompt = Prompt(id=id, tokens=np.array([7, 8]), text=text, row=row, messages=messages)
        return [_rollout(prompt, index, completion) for index, completion in enumerate(texts)]

    return make


def _rollout(prompt: Prompt, index: int, text: str) -> Rollout:
    tokens: Sequence[int] = [*(ord(c) for c in text), 0]
    return Rollout(
        prompt=prompt,
        index=index,
        tokens=np.array(tokens, dtype=np.int64),
        behavior_logp=np.zeros(len(tokens)),
        finish=Finish.EOS,
        eos_ids=(0,),
        sampling=Sampling(),
        text=text,
    )
