"""The next tokens of all rows are launched before the host reads the last ones.

A GPU would wait while the host reads tokens, ends rows and launches again.  So a row's end is found
one reading late: what it has drawn behind its end is dropped, and so is what was launched for it.
What the others have drawn stays, in whatever places they are by then.

R rows (completions being decoded)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from groupwise.rollout.native.decode import NextToken
from groupwise.rollout.native.kv_cache import dense_order
from groupwise.rollout.native.scheduler import TOKENS_PER_SYNC, Completed, RowTokens, Scheduler


class LaunchedTokens:
    """Tokens of some rows on their way to the host."""

    def __init__(self, drawn: Sequence[NextToken]) -> None:
        """Begin the copy: what is launched behind it is not waited for."""
        rows = drawn[0].token_R.shape[0]
        self.count = len(drawn)
        """Tokens of each row."""
        self.rows = list(range(rows))
        """Which of the launched rows live, in the order of their places."""
        pairs = []
        for one in drawn:
            token_R = one.token_R.double()  # it holds every id exactly
            logp_R = one.logp_R.double()
            pairs.append(torch.stack([token_R, logp_R]))
        numbers_2RT = torch.stack(pairs, -1)
        self._numbers = numbers_2RT.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if numbers_2RT.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def keep(self, order: Sequence[int]) -> None:
        """Take the places of the rows that go on: row i is what was row `order[i]`."""
        self.rows = [self.rows[place] for place in order]

    def read(self) -> RowTokens:
        """Wait for the copy; return what each row that lives has drawn."""
        if self._copied is not None:
            self._copied.synchronize()
        token_lists, logp_lists = self._numbers.tolist()
        read = RowTokens([], [])
        for row in self.rows:
            tokens = list(map(int, token_lists[row]))
            read.tokens.append(tokens)
            read.logps.append(logp_lists[row])
        return read


class AheadScheduler(Scheduler):
    """A scheduler that is one reading behind its device."""

    launched: LaunchedTokens | None = None
    """Tokens that are drawn, and not read."""

    def advance(self) -> Completed:
        """See `Scheduler.advance`.  Before the weights change, what they have drawn is read."""
        changed = self.prepared_version != self.engine.version
        if changed and self.launched is not None:
            finished = self._read(self._taken())
            if finished:
                self.unfinished -= len(finished)
                return finished
        return super().advance()

    def _step(self) -> Completed:
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
        fewest_left = min(sequence.left for sequence in self.rows.live)
        drawable = fewest_left - self.unread
        count = min(TOKENS_PER_SYNC["cuda"], drawable)
        if count > 0:
            self.launched = LaunchedTokens(self._draw(count))

    def _taken(self) -> LaunchedTokens:
        """Take the tokens that are launched; none is launched then."""
        launched, self.launched = self.launched, None
        assert launched is not None
        return launched

    def _read(self, last: LaunchedTokens) -> Completed:
        """Read tokens, and end rows.  From then on the rows have what is launched unread."""
        read = last.read()
        self._drop_behind_ends(read)
        self.unread = 0
        if self.launched is not None:
            self.unread = self.launched.count
        return self._commit(0, read, changed=False)

    def _remove(self, ended: Sequence[int]) -> None:
        """See `Scheduler._remove`."""
        if self.launched is not None:
            order = dense_order(len(self.rows.live), ended)
            self.launched.keep(order)
        super()._remove(ended)
