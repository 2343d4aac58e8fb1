"""How the engine's live rows draw their tokens: one by one, or many in one call of the compiled
kernels.  On a GPU `cuda/recorded_decode.py` draws them.

R rows (completions being decoded)   P live prompts   D model width   V vocabulary
N tokens of a call   T tokens of a completion
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.ops import decoding
from groupwise.ops.linear_cross_entropy import chunk_rows, slices
from groupwise.records import Sampling
from groupwise.rollout.native.decode_attention import Decode
from groupwise.rollout.native.forward import RolloutForward
from groupwise.rollout.native.kv_cache import KVCache
from groupwise.rollout.sampling import RowSupport, draw


class NextToken(NamedTuple):
    """The next token of each row."""

    token_R: Tensor
    logp_R: Tensor
    support: tuple[tuple[slice, RowSupport], ...] = ()
    """The tokens that truncated sampling drew from, for some rows at a time."""
    enough_R: Tensor | None = None
    """True where truncated sampling had enough candidates; None if it has seen to that."""
    hidden_RD: Tensor | None = None
    """Final hidden states, with `enough_R`."""


class TokenDecode:
    """Draws tokens for the rows that live, by any forward pass, on any device."""

    def __init__(
        self,
        forward: RolloutForward,
        sampling: Sampling,
        prompts: KVCache,
        own: KVCache,
        device: torch.device,
        *,
        vocabulary: int,
    ) -> None:
        """prompts, own: the caches of prompts and completions."""
        self.forward = forward
        self.sampling = sampling
        self.attend = Decode(prompts, own, device)
        self.rows_at_once = chunk_rows(vocabulary, 4)

    def arrange(
        self, prompt_length_P: Sequence[int], entry_R: Sequence[int], length_R: Sequence[int]
    ) -> None:
        """Take the rows that live from now on: row r belongs to prompt entry `entry_R[r]` and has
        kept `length_R[r]` own tokens.
        """
        self.attend.arrange(prompt_length_P, entry_R, length_R)

    def draw(self, newest_R: Tensor, uniform_RT: Tensor, tokens: int) -> list[NextToken]:
        """Draw the next tokens, one after another, the host waiting for none.

        newest_R: the rows' newest tokens.   uniform_RT: uniform numbers for all of their tokens.
        """
        drawn = []
        for _ in range(tokens):
            next_token = self._step(newest_R, self.attend, uniform_RT)
            newest_R = next_token.token_R
            drawn.append(next_token)
        return drawn

    def _step(self, token_R: Tensor, attend: Decode, uniform_RT: Tensor) -> NextToken:
        """Draw one token of every row."""
        hidden_RD = self.forward.hidden(token_R, attend.next(), attend)
        return self._drawn_behind(hidden_RD, attend.drawn_R, uniform_RT)

    def _drawn_behind(self, hidden_RD: Tensor, place_R: Tensor, uniform_RT: Tensor) -> NextToken:
        """Draw a token of every row.   place_R: which token of its completion each draws."""
        uniform_R = uniform_RT.gather(1, place_R[:, None])[:, 0]
        return self._sample(lambda chunk: self.forward.logits(hidden_RD[chunk]), uniform_R)

    def first(self, sources: Sequence[Tensor], uniform_R: Tensor) -> NextToken:
        """Draw the first tokens of rows, behind final hidden states (D,): equal objects have their
        logits computed once.
        """

        def logits(chunk: slice) -> Tensor:
            ids = [id(source) for source in sources[chunk]]
            distinct = list(dict.fromkeys(ids))
            first_of = [ids.index(name) for name in distinct]
            hidden_PD = torch.stack([sources[chunk][place] for place in first_of])
            logits_PV = self.forward.logits(hidden_PD)
            place_R = [distinct.index(name) for name in ids]
            return logits_PV[torch.tensor(place_R, device=logits_PV.device)]

        return self._sample(logits, uniform_R)

    def _sample(self, logits: Callable[[slice], Tensor], uniform_R: Tensor) -> NextToken:
        """Sample the next tokens of rows, some rows at a time: their logits stay near the cache,
        however large the vocabulary.

        logits: the logits of a slice of the rows.
        """
        tokens: list[Tensor] = []
        logps: list[Tensor] = []
        supports: list[tuple[slice, RowSupport]] = []
        for chunk in slices(0, uniform_R.shape[0], self.rows_at_once):
            token_R, logp_R, support = draw(logits(chunk), uniform_R[chunk], self.sampling)
            tokens.append(token_R)
            logps.append(logp_R)
            if support is not None:
                supports.append((chunk, support))
        if len(tokens) == 1:
            return NextToken(tokens[0], logps[0], tuple(supports))
        return NextToken(torch.cat(tokens), torch.cat(logps), tuple(supports))

    @property
    def draws_many(self) -> bool:
        """True if `draw_many` can, with these weights, this sampling and these caches."""
        if self.forward.decoder is None or self.sampling.restricts:
            return False
        layers = self.attend.prompts.layers.values()
        return all(layer.blocked is not None for layer in layers)

    def draw_many(
        self,
        newest_R: Tensor,
        limit_R: Sequence[int],
        uniform_RT: Tensor,
        tokens: int,
        *,
        ending: Sequence[int],
        until_one_ends: bool,
    ) -> decoding.Drawn:
        """Draw many tokens of each row in one call, after which rows are to be arranged again.

        newest_R: their newest tokens.   limit_R: the most own tokens.   uniform_RT: uniform numbers
        for all of their tokens.   ending, until_one_ends: see `decoding.Decoder`.
        """
        attend, decoder = self.attend, self.forward.decoder
        assert decoder is not None
        longest = max(attend.length_R)
        needed = min(longest + tokens, attend.own.most_tokens)
        attend.own.reserve(len(attend.length_R), needed)
        slabs = []
        for layer in range(len(attend.prompts.layers)):
            prompt = attend.prompts.layers[layer]
            own = attend.own.layer(layer, prompt.like, prompt.blocked)
            slabs.append((own.slab, prompt.slab))
        return decoder(
            newest_R,
            attend.drawn_R,
            torch.tensor(limit_R),
            torch.tensor(attend.entry_R),
            torch.tensor(attend.prompt_length_P),
            uniform_RT,
            slabs,
            tokens,
            temperature=self.sampling.temperature,
            ending=ending,
            until_one_ends=until_one_ends,
            rows_at_once=self.rows_at_once,
        )
