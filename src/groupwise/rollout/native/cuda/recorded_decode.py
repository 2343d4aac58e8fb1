"""How live rows draw their tokens by CUDA graphs.

R rows (completions being decoded)   P live prompts   D model width   T tokens of a completion
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.ops.linear_cross_entropy import slices
from groupwise.records import Sampling
from groupwise.rollout.native.cuda.cuda_graphs import CudaGraphs, LiveRows, RecordedDraw
from groupwise.rollout.native.decode import NextToken, TokenDecode
from groupwise.rollout.native.decode_attention import Decode
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

    def arrange(
        self, prompt_length_P: Sequence[int], entry_R: Sequence[int], length_R: Sequence[int]
    ) -> None:
        """See `TokenDecode.arrange`."""
        if not self.records:
            super().arrange(prompt_length_P, entry_R, length_R)
            return
        self.rows = LiveRows(list(prompt_length_P), list(entry_R), list(length_R))
        self.graphs.current = None

    def draw(self, newest_R: Tensor, uniform_RT: Tensor, tokens: int) -> list[NextToken]:
        """See `TokenDecode.draw`."""
        if not self.records:
            return super().draw(newest_R, uniform_RT, tokens)
        drawn = self.draw_recorded(newest_R, uniform_RT, tokens)
        if self.sampling.restricts:
            assert tokens == 1 and self.graphs.current is not None
            drawn = [self._with_enough(self.graphs.current, drawn[0], uniform_RT)]
        return drawn

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
        return self._drawn_behind(hidden_RD[:count], recorded.attend.drawn_R[:count], uniform_RT)

    def _step_of_candidates(self, token_R: Tensor, attend: Decode, uniform_RT: Tensor) -> NextToken:
        """Draw one token of every row from the first candidates, without reading anything back."""
        hidden_RD = self.forward.hidden(token_R, attend.next(), attend)
        uniform_R = uniform_RT.gather(1, attend.drawn_R[:, None])[:, 0]
        draws: list[TruncatedDraw] = []
        supports: list[tuple[slice, RowSupport]] = []
        for chunk in slices(0, uniform_R.shape[0], self.rows_at_once):
            logits_CV = self.forward.logits(hidden_RD[chunk])
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
