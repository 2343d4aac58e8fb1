"""What the engine's live rows are decoded with: one token of each after another, or many in one call.

R rows (completions being decoded)   P live prompts   D model width   V vocabulary   N tokens of a call   T tokens of a completion
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.ops import decoding
from groupwise.ops.linear_cross_entropy import chunk_rows
from groupwise.records import Sampling
from groupwise.rollout.native.attention import Decode
from groupwise.rollout.native.forward import RolloutForward
from groupwise.rollout.native.kv_cache import KVCache
from groupwise.rollout.sampling import RowSupport, draw


class NextToken(NamedTuple):
    """The next token of each row."""

    token_R: Tensor
    logp_R: Tensor
    support: tuple[tuple[slice, RowSupport], ...] = ()
    """What truncated sampling drew from, for some rows at a time."""


class TokenDecode:
    """Draws tokens for the rows that live, by any forward pass, on any device."""

    def __init__(
        self, forward: RolloutForward, sampling: Sampling, prompts: KVCache, own: KVCache, device: torch.device, *, vocabulary: int
    ) -> None:
        self.forward, self.sampling, self.attend = forward, sampling, Decode(prompts, own, device)
        self.rows_at_once = chunk_rows(vocabulary, 4)

    def arrange(self, prompt_length_P: Sequence[int], entry_R: Sequence[int], length_R: Sequence[int]) -> None:
        """The live rows have changed: row r belongs to prompt entry `entry_R[r]` and has kept `length_R[r]` own tokens."""
        self.attend.arrange(prompt_length_P, entry_R, length_R)

    def draw(self, newest_R: Tensor, uniform_RT: Tensor, steps: int) -> list[NextToken]:
        """The next tokens, one after another, the host waiting for none.

        newest_R: the rows' newest tokens.   uniform_RT: uniform numbers for all of their tokens.
        """
        drawn: list[NextToken] = []
        for _ in range(steps):
            hidden_RD = self.forward.hidden(drawn[-1].token_R if drawn else newest_R, self.attend.next(), self.attend)
            uniform_R = uniform_RT.gather(1, self.attend.drawn_R[:, None])[:, 0]
            drawn.append(self._drawn(lambda chunk, hidden_RD=hidden_RD: self.forward.logits(hidden_RD[chunk]), uniform_R))
        return drawn

    def first(self, sources: Sequence[Tensor], uniform_R: Tensor) -> NextToken:
        """The first tokens of rows, behind final hidden states (D,): equal objects have their logits computed once."""

        def logits(chunk: slice) -> Tensor:
            ids = [id(source) for source in sources[chunk]]
            places = {name: place for place, name in enumerate(dict.fromkeys(ids))}
            logits_PV = self.forward.logits(torch.stack([sources[chunk][ids.index(name)] for name in places]))
            return logits_PV[torch.tensor([places[name] for name in ids], device=logits_PV.device)]

        return self._drawn(logits, uniform_R)

    def _drawn(self, logits: Callable[[slice], Tensor], uniform_R: Tensor) -> NextToken:
        """The next tokens of rows.   logits: of some of them."""
        chunks = chunks_of(uniform_R.shape[0], self.rows_at_once)
        tokens, logps, supports = zip(*(draw(logits(chunk), uniform_R[chunk], self.sampling) for chunk in chunks), strict=True)
        token_R, logp_R = (tokens[0], logps[0]) if len(chunks) == 1 else (torch.cat(tokens), torch.cat(logps))
        support = tuple((chunk, some) for chunk, some in zip(chunks, supports, strict=True) if some is not None)
        return NextToken(token_R, logp_R, support)

    @property
    def draws_many(self) -> bool:
        """True if `draw_many` can, with these weights, this sampling and what is kept."""
        kept = self.attend.prompts.layers.values()
        return self.forward.decoder is not None and not self.sampling.truncates and all(layer.blocked for layer in kept)

    def draw_many(
        self,
        newest_R: Tensor,
        limit_R: Sequence[int],
        uniform_RT: Tensor,
        steps: int,
        *,
        ending: Sequence[int],
        until_one_ends: bool,
    ) -> decoding.Drawn:
        """Many tokens of each row in one call, after which rows are to be arranged again; see `decoding.Decoder`.

        newest_R: their newest tokens.   limit_R: the most own tokens.   uniform_RT: uniform numbers for all of their tokens.
        """
        rows, decoder = self.attend, self.forward.decoder
        assert decoder is not None
        rows.own.reserve(len(rows.length_R), min(max(rows.length_R) + steps, rows.own.most_tokens))
        limit, prompt, prompt_length = (torch.tensor(column) for column in (limit_R, rows.entry_R, rows.prompt_length_P))
        prompts = [rows.prompts.layers[layer] for layer in range(len(rows.prompts.layers))]
        return decoder(
            decoding.LiveRows(newest_R, rows.drawn_R, limit, prompt, prompt_length, uniform_RT),
            [(rows.own.layer(i, kept.like, kept.block).slab, kept.slab) for i, kept in enumerate(prompts)],
            steps,
            temperature=self.sampling.temperature,
            ending=ending,
            until_one_ends=until_one_ends,
            rows_at_once=self.rows_at_once,
        )


def chunks_of(rows: int, at_once: int) -> list[slice]:
    """Rows whose logits exist at the same time: together they stay near the cache, however large the vocabulary."""
    return [slice(start, min(start + at_once, rows)) for start in range(0, rows, at_once)]
