"""The next tokens of all rows are launched before the host reads the last ones.

A GPU would wait while the host reads tokens, ends rows and launches again.  So a row's end is found
one reading late: what it has drawn behind its end is dropped, and so is what was launched for it.
What the others have drawn stays, in whatever places they are by then.

R rows (completions being decoded)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from groupwise.records import Rollout
from groupwise.rollout.native.decode import NextToken
from groupwise.rollout.native.kv_cache import dense_order
from groupwise.rollout.native.scheduler import TOKENS_PER_SYNC, Scheduler


class LaunchedTokens:
    """Tokens of some rows on their way to the host."""

    def __init__(self, drawn: Sequence[NextToken]) -> None:
        """Begin the copy: what is launched behind it is not waited for."""
        pairs = [torch.stack([one.token_R.double(), one.logp_R.double()]) for one in drawn]
        self.count = len(drawn)
        """Tokens of each row."""
        self.rows = list(range(drawn[0].token_R.shape[0]))
        """Which of the launched rows live, in the order of their places."""
        # Float64 holds every id exactly.
        self._numbers = torch.stack(pairs, -1).to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if drawn[0].token_R.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def keep(self, order: Sequence[int]) -> None:
        """Take the places of the rows that go on: row i is what was row `order[i]`."""
        self.rows = [self.rows[place] for place in order]

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Wait for the copy; return tokens and log-probs (nats) of each row that lives."""
        if self._copied is not None:
            self._copied.synchronize()
        token_lists, logp_lists = self._numbers.tolist()
        tokens = [list(map(int, token_lists[row])) for row in self.rows]
        return tokens, [logp_lists[row] for row in self.rows]


class AheadScheduler(Scheduler):
    """A scheduler that is one reading behind its device."""

    launched: LaunchedTokens | None = None
    """Tokens that are drawn, and not read."""

    def advance(self) -> list[tuple[Rollout, ...]]:
        """See `Scheduler.advance`.  Before the weights change, what they have drawn is read."""
        if self.launched is not None and self.prepared_version != self.engine.version:
            finished = self._read(self._taken())
            if finished:
                self.unfinished -= len(finished)
                return finished
        return super().advance()

    def _step(self) -> list[tuple[Rollout, ...]]:
        """Launch the tokens behind those that are launched, then read these.

        While sequences wait for a place, or for an environment, each end is looked for at once.
        """
        if self.waiting or self.environment is not None or self.sampling.restricts:
            return super()._step()
        if self.launched is None:
            self._launch()
        last = self._taken()
        self.unread = last.count
        self._launch()
        return self._read(last)

    def _launch(self) -> None:
        """Draw the next tokens, if no row can be at its limit by then."""
        rows = self.rows
        left = min(sequence.left for sequence in rows.live) - self.unread
        count = min(TOKENS_PER_SYNC["cuda"], left)
        if count == 0:
            return
        drawn = self.decode.draw(rows.token_R, rows.uniform_RT, count)
        rows.token_R = drawn[-1].token_R
        self.launched = LaunchedTokens(drawn)

    def _taken(self) -> LaunchedTokens:
        """Take the tokens that are launched; none is launched then."""
        launched, self.launched = self.launched, None
        assert launched is not None
        return launched

    def _read(self, last: LaunchedTokens) -> list[tuple[Rollout, ...]]:
        """Read tokens, and end rows.  From then on the rows have what is launched unread."""
        tokens, logps = last.read()
        for place, sequence in enumerate(self.rows.live):
            kept = self.stopping.kept(sequence.written, tokens[place])
            tokens[place], logps[place] = tokens[place][:kept], logps[place][:kept]
        self.unread = 0 if self.launched is None else self.launched.count
        return self._commit(0, tokens, logps, changed=False)

    def _remove(self, ended: Sequence[int]) -> None:
        """See `Scheduler._remove`."""
        if self.launched is not None:
            self.launched.keep(dense_order(len(self.rows.live), ended))
        super()._remove(ended)
