"""The native engine: samples in the trainer's process, on the training weights, with every prompt
computed once.

The waiting prompts are sorted by length, so that those decoded together are alike.  A prompt is
prefilled when the first of its completions gets a row; a completion that ends is computed no
further, and the next waiting one takes its row.  All live rows go through the model as one flat
stream: its linear layers see (R, D), whatever prompts and lengths the rows have.

With a world a completion is a conversation.  While it waits for an answer its keys and values lie
aside and another has its row; then what was answered is computed in one pass behind them, and the
next turn is drawn.  Nobody waits for anybody else's turn. Where a step costs what its rows cost,
only a few turns are drawn at a time (`TURNS`), so that some are drawn while others wait.

R rows (completions being decoded)   P prompts prefilled together   V vocabulary   D model width   T
tokens
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from groupwise.environments.conversation import EpisodeWorld, Stream
from groupwise.errors import EngineError
from groupwise.models.attention import Attend
from groupwise.models.backbone import hidden
from groupwise.models.policy import Policy
from groupwise.ops.decoding import Decoder
from groupwise.ops.linear_cross_entropy import head_logits
from groupwise.records import Prompt, Rollout, Sampling
from groupwise.rollout import sampling as draws
from groupwise.rollout.engine import InProcess, check_request, completion_limit, fitting
from groupwise.rollout.episodes import Conversations, Groups
from groupwise.rollout.native.attention import Extend, Kept, KVCache, Prefill, whole
from groupwise.rollout.native.decode import NextToken, TokenDecode
from groupwise.rollout.native.forward import RolloutForward, SpecialisedForward, is_known
from groupwise.rollout.stopping import Stopping
from groupwise.utils.portions import portions

PREFILL_TOKENS = 8192
"""Most tokens of one prefill pass (a longer prompt has a pass of its own): bounds the memory of its
activations.
"""
FIRST_TOKENS = 64
"""Capacity for own tokens that a row starts with."""
STEPS, WORK, FEW = 16, 16 * 10**9, 12
"""Tokens that rows draw before Python looks at them again, where it need not look at each; fewer
where these times their rows times
the weights are more than `WORK`: about a fifth of a second, in which nobody hears a signal (one
token of a larger model takes longer).  Fewer than `FEW` rows take as long as `FEW`, for the weights
have to be read."""
TURNS = 16
"""Turns of conversations that each thread of a processor draws at a time: as many as its kernels
take at once.  With more a step takes longer by as much, and turns that began together would all
end, and wait for their answers, together."""

TOKENS_PER_SYNC = {"cpu": 1, "cuda": 8}
"""Tokens that rows draw before the host looks at any, on a CPU and on any other device: it waits
for a GPU once instead of eight times.  What a row draws behind its end is dropped."""


class ModuleForward:
    """Through the Hugging Face modules: any family, any precision."""

    decoder: Decoder | None = None

    def __init__(self, policy: Policy) -> None:
        self.policy, self.head = policy, policy.head

    def hidden(self, tokens_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        """See `RolloutForward`."""
        return hidden(self.policy, tokens_T, position_T, attend)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `RolloutForward`."""
        with self.policy.precision():
            return head_logits(hidden_RD, self.head)


