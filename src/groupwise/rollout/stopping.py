"""When a completion ends: an EOS id, a stop string, or the limit; in this order where several meet
in one token.

An EOS that was sampled is kept, and it is trained: the loss mask is `Rollout.trained` (records.py),
True for every token that the policy wrote.  What ends at the limit has no EOS, and no PAD stands
anywhere.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from groupwise.records import Finish

EDGE = 8
"""Characters at the beginning of a cut text that may differ from the whole one's: a part of a
character, a stripped space.
"""


class Stopping:
    """Decides after every token whether its completion has ended.

    Stop strings are looked for in the text with special tokens kept, so that a special token's text
    can be one.
    """

    def __init__(
        self, eos_ids: tuple[int, ...], stop: tuple[str, ...], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.eos_ids = frozenset(eos_ids)
        self.stop = stop
        self.tokenizer = tokenizer
        self._endings = tuple(text[-1] for text in stop)
        self._longest = max(map(len, stop), default=0)
        self._may_end: dict[int, bool] = {}

    def finish(self, tokens: list[int], limit: int) -> Finish | None:
        """Why a completion ends with the last of these tokens; None if it continues."""
        if tokens[-1] in self.eos_ids:
            return Finish.EOS
        if self.stop and self._completes(tokens):
            return Finish.STOP
        return Finish.LENGTH if len(tokens) >= limit else None

    def kept(self, tokens: list[int], drawn: list[int]) -> int:
        """How many of the tokens drawn behind these belong to the completion: up to the first that
        ends it.

        The last is not asked about: `finish` is what says why a completion ends.
        """
        so_far = list(tokens) if self.stop else []
        for count, token in enumerate(drawn[:-1], 1):
            if self.stop:
                so_far.append(token)
            if token in self.eos_ids or (self.stop and self._completes(so_far)):
                return count
        return len(drawn)

    def _completes(self, tokens: list[int]) -> bool:
        """True if the last token completes a stop string.  Every token is asked about, so a hit is
        always a new one.
        """
        last = tokens[-1]
        if last not in self._may_end:
            # Only a token whose own text holds the last character of a stop string can complete
            # one.  Texts that depend on their neighbours (parts of a character, stripped spaces)
            # always count.
            piece = self._text([last])
            unsure = (
                not piece.strip()
                or "\ufffd" in piece
                or any(ending.isspace() for ending in self._endings)
            )
            self._may_end[last] = unsure or any(ending in piece for ending in self._endings)
        if not self._may_end[last]:
            return False
        # The end of the text suffices: the longest stop string before the last token's text.  How
        # many tokens that is depends on them: a character may be four, and some tokens have no
        # text.
        count = 4 * self._longest + EDGE
        while True:
            text = self._text(tokens[-count:])
            if count >= len(tokens):
                break
            text = text[EDGE:]
            if len(text) >= self._longest + len(self._text(tokens[-1:])):
                break
            count *= 2
        return any(stop in text for stop in self.stop)

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))
