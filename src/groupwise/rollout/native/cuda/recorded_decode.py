"""How live rows draw their tokens by CUDA graphs.

R rows (completions being decoded)   P live prompts   D model width   T tokens of a completion
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.ops.linear_cross_entropy import slices
from groupwise.records import Sampling
from groupwise.rollout.native.cuda.cuda_graphs import CudaGraphs, RecordedDraw
from groupwise.rollout.native.decode import NextToken, TokenDecode, uniform_of
from groupwise.rollout.native.decode_attention import Decode, LiveRows
from groupwise.rollout.native.forward import RolloutForward
from groupwise.rollout.sampling import RowSupport, TruncatedDraw, draw_once


class RecordedDecode(TokenDecode):
    """Draws tokens by CUDA graphs.

    Where recurrent layers keep states, which Python copies, it draws as `TokenDecode` does.
    """

    def __init__(
        self,
        forward: RolloutForward,
        sampling: Sampling,
        graphs: CudaGraphs,
        *,
        vocabulary: int,
    ) -> None:
        """graphs: they read the weights of `forward`, and bring the caches."""
        super().__init__(
            forward, sampling, graphs.prompts, graphs.own, graphs.device, vocabulary=vocabulary
        )
        self.graphs = graphs
        self.rows = LiveRows([], [], [])

    @property
    def records(self) -> bool:
        """True if graphs draw: no recurrent layer keeps states."""
        return not self.attend.prompts.states

    def arrange(self, rows: LiveRows) -> None:
        """See `TokenDecode.arrange`."""
        if not self.records:
            super().arrange(rows)
            return
        self.rows = rows
        self.graphs.current = None

    def draw(self, newest_R: Tensor, uniform_RT: Tensor, tokens: int) -> list[NextToken]:
        """See `TokenDecode.draw`."""
        if not self.records:
            return super().draw(newest_R, uniform_RT, tokens)
        drawn = self.draw_recorded(newest_R, uniform_RT, tokens)
        if not self.sampling.restricts:
            return drawn
        recorded = self.graphs.current
        assert tokens == 1 and recorded is not None
        next_token = self._with_enough(recorded, drawn[0], uniform_RT)
        return [next_token]

    def draw_recorded(self, newest_R: Tensor, uniform_RT: Tensor, tokens: int) -> list[NextToken]:
        """Draw the next tokens by graphs.  Truncated sampling may have had too few candidates."""
        sampling = self.sampling
        way = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        step = self._step_of_candidates if sampling.restricts else self._step
        drawn = self.graphs.draw(step, way, self.rows, newest_R, uniform_RT, tokens)
        self.rows = self.rows.after(tokens)
        return drawn

    def _with_enough(
        self, recorded: RecordedDraw, first_draw: NextToken, uniform_RT: Tensor
    ) -> NextToken:
        """Draw from more candidates where the first were too few."""
        count = first_draw.token_R.shape[0]
        enough_R, hidden_RD = recorded.drawn.enough_R, recorded.drawn.hidden_RD
        assert enough_R is not None and hidden_RD is not None
        if bool(enough_R[:count].all()):
            return first_draw
        place_R = recorded.attend.drawn_R[:count]
        return self._drawn_behind(hidden_RD[:count], place_R, uniform_RT)

    def _step_of_candidates(self, token_R: Tensor, attend: Decode, uniform_RT: Tensor) -> NextToken:
        """Draw one token of every row from the first candidates, without reading anything back."""
        position_R = attend.next()
        hidden_RD = self.forward.hidden(token_R, position_R, attend)
        uniform_R = uniform_of(uniform_RT, attend.drawn_R)
        draws: list[TruncatedDraw] = []
        supports: list[tuple[slice, RowSupport]] = []
        rows = uniform_R.shape[0]
        for chunk in slices(0, rows, self.rows_at_once):
            hidden_CD = hidden_RD[chunk]
            logits_CV = self.forward.logits(hidden_CD)
            drawn = draw_once(logits_CV, uniform_R[chunk], self.sampling)
            draws.append(drawn)
            supports.append((chunk, drawn.support))
        return NextToken(
            torch.cat([drawn.token_R for drawn in draws]),
            torch.cat([drawn.logp_R for drawn in draws]),
            tuple(supports),
            torch.cat([drawn.enough_R for drawn in draws]),
            hidden_RD,
        )
