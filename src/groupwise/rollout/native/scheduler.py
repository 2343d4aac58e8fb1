"""Who decodes next: one call of `NativeEngine.generate`, from waiting sequences to whole groups.

The waiting sequences are sorted by their prompts' lengths, so that those decoded together are
alike.  A prompt is prefilled when the first of its sequences gets a place.  A sequence that ends is
computed no further, and the next waiting one takes its place.

With an environment a completion is a conversation.  While it waits for an answer its keys and
values are saved aside, and another sequence has its place.  Then the answer is computed in one pass
behind them, and the next turn is drawn.  Nobody waits for anybody else's turn.  With compiled
kernels a step's time grows with its rows: few turns are then drawn at a time (`TURNS`), so that
decoding overlaps with waiting for the environment.

R live sequences   T tokens
"""

from __future__ import annotations

import itertools
import math
from collections import abc, deque
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from groupwise.environments.conversation import Environment
from groupwise.errors import EngineError
from groupwise.models.policy import Policy
from groupwise.records import Prompt, Rollout, Sampling
from groupwise.rollout import sampling as draws
from groupwise.rollout.episodes import Conversations, Groups
from groupwise.rollout.native.decode import NextToken, TokenDecode, uniform_of
from groupwise.rollout.native.decode_attention import LiveRows
from groupwise.rollout.native.forward import RolloutForward, SpecialisedForward
from groupwise.rollout.native.kv_cache import KVCache, whole
from groupwise.rollout.native.sequences import LiveSequences, Prefix, PromptCache, Sequence
from groupwise.rollout.stopping import Stopping

FIRST_TOKENS = 64
"""Capacity for own tokens that a sequence starts with."""
TURNS = 16
"""Turns of conversations that each thread of a processor draws at a time: as many as its kernels
take at once.  With more a step takes longer by as much, and turns that began together would all
end, and wait for their answers, together."""
TOKENS_PER_SYNC = {"cpu": 1, "cuda": 8}
"""Tokens of a row between two reads by the host; `cuda` stands for every device but a CPU.  Eight
tokens cost one wait for the GPU.  Tokens that a row draws behind its end are dropped."""
MOST_TOKENS_PER_CALL = 16
"""Tokens that rows draw in one call of the compiled kernels before Python looks at them again."""
MOST_WORK_PER_CALL = 16 * 10**9
"""Most multiplications of such a call, tokens x rows x weights: about a fifth of a second, in which
nobody hears a signal.  One token of a larger model takes longer."""
FEWEST_ROWS = 12
"""Fewer rows take as long as so many, for the weights have to be read."""
Completed = list[tuple[Rollout, ...]]
"""Groups of which every completion has ended."""


class RowTokens(NamedTuple):
    """The tokens that rows have drawn since the host looked last, and their log-probs, nats."""

    tokens: list[list[int]]
    logps: list[list[float]]

    def keep(self, row: int, count: int) -> None:
        """Keep the first tokens of a row, and drop the others."""
        self.tokens[row] = self.tokens[row][:count]
        self.logps[row] = self.logps[row][:count]


class DeviceMemory(Protocol):
    """What a GPU keeps between two calls of `generate` (`cuda/workspace.py`)."""

    scheduler: type[Scheduler]

    def prepared(self, positions: int) -> SpecialisedForward:
        """Prepare the weights as they are now, for at least so many positions."""
        ...

    def caches(self, prompts: KVCache, own: KVCache) -> tuple[KVCache, KVCache]:
        """Return the kept caches of prompts and completions, at least as large as these."""
        ...

    def decode(
        self, forward: SpecialisedForward, sampling: Sampling, *, vocabulary: int
    ) -> TokenDecode:
        """Return what draws tokens by these weights, in the kept caches."""
        ...


class ModelRunner(Protocol):
    """The side of `NativeEngine` that a scheduler sees."""

    policy: Policy
    max_rows: int
    environment: Environment | None
    version: int

    def prepared(self, positions: int, memory: DeviceMemory | None) -> RolloutForward:
        """See `NativeEngine.prepared`."""
        ...

    def limit(self, prompt: Prompt, index: int, sampling: Sampling) -> int:
        """See `NativeEngine.limit`."""
        ...


