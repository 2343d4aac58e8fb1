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
from groupwise.rollout.native.decode_attention import Decode, LiveRows
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


def uniform_of(uniform_RT: Tensor, place_R: Tensor) -> Tensor:
    """Return each row's uniform number (R,) for one token of its completion.

    place_R: which token it is, from 0.
    """
    place_R1 = place_R.unsqueeze(1)
    return uniform_RT.gather(1, place_R1).squeeze(1)


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

    def arrange(self, rows: LiveRows) -> None:
        """Take the rows that live from now on."""
        self.attend.arrange(rows)

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
        position_R = attend.next()
        hidden_RD = self.forward.hidden(token_R, position_R, attend)
        return self._drawn_behind(hidden_RD, attend.drawn_R, uniform_RT)

    def _drawn_behind(self, hidden_RD: Tensor, place_R: Tensor, uniform_RT: Tensor) -> NextToken:
        """Draw a token of every row.   place_R: which token of its completion each draws."""

        def logits(chunk: slice) -> Tensor:
            hidden_CD = hidden_RD[chunk]
            return self.forward.logits(hidden_CD)

        uniform_R = uniform_of(uniform_RT, place_R)
        return self._sample(logits, uniform_R)

    def first(self, sources: Sequence[Tensor], uniform_R: Tensor) -> NextToken:
        """Draw the first tokens of rows, behind final hidden states (D,): equal objects have their
        logits computed once.
        """

        def logits(chunk: slice) -> Tensor:
            place_of: dict[Tensor, int] = {}
            places = []
            for source in sources[chunk]:
                place = place_of.setdefault(source, len(place_of))
                places.append(place)
            hidden_PD = torch.stack(list(place_of))
            logits_PV = self.forward.logits(hidden_PD)
            place_C = torch.tensor(places, device=logits_PV.device)
            return logits_PV[place_C]

        return self._sample(logits, uniform_R)

    def _sample(self, logits: Callable[[slice], Tensor], uniform_R: Tensor) -> NextToken:
        """Sample the next tokens of rows, some rows at a time: their logits stay near the cache,
        however large the vocabulary.

        logits: the logits of a slice of the rows.
        """
        tokens: list[Tensor] = []
        logps: list[Tensor] = []
        supports: list[tuple[slice, RowSupport]] = []
        rows = uniform_R.shape[0]
        for chunk in slices(0, rows, self.rows_at_once):
            uniform_C = uniform_R[chunk]
            # Logits have no name: one would keep those of a chunk while the next are computed.
            token_C, logp_C, support = draw(logits(chunk), uniform_C, self.sampling)
            tokens.append(token_C)
            logps.append(logp_C)
            if support is not None:
                supports.append((chunk, support))
        token_R, logp_R = tokens[0], logps[0]
        if len(tokens) > 1:
            token_R = torch.cat(tokens)
            logp_R = torch.cat(logps)
        return NextToken(token_R, logp_R, tuple(supports))

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
        rows = len(attend.length_R)
        longest = max(attend.length_R) + tokens
        needed = min(longest, attend.own.most_tokens)
        attend.own.reserve(rows, needed)
        slabs = []
        for layer in range(len(attend.prompts.layers)):
            prompt = attend.prompts.layers[layer]
            own = attend.own.layer(layer, prompt.like, prompt.blocked)
            slabs.append((own.slab, prompt.slab))
        limits = torch.tensor(limit_R)
        entries = torch.tensor(attend.entry_R)
        prompt_lengths = torch.tensor(attend.prompt_length_P)
        return decoder(
            newest_R,
            attend.drawn_R,
            limits,
            entries,
            prompt_lengths,
            uniform_RT,
            slabs,
            tokens,
            temperature=self.sampling.temperature,
            ending=ending,
            until_one_ends=until_one_ends,
            rows_at_once=self.rows_at_once,
        )