class NativeEngine(InProcess):
    """Implements `engine.Engine`.  A completion depends on (weights, seed, prompt, index, sampling)
    only, whatever runs beside it (up to rounding: products over different numbers of rows may
    differ in the last bit)."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int,
        keep_special_tokens: bool = False,
        world: EpisodeWorld | None = None,
    ) -> None:
        """max_rows: completions decoded at the same time.   world: that answers their turns; the
        caller closes it.

        Raises EngineError for a policy that cannot run packed streams.
        """
        if max_rows < 1:
            raise EngineError(f"max_rows must be at least 1, got {max_rows}")
        if policy.attention == "single":
            raise EngineError(
                "the native engine needs packed streams, but model.attention is 'single'; set"
                " rollout.engine to 'transformers'"
            )
        self.policy = policy
        self.max_rows = max_rows
        self.keep_special_tokens = keep_special_tokens
        self.world = world

    @property
    def path(self) -> str:
        """`specialised` where the model is one whose every step `forward.py` knows, else `module`."""
        return "specialised" if is_known(self.policy) else "module"

    def prepared(self, positions: int) -> RolloutForward:
        """A way through the weights as they are now, for sequences of up to `positions` tokens."""
        return (
            SpecialisedForward(self.policy, positions)
            if is_known(self.policy)
            else ModuleForward(self.policy)
        )

    def limit(self, prompt: Prompt, index: int, sampling: Sampling) -> int:
        """Longest completion of one row in tokens.  Benchmarks override it to fix a schedule of
        lengths.
        """
        return completion_limit(self.policy, prompt, sampling)

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        """See `engine.Engine`.

        Weights that change between two groups are those of all tokens drawn from then on; other
        completions may have drawn up to `STEPS` - 1 tokens more than the group's last.
        """
        check_request(self.policy, prompts, group_size, sampling)
        with fitting(self.max_rows):
            run = _Run(self, prompts, group_size, sampling, seed)
        with run.conversations:
            while run.unfinished:
                with fitting(self.max_rows), self._sampling():
                    finished = run.advance()
                # Outside: whoever receives the group computes in its own mode.
                yield from finished

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        """Dropout off, no autograd; the model's modes are restored afterwards."""
        training = [module for module in self.policy.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with torch.inference_mode():
                yield
        finally:
            for module in training:
                module.training = True


@dataclass(slots=True, eq=False)
class _Past:
    """What rows are decoded behind: a prompt, or a context that a world has named."""

    tokens: np.ndarray
    users: int
    """Completions behind it that have not ended, waiting ones included."""
    entry: int = -1
    """Its place in the store of prompts; -1 before the prefill and after its last row."""
    hidden_D: Tensor | None = None
    """Final hidden state of its last token, while it has an entry."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Row(Stream):
    """A completion being decoded."""

    past: _Past
    kept: int = 0
    """Own tokens whose keys and values are in `aside`, of a row without a place in the stores."""
    aside: Kept | None = None

    @property
    def missing(self) -> int:
        """Own tokens whose keys and values have to be computed before it draws another; 0 of a row
        that begins.
        """
        return self.own - self.kept


class _Prompts:
    """The pasts that are prefilled, each in the entry of the store that has its number."""

    def __init__(self, store: KVCache) -> None:
        self.store = store
        self.pasts: list[_Past] = []

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [past.tokens.size for past in self.pasts]

    def prefill(
        self, pasts: Sequence[_Past], forward: RolloutForward, device: torch.device
    ) -> None:
        """Compute them in passes of bounded length; their keys and values become entries."""
        for batch in portions(pasts, lambda past: past.tokens.size, PREFILL_TOKENS):
            lengths = [past.tokens.size for past in batch]
            self.store.reserve(self.store.live + len(batch), max(lengths))
            tokens_T = torch.from_numpy(np.concatenate([past.tokens for past in batch])).to(device)
            last = _hidden_of_last(
                forward, tokens_T, [0] * len(batch), lengths, Prefill(self.store, lengths)
            )
            for past, hidden_D in zip(batch, last, strict=True):
                past.entry, past.hidden_D = self.store.live, hidden_D
                self.store.live += 1
            self.pasts += batch

    def forget_unused(self) -> None:
        """Close the gaps of those without unfinished completions."""
        over = [entry for entry, past in enumerate(self.pasts) if past.users == 0]
        if over:
            order = self.store.drop(over, max(self.lengths))
            for entry in over:
                self.pasts[entry].entry, self.pasts[entry].hidden_D = -1, None
            self.pasts = [self.pasts[entry] for entry in order]
            for entry, past in enumerate(self.pasts):
                past.entry = entry


class _Rows:
    """The completions that are being decoded, each in the entry of the store that has its number."""

    token_R: Tensor
    """The newest token of each."""
    uniform_RT: Tensor
    """Uniform numbers for the tokens of its turn."""

    def __init__(self, store: KVCache) -> None:
        self.store = store
        self.live: list[_Row] = []

    def extend(
        self, rows: Sequence[_Row], prompts: _Prompts, forward: RolloutForward, device: torch.device
    ) -> dict[_Row, Tensor]:
        """Compute what waiting rows have and the store has not: the last token of a turn, and what
        was answered.

        The rows get the places behind those that live, and are ordered by how much there is, most
        first.  Returns the final hidden state of each one's last token.
        """
        hidden: dict[_Row, Tensor] = {}
        for batch in portions(rows, lambda row: row.missing, PREFILL_TOKENS):
            first, counts = len(self.live) + len(hidden), [row.missing for row in batch]
            entries, kept = [row.past.entry for row in batch], [row.kept for row in batch]
            extend = Extend(
                prompts.store, self.store, first, prompts.lengths, entries, kept, counts
            )
            for place, row in enumerate(batch, first):
                if row.aside is not None:
                    self.store.put(place, row.aside)
                    row.aside = None
            tokens_T = torch.tensor(
                [token for row in batch for token in row.tokens[row.begin + row.kept :]],
                device=device,
            )
            starts = [row.past.tokens.size + row.kept for row in batch]
            hidden |= zip(
                batch, _hidden_of_last(forward, tokens_T, starts, counts, extend), strict=True
            )
        return hidden

    def join(self, new: Sequence[_Row], token_R: Tensor, uniform_RT: Tensor) -> None:
        """Rows come in behind those that live."""
        if self.live:
            short = uniform_RT.shape[1] - self.uniform_RT.shape[1]
            pad = torch.nn.functional.pad
            uniform_RT = torch.cat(
                [pad(self.uniform_RT, (0, max(0, short))), pad(uniform_RT, (0, max(0, -short)))]
            )
            token_R = torch.cat([self.token_R, token_R])
        self.token_R, self.uniform_RT = token_R, uniform_RT
        self.live += new
        self.store.live = len(self.live)
        self.store.reserve(self.store.live, 1)

    def leave(self, ended: Sequence[int]) -> None:
        """Close the gaps that ended rows leave."""
        order = self.store.drop(ended, max((row.own for row in self.live), default=1) - 1)
        self.live = [self.live[r] for r in order]
        if self.live:
            order_R = torch.tensor(order, dtype=torch.int64, device=self.token_R.device)
            self.token_R, self.uniform_RT = self.token_R[order_R], self.uniform_RT[order_R]


class _Run:
    """One call of `generate`: completions wait for a place, live, and with a world listen to it
    between turns.
    """

    forward: RolloutForward
    decode: TokenDecode
    places: int
    """Rows that may live at the same time."""

    def __init__(
        self,
        engine: NativeEngine,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
    ) -> None:
        self.engine, self.policy, self.sampling, self.seed = engine, engine.policy, sampling, seed
        self.world, self.device = engine.world, engine.policy.device
        self.stopping = Stopping(self.policy.eos_ids, sampling.stop, self.policy.tokenizer)
        self.unfinished, self.groups = len(prompts), Groups(group_size)
        self.prepared: int | None = None
        self.pasts = {
            (prompt.id, prompt.tokens.tobytes()): _Past(prompt.tokens, group_size)
            for prompt in prompts
        }
        """What completions are drawn behind, by prompt and ids."""
        rows = [
            _Row(prompt=prompt, index=index, limit=engine.limit(prompt, index, sampling), past=past)
            for prompt in sorted(prompts, key=lambda prompt: prompt.tokens.size)
            for past in [self.pasts[prompt.id, prompt.tokens.tobytes()]]
            for index in range(group_size)
        ]
        self.waiting = deque(rows if self.world is None else ())
        """Rows that wait for a place."""
        streams = () if self.world is None else rows
        how = {"rows": engine.max_rows, "keep_special_tokens": engine.keep_special_tokens}
        self.conversations = Conversations(self.policy, self.world, sampling, seed, streams, **how)
        if not rows:
            return
        self.positions = max(row.prompt.tokens.size + row.limit for row in rows)
        longest, most = max(row.limit for row in rows), rows[-1].prompt.tokens.size
        most_of_prompt, most_own = most, longest
        if (
            self.world is not None
            # behind a shorter context there may be more own tokens, and one may be longer than all
            # prompts
        ):
            most_of_prompt, most_own = (
                self.policy.context,
                max(longest, min(sampling.max_new_tokens, self.policy.context)),
            )
        places = min(engine.max_rows, len(rows))
        entries = min(len(prompts), -(-places // group_size))
        self.prompts = _Prompts(KVCache(entries, whole(most), most_tokens=whole(most_of_prompt)))
        self.rows = _Rows(
            KVCache(places, min(whole(longest), FIRST_TOKENS), most_tokens=whole(most_own))
        )
        self.weights = sum(parameter.numel() for parameter in self.policy.model.parameters())

    def advance(self) -> list[tuple[Rollout, ...]]:
        """Decode until a group is complete; returns all that are."""
        if self.prepared != self.engine.version:
            self._prepare()
        finished: list[tuple[Rollout, ...]] = []
        while not finished and self.unfinished:
            if self.world is not None:
                finished += self._listen()
            while not finished and self.waiting and len(self.rows.live) < self.places:
                finished += self._admit()
            if self.rows.live and not finished:
                finished += self._step()
        self.unfinished -= len(finished)
        return finished

    def _listen(self) -> list[tuple[Rollout, ...]]:
        """Begin conversations for rows that would be free, and take the replies that are there;
        without any other work, wait.
        """
        talks, idle = self.conversations, not self.rows.live and not self.waiting
        taken = (
            len(self.rows.live) + len(self.waiting) + sum(not row.tokens for row in talks.listening)
        )
        talks.begin(math.inf if idle else self.engine.max_rows - taken)
        finished: list[tuple[Rollout, ...]] = []
        for row, rollout in talks.heard(self.engine.version, wait=idle):
            if rollout is None:
                self._follow(row)
                self.waiting.append(row)
            else:
                row.past.users -= 1
                finished += self.groups.add(rollout)
        if finished:
            self._leave([])
        return finished

    def _follow(self, row: _Row) -> None:
        """If the world has named another context, that is what the row is decoded behind from now
        on.
        """
        if row.behind is row.past.tokens:
            return
        row.past.users -= 1
        row.kept, row.aside = 0, None
        row.past = self.pasts.setdefault(
            (row.prompt.id, row.behind.tobytes()), _Past(row.behind, 0)
        )
        row.past.users += 1
        row.context = row.past.tokens
        needed = row.past.tokens.size + row.limit - row.begin
        if needed > self.positions:
            self.positions = min(max(needed, 2 * self.positions), self.policy.context)
            self._prepare()

    def _prepare(self) -> None:
        """Take the weights as they are now, and whoever decodes by them."""
        before = None
        if self.prepared is not None:
            before = type(self.forward)
            del self.forward, self.decode  # before others are made: there may be no memory for both
        self.forward = self.engine.prepared(self.positions)
        # The ways order the numbers of a key differently: what one has kept the other cannot read.
        if self.prompts.pasts and type(self.forward) is not before:
            raise EngineError(
                "the model was altered (hooks, adapters) while its completions were being decoded"
            )
        stores = self.prompts.store, self.rows.store
        self.decode = TokenDecode(
            self.forward, self.sampling, *stores, self.device, vocabulary=self.policy.vocabulary
        )
        self.places = self.engine.max_rows
        if self.world is not None and self.forward.decoder is not None:
            self.places = min(self.places, TURNS * torch.get_num_threads())
        self._arrange()
        self.prepared = self.engine.version

    def _arrange(self) -> None:
        """Tell who decodes of the rows that live, if any do."""
        if self.rows.live:
            entries, kept = (
                [row.past.entry for row in self.rows.live],
                [row.own - 1 for row in self.rows.live],
            )
            self.decode.arrange(self.prompts.lengths, entries, kept)

    def _admit(self) -> list[tuple[Rollout, ...]]:
        """Give free rows to waiting completions and draw their first tokens, or the first of their
        next turns.
        """
        if self.world is not None and not self.conversations.unbegun:
            # Once all conversations have begun, the shortest go first, so that they end together
            # with the long ones.  Until then rows are served in the order in which they came: the
            # shortest first would let new ones overtake the long ones.
            self.waiting = deque(sorted(self.waiting, key=lambda row: len(row.tokens)))
        new = [
            self.waiting.popleft()
            for _ in range(min(self.places - len(self.rows.live), len(self.waiting)))
        ]
        new.sort(
            key=lambda row: -row.missing
        )  # those with the most to be computed first; all alike without a world
        unread = [past for past in dict.fromkeys(row.past for row in new) if past.entry < 0]
        self.prompts.prefill(unread, self.forward, self.device)
        hidden = self.rows.extend(
            [row for row in new if row.missing], self.prompts, self.forward, self.device
        )
        uniform_RT = self._uniforms(new)
        own_R = torch.tensor([row.own for row in new], device=self.device)
        # A prompt's logits are computed once for those of its completions that start together.
        sources = [hidden.get(row, row.past.hidden_D) for row in new]
        drawn = self.decode.first(sources, uniform_RT.gather(1, own_R[:, None])[:, 0])  # type: ignore[arg-type]
        _keep(drawn, new)
        first = len(self.rows.live)
        self.rows.join(new, drawn.token_R, uniform_RT)
        return self._commit(first, *_to_host([drawn]), changed=True)

    def _uniforms(self, rows: Sequence[_Row]) -> Tensor:
        """Uniform numbers of rows for all tokens of their turns (R, T)."""
        keys = [
            draws.stream_keys(self.seed, prompt.id, [row.index for row in some])
            for prompt, some in itertools.groupby(rows, lambda row: row.prompt)
        ]
        begin_R = np.array([row.begin for row in rows])
        longest = max(row.limit - row.begin for row in rows)
        return torch.from_numpy(draws.uniforms(np.concatenate(keys), longest, begin_R)).to(
            self.device
        )

    def _step(self) -> list[tuple[Rollout, ...]]:
        """One token for every live row, or several."""
        rows = self.rows
        if self.decode.draws_many:
            return self._steps()
        # Truncation reads back at every token, and a state that is laid aside holds all that was
        # drawn; nobody may draw beyond its limit, where capacity ends.
        one = self.sampling.truncates or (
            self.world is not None and bool(self.prompts.store.states)
        )
        most = 1 if one else TOKENS_PER_SYNC["cpu" if self.device.type == "cpu" else "cuda"]
        steps = min(most, min(row.left for row in rows.live))
        drawn = self.decode.draw(rows.token_R, rows.uniform_RT, steps)
        rows.token_R = drawn[-1].token_R
        _keep(drawn[-1], rows.live)
        tokens, logps = _to_host(drawn)
        if steps > 1:
            kept = [
                self.stopping.kept(row.written, behind)
                for row, behind in zip(rows.live, tokens, strict=True)
            ]
            tokens, logps = (
                [numbers[:count] for numbers, count in zip(column, kept, strict=True)]
                for column in (tokens, logps)
            )
        return self._commit(0, tokens, logps, changed=False)

    def _steps(self) -> list[tuple[Rollout, ...]]:
        """Several tokens for every live row.  Rows that end draw no more; if others wait for their
        place, or a world to answer, nobody does."""
        rows = self.rows
        worth = WORK // (self.weights * max(len(rows.live), FEW))
        steps = min(STEPS, worth, max(row.left for row in rows.live))
        drawn = self.decode.draw_many(
            rows.token_R,
            [row.own + row.left for row in rows.live],
            rows.uniform_RT,
            1 if self.sampling.stop else max(1, steps),
            ending=self.policy.eos_ids,
            until_one_ends=bool(self.waiting) or self.world is not None,
        )
        rows.token_R = drawn.token_RN.gather(1, drawn.count_R[:, None] - 1)[:, 0]
        tokens, logps = (
            [
                numbers[:count]
                for numbers, count in zip(column.tolist(), drawn.count_R.tolist(), strict=True)
            ]
            for column in (drawn.token_RN, drawn.logp_RN)
        )
        return self._commit(0, tokens, logps, changed=True)

    def _commit(
        self, first: int, tokens: list[list[int]], logps: list[list[float]], *, changed: bool
    ) -> list[tuple[Rollout, ...]]:
        """Take the new tokens of the rows from `first` on, of which only a row's last can end it,
        and let ended rows go.
        """
        ended: list[int] = []
        finished: list[tuple[Rollout, ...]] = []
        for r, (token, logp) in enumerate(zip(tokens, logps, strict=True), first):
            row = self.rows.live[r]
            row.add(token, logp, self.engine.version)
            finish = self.stopping.finish(row.written, row.room)
            if finish is not None:
                ended.append(r)
                if self.world is None:
                    row.past.users -= 1
                    finished += self.groups.add(self.conversations.end(row, finish))
                else:
                    row.kept, row.aside = row.own - 1, self.rows.store.take(r, row.own - 1)
                    self.conversations.turn(row, finish)
        if ended:
            self._leave(ended)
        elif changed:
            self._arrange()
        return finished

    def _leave(self, ended: Sequence[int]) -> None:
        """Rows have ended, and prompts may have without them."""
        self.rows.leave(ended)
        self.prompts.forget_unused()
        self._arrange()


def _hidden_of_last(
    forward: RolloutForward,
    tokens_T: Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    attend: Attend,
) -> Tensor:
    """Final hidden states of the last token of each stretch of a stream.   starts: positions of
    their first tokens.
    """
    position_T = np.concatenate(
        [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    )
    hidden_TD = forward.hidden(tokens_T, torch.from_numpy(position_T).to(tokens_T.device), attend)
    return hidden_TD[torch.from_numpy(np.cumsum(counts) - 1).to(tokens_T.device)]


def _keep(drawn: NextToken, rows: Sequence[_Row]) -> None:
    """Note what truncated sampling drew the newest tokens of these rows from."""
    for chunk, support in drawn.support:
        size_R = support.size_R.cpu().numpy()
        id_RC = support.ids_RC[:, : max(int(size_R.max()), 1)].cpu().numpy()
        for row, ids, size in zip(rows[chunk], id_RC, size_R, strict=True):
            row.support.append(ids[:size].copy())


def _to_host(drawn: Sequence[NextToken]) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens (R,) and their log-probs, one after another, as a list for each row, in one transfer:
    on CUDA the host's only wait for the device (float64 holds every id exactly)."""
    if len(drawn) == 1 and drawn[0].token_R.device.type == "cpu":
        return drawn[0].token_R[:, None].tolist(), drawn[0].logp_R[:, None].tolist()
    tokens, logps = torch.stack(
        [torch.stack([one.token_R.double(), one.logp_R.double()]) for one in drawn], -1
    ).tolist()
    return [[int(token) for token in row] for row in tokens], logps