class Scheduler:
    """One call of `generate`: sequences wait for a place, live, and with an environment listen to
    it between turns.
    """

    forward: RolloutForward
    decode: TokenDecode
    prompts: PromptCache
    rows: LiveSequences
    places: int
    """Sequences that may live at the same time."""
    unread = 0
    """Tokens that every live sequence has drawn and the host has not read."""

    def __init__(
        self,
        engine: ModelRunner,
        prompts: abc.Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Put `group_size` sequences for each prompt into the queue.

        memory: to decode in, on a device that keeps it.
        """
        policy = engine.policy
        self.engine = engine
        self.memory = memory
        self.policy = policy
        self.environment = engine.environment
        self.device = policy.device
        self.sampling = sampling
        self.seed = seed
        self.stopping = Stopping(policy.eos_ids, sampling.stop, policy.tokenizer)
        self.groups = Groups(group_size)
        self.unfinished = len(prompts)
        """Groups that are not complete."""
        self.prepared_version = -1
        """Version of the weights that `forward` holds; -1 before there is one."""
        self.prefixes: dict[tuple[str, bytes], Prefix] = {}
        """The prefixes of all sequences, by prompt and ids."""
        sequences = self._sequences(prompts, group_size)
        self.waiting: deque[Sequence] = deque()
        """Sequences that wait for a place."""
        streams: list[Sequence] = []
        if self.environment is None:
            self.waiting.extend(sequences)
        else:
            streams = sequences
        self.conversations = Conversations(
            policy,
            self.environment,
            sampling,
            seed,
            streams,
            rows=engine.max_rows,
        )
        self.weights = sum(parameter.numel() for parameter in policy.model.parameters())
        if sequences:
            self._make_caches(sequences, len(prompts), group_size)

    def _sequences(self, prompts: abc.Sequence[Prompt], group_size: int) -> list[Sequence]:
        """The sequences of all groups, those with the shortest prompts first."""
        sequences: list[Sequence] = []
        for prompt in sorted(prompts, key=lambda prompt: prompt.tokens.size):
            prefix = Prefix(prompt.tokens, group_size, images=prompt.images)
            key = (prompt.id, prompt.tokens.tobytes())
            self.prefixes[key] = prefix
            for index in range(group_size):
                limit = self.engine.limit(prompt, index, self.sampling)
                sequence = Sequence(prompt=prompt, index=index, limit=limit, prefix=prefix)
                sequences.append(sequence)
        return sequences

    def _make_caches(
        self, sequences: abc.Sequence[Sequence], prompts: int, group_size: int
    ) -> None:
        """Make the caches of prompts and of own tokens, small: they grow with what lives."""
        longest_own = max(sequence.limit for sequence in sequences)
        longest_prompt = sequences[-1].prompt.tokens.size
        lengths = [sequence.prompt.tokens.size + sequence.limit for sequence in sequences]
        self.positions = max(lengths)
        """Longest sequence that `forward` is prepared for, in tokens."""
        most_own, most_of_prompt = longest_own, longest_prompt
        if self.environment is not None:
            # Behind a shorter context there may be more own tokens, and one may be longer than all
            # prompts.
            most_drawn = min(self.sampling.max_new_tokens, self.policy.context)
            most_own = max(longest_own, most_drawn)
            most_of_prompt = self.policy.context
        places = min(self.engine.max_rows, len(sequences))
        groups = math.ceil(places / group_size)
        prompt_cache = KVCache(
            min(prompts, groups), whole(longest_prompt), most_tokens=whole(most_of_prompt)
        )
        own_tokens = min(whole(longest_own), FIRST_TOKENS)
        own_cache = KVCache(places, own_tokens, most_tokens=whole(most_own))
        if self.memory is not None:
            prompt_cache, own_cache = self.memory.caches(prompt_cache, own_cache)
        self.prompts = PromptCache(prompt_cache)
        self.rows = LiveSequences(own_cache)

    def advance(self) -> Completed:
        """Decode until a group is complete; return all that are."""
        if self.prepared_version != self.engine.version:
            self._prepare()
        finished: Completed = []
        while not finished and self.unfinished:
            if self.environment is not None:
                finished += self._listen()
            while self.waiting and self._free > 0 and not finished:
                finished += self._admit()
            if self.rows.live and not finished:
                finished += self._step()
        self.unfinished -= len(finished)
        return finished

    @property
    def _free(self) -> int:
        """Places that no sequence has."""
        return self.places - len(self.rows.live)

    def _listen(self) -> Completed:
        """Begin conversations for places that would be free, and take the replies that are there;
        without any other work, wait.
        """
        idle = not self.rows.live and not self.waiting
        if idle:
            self.conversations.begin()
        else:
            listening = self.conversations.listening
            taken = len(self.rows.live) + len(self.waiting)
            taken += sum(not sequence.tokens for sequence in listening)
            self.conversations.begin(self.engine.max_rows - taken)
        finished: Completed = []
        for sequence, rollout in self.conversations.heard(self.engine.version, wait=idle):
            if rollout is None:
                self._follow(sequence)
                self.waiting.append(sequence)
            else:
                sequence.prefix.users -= 1
                finished += self.groups.add(rollout)
        if finished:
            self._remove([])
        return finished

    def _follow(self, sequence: Sequence) -> None:
        """Move a sequence behind the context that the environment has named, if it has named
        another.
        """
        if sequence.behind is sequence.prefix.tokens:
            return
        sequence.prefix.users -= 1
        sequence.cached = 0
        sequence.saved = None
        key = (sequence.prompt.id, sequence.behind.tobytes())
        prefix = self.prefixes.setdefault(key, Prefix(sequence.behind, 0))
        prefix.users += 1
        sequence.prefix = prefix
        sequence.context = prefix.tokens
        room = sequence.limit - sequence.begin
        needed = prefix.tokens.size + room
        if needed > self.positions:
            longer = max(needed, 2 * self.positions)
            self.positions = min(longer, self.policy.context)
            self._prepare()

    def _prepare(self) -> None:
        """Take the weights as they are now, and make the decoder that draws by them."""
        before = None
        if self.prepared_version >= 0:
            before = type(self.forward)
            del self.forward, self.decode  # before others are made: there may be no memory for both
        self.forward = self.engine.prepared(self.positions, self.memory)
        # The ways order the numbers of a key differently: keys of one cannot be read by the other.
        changed = type(self.forward) is not before
        if changed and self.prompts.prefixes:
            raise EngineError(
                "the model was altered (hooks, adapters) while its completions were being decoded"
            )
        self.decode = self._decode_of(self.forward)
        self.places = self.engine.max_rows
        compiled = self.forward.decoder is not None
        if compiled and self.environment is not None:
            turns = TURNS * torch.get_num_threads()
            self.places = min(self.places, turns)
        self._arrange()
        self.prepared_version = self.engine.version

    def _decode_of(self, forward: RolloutForward) -> TokenDecode:
        """Make what draws by these weights."""
        vocabulary = self.policy.vocabulary
        if self.memory is not None and isinstance(forward, SpecialisedForward):
            return self.memory.decode(forward, self.sampling, vocabulary=vocabulary)
        return TokenDecode(
            forward,
            self.sampling,
            self.prompts.store,
            self.rows.store,
            self.device,
            vocabulary=vocabulary,
        )

    def _arrange(self) -> None:
        """Tell the decoder which sequences live, if any do."""
        if not self.rows.live:
            return
        entry_R: list[int] = []
        cached_R: list[int] = []
        for sequence in self.rows.live:
            entry_R.append(sequence.prefix.entry)
            cached_R.append(sequence.own + self.unread - 1)
        self.decode.arrange(LiveRows(self.prompts.lengths, entry_R, cached_R))

    def _admit(self) -> Completed:
        """Give free places to waiting sequences and draw their first tokens, or the first of their
        next turns.
        """
        if self.environment is not None and not self.conversations.unbegun:
            # Once all conversations have begun, the shortest go first, so that they end together
            # with the long ones.  Until then they are served in the order in which they came: the
            # shortest first would let new ones overtake the long ones.
            by_length = sorted(self.waiting, key=lambda sequence: len(sequence.tokens))
            self.waiting = deque(by_length)
        count = min(self._free, len(self.waiting))
        new = [self.waiting.popleft() for _ in range(count)]
        # Those with the most to be computed come first; all are alike without an environment.
        new.sort(key=lambda sequence: -sequence.uncached)
        prefixes = dict.fromkeys(sequence.prefix for sequence in new)
        unread = [prefix for prefix in prefixes if prefix.entry < 0]
        self.prompts.prefill(unread, self.forward, self.device)
        uncached = [sequence for sequence in new if sequence.uncached]
        hidden = self.rows.extend(uncached, self.prompts, self.forward, self.device)
        # A prompt's logits are computed once for those of its sequences that start together.
        sources: list[Tensor] = []
        for sequence in new:
            source = hidden.get(sequence, sequence.prefix.hidden_D)
            assert source is not None
            sources.append(source)
        uniform_RT = self._uniforms(new)
        own = [sequence.own for sequence in new]
        own_R = torch.tensor(own, device=self.device)
        uniform_R = uniform_of(uniform_RT, own_R)
        drawn = self.decode.first(sources, uniform_R)
        _keep_support(drawn, new)
        first = len(self.rows.live)
        self.rows.join(new, drawn.token_R, uniform_RT)
        return self._commit(first, _to_host([drawn]), changed=True)

    def _uniforms(self, sequences: abc.Sequence[Sequence]) -> Tensor:
        """Uniform numbers (R, T) of sequences for all tokens of their turns."""
        keys = []
        for prompt, siblings in itertools.groupby(sequences, lambda sequence: sequence.prompt):
            indices = [sequence.index for sequence in siblings]
            of_group = draws.stream_keys(self.seed, prompt.id, indices)
            keys.append(of_group)
        key_R = np.concatenate(keys)
        begin_R = np.array([sequence.begin for sequence in sequences])
        limit_R = np.array([sequence.limit for sequence in sequences])
        longest = int((limit_R - begin_R).max())
        uniform_RT = draws.uniforms(key_R, longest, begin_R)
        return torch.from_numpy(uniform_RT).to(self.device)

    def _step(self) -> Completed:
        """Draw one token for every live sequence, or several."""
        if self.decode.draws_many:
            return self._draw_many()
        count = self._tokens_until_sync()
        drawn = self._draw(count)
        _keep_support(drawn[-1], self.rows.live)
        read = _to_host(drawn)
        if count > 1:
            self._drop_behind_ends(read)
        return self._commit(0, read, changed=False)

    def _draw(self, count: int) -> list[NextToken]:
        """Draw so many tokens for every live sequence."""
        rows = self.rows
        drawn = self.decode.draw(rows.token_R, rows.uniform_RT, count)
        rows.token_R = drawn[-1].token_R
        return drawn

    def _drop_behind_ends(self, read: RowTokens) -> None:
        """Drop what the live sequences have drawn behind a token that ends them."""
        for row, sequence in enumerate(self.rows.live):
            kept = self.stopping.kept(sequence.written, read.tokens[row])
            read.keep(row, kept)

    def _tokens_until_sync(self) -> int:
        """Tokens that every live sequence draws before the host looks at any.

        Truncation reads back at every token, and a state that is saved aside holds all tokens that
        were drawn.  Nobody may draw beyond its limit, where capacity ends.
        """
        if self.sampling.restricts:
            return 1
        if self.environment is not None and self.prompts.store.states:
            return 1
        device = "cpu" if self.device.type == "cpu" else "cuda"
        fewest_left = min(sequence.left for sequence in self.rows.live)
        return min(TOKENS_PER_SYNC[device], fewest_left)

    def _draw_many(self) -> Completed:
        """Draw several tokens for every live sequence in one call.

        A sequence that ends draws no more tokens.  If sequences wait for a place, or there is an
        environment, the call returns when the first one ends.
        """
        rows = self.rows
        count = 1
        if not self.sampling.stop:
            rows_of_work = max(len(rows.live), FEWEST_ROWS)
            work_of_token = self.weights * rows_of_work
            worth = MOST_WORK_PER_CALL // work_of_token
            longest = max(sequence.left for sequence in rows.live)
            most = min(MOST_TOKENS_PER_CALL, worth, longest)
            count = max(1, most)
        drawn = self.decode.draw_many(
            rows.token_R,
            [sequence.own + sequence.left for sequence in rows.live],
            rows.uniform_RT,
            count,
            ending=self.policy.eos_ids,
            until_one_ends=bool(self.waiting) or self.environment is not None,
        )
        last_R1 = drawn.count_R.unsqueeze(1) - 1
        newest_R1 = drawn.token_RN.gather(1, last_R1)
        rows.token_R = newest_R1.squeeze(1)
        read = RowTokens(drawn.token_RN.tolist(), drawn.logp_RN.tolist())
        for row, count in enumerate(drawn.count_R.tolist()):
            read.keep(row, count)
        return self._commit(0, read, changed=True)

    def _commit(self, first: int, read: RowTokens, *, changed: bool) -> Completed:
        """Take the new tokens of the live sequences from `first` on, of which only a sequence's
        last can end it, and remove ended sequences.

        changed: the decoder has to be told again which sequences live.
        """
        ended: list[int] = []
        finished: Completed = []
        for row, tokens in enumerate(read.tokens):
            place = first + row
            sequence = self.rows.live[place]
            sequence.add(tokens, read.logps[row], self.prepared_version)
            finish = self.stopping.finish(sequence.written, sequence.room)
            if finish is None:
                continue
            ended.append(place)
            if self.environment is None:
                sequence.prefix.users -= 1
                rollout = self.conversations.end(sequence, finish)
                finished += self.groups.add(rollout)
            else:
                sequence.cached = sequence.own - 1
                sequence.saved = self.rows.store.take(place, sequence.cached)
                self.conversations.turn(sequence, finish)
        if ended:
            self._remove(ended)
        elif changed:
            self._arrange()
        return finished

    def _remove(self, ended: abc.Sequence[int]) -> None:
        """Remove ended sequences, and the prefixes that no sequence needs any more."""
        self.rows.remove(ended, self.unread)
        self.prompts.drop_unused()
        self._arrange()


def _keep_support(drawn: NextToken, sequences: abc.Sequence[Sequence]) -> None:
    """Record the ids that truncated sampling drew the newest tokens of these sequences from."""
    for chunk, support in drawn.support:
        size_R = support.size_R.cpu().numpy()
        most = max(int(size_R.max()), 1)
        id_RC = support.ids_RC[:, :most]
        id_RC = id_RC.cpu().numpy()
        rows = zip(sequences[chunk], id_RC, size_R, strict=True)
        for sequence, ids, size in rows:
            drawn_from = ids[:size].copy()
            sequence.support.append(drawn_from)


def _to_host(drawn: abc.Sequence[NextToken]) -> RowTokens:
    """Copy tokens (R,) and their log-probs, one after another, into a list for each row.

    It is one transfer, on CUDA the host's only wait for the device: float64 holds every id exactly.
    """
    first = drawn[0]
    if len(drawn) == 1 and first.token_R.device.type == "cpu":
        token_R1 = first.token_R.unsqueeze(1)
        logp_R1 = first.logp_R.unsqueeze(1)
        return RowTokens(token_R1.tolist(), logp_R1.tolist())
    token_RT = torch.stack([one.token_R.double() for one in drawn], -1)
    logp_RT = torch.stack([one.logp_R.double() for one in drawn], -1)
    numbers_2RT = torch.stack([token_RT, logp_RT])
    token_lists, logps = numbers_2RT.tolist()
    tokens = [list(map(int, row)) for row in token_lists]
    return RowTokens(tokens, logps)
