"""The records that packages exchange: Prompt -> Rollout -> RolloutGroup -> Sample -> Batch -> Step.

All are frozen and check their invariants at birth.  Per-token columns of single completions are
numpy arrays (they live on the host and are written to disk); only `Batch` holds tensors.  Importing
this file does not import torch.

n tokens of one completion   m tokens of its prompt   G completions of a prompt   K reward functions
P positions of a packed batch   S segments of a packed batch   M trained positions of a packed batch
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Finish(StrEnum):
    """Why a completion ended.  Told by the engine, never guessed from the last token."""

    EOS = "eos"
    """The model sampled an end-of-sequence id; it is the last token and it is trained."""
    STOP = "stop"
    """A stop string appeared; the tokens that complete it are kept."""
    LENGTH = "length"
    """`max_new_tokens` (or the context) was reached: the completion is truncated."""
    TOOL_CALLS = "tool_calls"
    """The policy called tools in a turn; the episode continues with their results."""
    DONE = "done"
    """The environment ended the episode."""
    TURNS = "turns"
    """The episode had as many turns as it may have: it is truncated."""
    DEADLINE = "deadline"
    """The episode took as long as it may take: it is truncated."""
    ERROR = "error"
    """The environment failed; nothing can be said of the completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The sampling settings of a completion.  The rollout holds them, so that scoring uses the same
    distribution.
    """

    temperature: float = 1.0
    """Logits are divided by it, when sampling and when scoring.  0 is greedy decoding (evaluation
    only).
    """
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens that holds at least this probability."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    max_new_tokens: int = 256
    """A completion that reaches it is truncated (`Finish.LENGTH`)."""
    stop: tuple[str, ...] = ()
    """A completion ends when one of these strings appears in its text."""

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def restricts(self) -> bool:
        """True if some tokens cannot be sampled: the rollout then holds the support."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """The token ids before a completion, and the data row that they come from.

    >>> prompt = Prompt(id="0/7", tokens=np.array([5, 9, 2]), text="2+2=", row={"answer": "4"})
    >>> prompt.tokens.tolist()
    [5, 9, 2]
    """

    id: str
    """Name of the group, the completions of one visit of one row, and key of its random streams."""
    tokens: np.ndarray
    """int64 (m,), m >= 1."""
    text: str
    """The prompt as reward functions get it."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The data row; its columns go to the reward functions by name."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The chat messages of `text`, with the recipe's system message; None: no chat template was
    used.
    """
    wrapped: bool = False
    """True if the row's prompt is a text that `data: {chat: true}` made the last of `messages`."""
    cut: int = 0
    """Tokens that were cut from its beginning (`data.too_long: truncate_left`)."""
    images: Any = None
    """`data.images.PromptImages`: the images at its placeholders; None: it has none."""

    @property
    def place(self) -> str:
        """For messages: `row 7 (epoch 0)`, `held-out row 7`; all count from 0."""
        return row_of(self.id)

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 1 and self.tokens.size >= 1, f"prompt {self.id} has no tokens"
        assert self.tokens.dtype == np.int64, (
            f"prompt tokens must be int64, got {self.tokens.dtype}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A tool call of the policy, and its result."""

    name: str
    arguments: str
    """The arguments as JSON; of an unreadable call the text."""
    result: str
    """The answer to the policy."""
    seconds: float
    failure: str = ""
    """Empty, or the kind of failure: `unreadable`, `unknown`, `arguments`, `exception`, `timeout`.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of an episode: the policy's tokens and the environment's answer."""

    begin: int
    """Index in the completion of the turn's first token."""
    end: int
    """Index after its last token; the answer extends from here to the next turn's `begin`."""
    finish: Finish
    calls: tuple[ToolCall, ...] = ()
    answer: str = ""
    """The answer as text; empty if the episode ended with the turn."""
    seconds: float = 0.0
    """Between the end of the turn and the answer."""
    truncated: bool = False
    """True if the answer was too long and was cut."""
    reward: float | None = None
    """The environment's reward for the turn."""
    side: bool = False
    """True if it belongs to a conversation that is served and not trained."""
    agent: int = 0
    """The agent that asked for it, numbered by session, where several share an episode."""
    wishes: tuple[str, ...] = ()
    """What the client asked for and did not get: kinds of tools, a call that must be made."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Branch:
    """From token `begin` on, the tokens of an episode have another context than the prompt and the
    tokens before.
    """

    begin: int
    """Index in the completion of the branch's first token; the branch extends to the next one, or
    to the end.
    """
    context: np.ndarray
    """int64 (c,), c >= 1: the context of token `begin`, prompt included."""


def context_spans(
    n: int, prompt: np.ndarray, branches: Sequence[Branch]
) -> list[tuple[int, int, np.ndarray]]:
    """Cut a completion of `n` tokens into spans that were each drawn behind one context.

    Out: for each span its first token, the one behind its last, and the ids of its context.

    >>> branch = Branch(begin=2, context=np.array([5, 8]))
    >>> for begin, end, context in context_spans(3, np.array([5, 9]), [branch]):
    ...     print(begin, end, context.tolist())
    0 2 [5, 9]
    2 3 [5, 8]
    """
    begins = [0, *(branch.begin for branch in branches)]
    ends = [*begins[1:], n]
    contexts = [prompt, *(branch.context for branch in branches)]
    spans = []
    for begin, end, context in zip(begins, ends, contexts, strict=True):
        if end > begin:
            spans.append((begin, end, context))
    return spans or [(0, 0, prompt)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Episode:
    """The turns of a completion of several turns.  The completion has the tokens of all turns and
    answers in order, each once.

    Where the chat template rewrites the past, or an environment opens otherwise than the prompt
    says, a turn was drawn behind another context than the tokens before it.  `branches` hold it.
    """

    turns: tuple[Turn, ...]
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat messages after the prompt: the policy's turns, results of tools, user messages."""
    branches: tuple[Branch, ...] = ()
    """Branches by ascending `begin`.  Without any, the context of every token is the prompt and the
    tokens before it.
    """
    reward: float | None = None
    """The environment's reward for the whole episode."""
    environment: str = ""
    """Name of the environment, if there are several."""
    opening: str = ""
    """Text that the environment's `reset` added to the prompt's last message."""
    prompt_text: str = ""
    """The prompt as the policy saw it, where `reset` or the harness changed it; else empty."""
    state: Mapping[str, Any] | None = None
    """Public attributes of the environment at its end, as JSON, for reward functions.  A run
    records of it the files that have changed, and the end of what was printed.
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """One sampled completion.  It ends with an EOS id exactly if `finish` is EOS.  It holds no
    padding.

    >>> prompt = Prompt(id="0/7", tokens=np.array([5, 9, 2]), text="2+2=")
    >>> rollout = Rollout(
    ...     prompt=prompt,
    ...     index=0,
    ...     tokens=np.array([4, 1]),
    ...     behavior_logp=np.array([-0.2, -0.1]),
    ...     finish=Finish.EOS,
    ...     eos_ids=(1,),
    ...     sampling=Sampling(),
    ...     text="4",
    ... )
    >>> len(rollout), rollout.trained.tolist(), rollout.version.tolist()
    (2, [True, True], [0, 0])
    """

    prompt: Prompt
    index: int
    """Index in its group, 0 .. G-1; with `prompt.id` it selects the random stream."""
    tokens: np.ndarray
    """int64 (n,), n >= 0, as sampled: never decoded and encoded again."""
    behavior_logp: np.ndarray
    """(n,), nats: log-probability of each token in its sampling distribution, with temperature and
    truncation.
    """
    finish: Finish
    eos_ids: tuple[int, ...]
    """The ids that end a completion of this policy."""
    sampling: Sampling
    text: str
    """The completion as reward functions get it, by default without special tokens."""
    trained: np.ndarray = None  # type: ignore[assignment]
    """bool (n,): False for tokens that the policy did not sample (tool output).  Default: all True.
    """
    version: np.ndarray = None  # type: ignore[assignment]
    """int64 (n,): number of optimizer steps of the weights that sampled the token.  Default: 0."""
    support: tuple[np.ndarray, ...] | None = None
    """Only if `sampling.restricts`: for each token the ids that could be sampled (int64)."""
    episode: Episode | None = None
    """The turns of a completion of several turns, or in an environment."""

    def __post_init__(self) -> None:
        n = self.tokens.size
        if self.trained is None:
            object.__setattr__(self, "trained", np.ones(n, dtype=bool))
        if self.version is None:
            object.__setattr__(self, "version", np.zeros(n, dtype=np.int64))
        assert self.tokens.dtype == np.int64, (
            f"completion tokens must be int64, got {self.tokens.dtype}"
        )
        for name in ("tokens", "behavior_logp", "trained", "version"):
            shape = getattr(self, name).shape
            assert shape == (n,), (
                f"rollout {self.prompt.id}#{self.index}: {name} has shape {shape}, expected ({n},)"
            )
        ends_with_eos = n > 0 and int(self.tokens[-1]) in self.eos_ids
        # What ends an episode may come behind a turn that the policy has ended.
        assert ends_with_eos == (self.finish is Finish.EOS) or (
            ends_with_eos and self.episode is not None
        ), (
            f"rollout {self.prompt.id}#{self.index}: finish is {self.finish} but its last token is "
            f"{self.tokens[-1] if n else 'missing'} and the EOS ids are {self.eos_ids}"
        )
        assert (self.support is not None) == self.sampling.restricts, (
            "a truncated distribution travels with its support"
        )
        assert self.support is None or len(self.support) == n, "one support per token"
        if self.episode is not None:
            self._check_episode(self.episode)

    def _check_episode(self, episode: Episode) -> None:
        written = np.zeros(len(self), dtype=bool)
        end = 0
        for turn in episode.turns:
            assert end <= turn.begin <= turn.end <= len(self), (
                f"rollout {self.prompt.id}#{self.index}: turn {turn.begin}..{turn.end}"
            )
            written[turn.begin : turn.end] = True
            end = turn.end
        assert not (self.trained & ~written).any(), (
            f"rollout {self.prompt.id}#{self.index}: trained tokens outside of its turns"
        )
        begins = [branch.begin for branch in episode.branches]
        assert begins == sorted(set(begins)), (
            f"rollout {self.prompt.id}#{self.index}: branches begin at {begins}"
        )
        assert all(
            branch.context.dtype == np.int64 and branch.context.size for branch in episode.branches
        )

    def __len__(self) -> int:
        return self.tokens.size

    @property
    def truncated(self) -> bool:
        """True if a limit ended it: of length, of turns or of time."""
        return self.finish in (Finish.LENGTH, Finish.TURNS, Finish.DEADLINE)

    @property
    def prompt_text(self) -> str:
        """The prompt as the policy saw it, with what an environment's `reset` added."""
        changed = self.episode.prompt_text if self.episode is not None else ""
        return changed or self.prompt.text

    @property
    def place(self) -> str:
        """For messages, behind the word completion: `3 of row 7 (epoch 0)`, `3 of held-out row 7`;
        all count from 0.
        """
        return place_of(self.prompt.id, self.index)


def place_of(prompt: str, index: int) -> str:
    """Which completion it is, by the id of its prompt (`Rollout.place`).

    >>> place_of("0/7", 3), place_of("eval/7", 3), place_of("sum", 3)
    ('3 of row 7 (epoch 0)', '3 of held-out row 7', '3 of prompt sum')
    """
    return f"{index} of {row_of(prompt)}"


def row_of(prompt: str) -> str:
    """Which row it is, by the id of its prompt (`Prompt.place`)."""
    visit, _, row = prompt.rpartition("/")
    if not row.isdecimal():
        return f"prompt {prompt}"
    return (
        f"held-out row {row}"
        if visit == "eval"
        else f"row {row}" + (f" (epoch {visit})" if visit else "")
    )


TIE = 2.0**-22
"""Two units of float32's last place: numbers that lie closer together, relative to their size, are
equal.
"""


def alike(values: np.ndarray, summands: np.ndarray | float = 0.0) -> bool:
    """True if the values that are known (not NaN) differ by no more than rounding does, or none is
    known.

    summands: what the values are sums of; rounding is proportional to the largest of all these
        numbers.

    >>> alike(np.array([0.1 + 0.2, 0.3, np.nan])), alike(np.array([0.3, 0.301]))
    (True, False)
    """
    known = values[~np.isnan(values)]
    if known.size == 0:
        return True
    size = max(np.abs(known).max(), np.nanmax(np.abs(summands), initial=0.0))
    return bool(known.max() - known.min() <= TIE * size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class RolloutGroup:
    """A group with its rewards: one number per completion and function, NaN where the function does
    not apply.

    `signals` holds further columns per token by name, one array (n_i,) per completion:
    `reference_logp`, `scored_logp` (of the policy before its first update, if another engine
    sampled), `process` (step rewards at the last token of each step, NaN elsewhere), `value` and
    `return` (a critic's value and its target; NaN = nothing), `teacher_logp`.
    """

    rollouts: tuple[Rollout, ...]
    names: tuple[str, ...]
    """K names of the reward functions."""
    rewards: np.ndarray
    """float64 (G, K)."""
    reward: np.ndarray
    """float64 (G,): the weighted sum of the rewards that apply; NaN = none."""
    weights: tuple[float, ...] = ()
    """K weights of the functions in the sum; empty = all 1."""
    signals: Mapping[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    logged: Mapping[str, float] = field(default_factory=dict)
    """Numbers that reward functions logged when they scored the group."""
    extra: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that they logged for each completion, by name: G values of JSON."""
    verdict: str | None = None
    """The reward function that is 1 for right completions, if any."""

    def __repr__(self) -> str:
        """One line: the completions are not printed."""
        known = [column[~np.isnan(column)] for column in self.rewards.T]
        means = ", ".join(
            f"{name} {np.mean(values):.4g}"
            for name, values in zip(self.names, known, strict=True)
            if values.size
        )
        return (
            f"RolloutGroup({len(self.rollouts)} completions of {self.prompt.place}; mean rewards:"
            f" {means or 'none'})"
        )

    def __post_init__(self) -> None:
        size = len(self.rollouts)
        assert size >= 1, "a group has at least one completion"
        if not self.weights:
            object.__setattr__(self, "weights", (1.0,) * len(self.names))
        shape = (size, len(self.names))
        assert self.rewards.shape == shape, f"rewards {self.rewards.shape}, expected {shape}"
        assert self.reward.shape == (size,) and len(self.weights) == len(self.names)
        assert self.verdict is None or self.verdict in self.names, (
            f"the verdict {self.verdict!r} is none of {self.names}"
        )
        assert len({rollout.prompt.id for rollout in self.rollouts}) == 1, (
            "a group shares one prompt"
        )
        assert len({rollout.index for rollout in self.rollouts}) == size, (
            "the completions of a group have places of their own"
        )
        assert not np.isinf(self.rewards).any(), (
            "an infinite reward is an error of its function, not a reward"
        )
        assert all(len(column) == size for column in self.extra.values()), (
            "an extra column has a value for each completion"
        )
        for name, columns in self.signals.items():
            lengths = [column.shape for column in columns]
            assert lengths == [(len(rollout),) for rollout in self.rollouts], (
                f"signal {name}: {lengths}"
            )

    @property
    def prompt(self) -> Prompt:
        """The prompt that the group shares."""
        return self.rollouts[0].prompt

    @property
    def right(self) -> np.ndarray:
        """float64 (G,): 1 if the verdict is at least 1, 0 for others, NaN without a verdict."""
        if self.verdict is None:
            return np.full(len(self.rollouts), np.nan)
        verdict_G = self.rewards[:, self.names.index(self.verdict)]
        return np.where(np.isnan(verdict_G), np.nan, verdict_G >= 1.0 - 1e-9)

    @property
    def equal_rewards(self) -> bool:
        """True if all rewards are equal up to rounding, or all are None."""
        return alike(self.reward, self.rewards * np.array(self.weights))


OWN_COLUMNS = ("reference_logp", "behavior_logp", "advantage")
"""Columns of samples and batches that have a field of their own."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """A prompt, a completion, and the contribution of every completion token to the loss.

    Rollouts, demonstrations and the sides of a preference pair become samples.  The completion's
    token t is predicted from all tokens before it; the loss is the sum of weight x loss of the
    token.
    """

    group: str
    """Samples of one group share the prompt: it is computed once."""
    index: int = 0
    """Index of a rollout in its group."""
    branches: tuple[Branch, ...] = ()
    """Where an episode goes on behind another context (`Episode.branches`)."""
    images: Any = None
    """The images of the prompt (`Prompt.images`)."""
    prompt: np.ndarray
    """int64 (m,), m >= 1."""
    completion: np.ndarray
    """int64 (n,)."""
    weight: np.ndarray
    """(n,), fixed once per optimizer step; 0 = not trained, and no logits are computed for it."""
    advantage: np.ndarray = None  # type: ignore[assignment]
    """(n,), always per token.  Default: 0."""
    behavior_logp: np.ndarray = None  # type: ignore[assignment]
    """(n,), nats.  Default: 0, for tokens that were not sampled."""
    temperature: float = 1.0
    reference_logp: np.ndarray | None = None
    support: tuple[np.ndarray, ...] | None = None
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further columns (n,) by name that a loss asks for: of rollouts their signals of the same
    names (`scored_logp`, `value`, `return`), of pairs and steps `pool`, `margin`, `lm`, `label`."""

    def __post_init__(self) -> None:
        for name in ("advantage", "behavior_logp"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, np.zeros(self.completion.size))
        assert self.prompt.ndim == 1 and self.prompt.size >= 1, (
            "a sample's prompt has at least one token"
        )
        assert self.temperature > 0.0, (
            f"temperature must be positive to be scored, got {self.temperature}"
        )
        columns = {
            "weight": self.weight,
            "advantage": self.advantage,
            "behavior_logp": self.behavior_logp,
            **self.extra,
        }
        if self.reference_logp is not None:
            columns["reference_logp"] = self.reference_logp
        for name, column in columns.items():
            assert column.shape == self.completion.shape, (
                f"{name} {column.shape} for {self.completion.shape} tokens"
            )
        assert self.support is None or len(self.support) == self.completion.size

    def column(self, name: str) -> np.ndarray | None:
        """Return a number for each token of the completion (n,), or None where there is none."""
        if name in OWN_COLUMNS:
            return getattr(self, name)
        return self.extra.get(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where the segments of a packed stream lie: host numbers only, so that reading it never waits
    for a device.

    Segment s covers positions start[s] .. start[s] + length[s].  Its tokens attend causally to
    themselves and to all of segment prefix[s] (-1: to nothing else).  A prefix segment itself has
    no prefix and stands before those that use it. Positions behind the last segment are filler:
    segment -1, weight 0, attended by nothing.

    Two completions (3 and 2 tokens) of one prompt of 4 tokens.  The prompt's last token starts each
    completion's segment, because it predicts a different first token in each; what remains of the
    prompt stands once:

    >>> Layout(start=(0, 3, 6), length=(3, 3, 2), prefix=(-1, 0, 0), total=8).segments
    3
    """

    start: tuple[int, ...]
    length: tuple[int, ...]
    prefix: tuple[int, ...]
    total: int
    """P, filler included."""

    def __post_init__(self) -> None:
        assert len(self.start) == len(self.length) == len(self.prefix)
        end = 0
        for s, (start, length, prefix) in enumerate(
            zip(self.start, self.length, self.prefix, strict=True)
        ):
            assert start == end and length > 0, f"segment {s} starts at {start}, expected {end}"
            assert prefix == -1 or (prefix < s and self.prefix[prefix] == -1), (
                f"segment {s} has prefix {prefix}"
            )
            end = start + length
        assert end <= self.total

    @property
    def segments(self) -> int:
        """S."""
        return len(self.start)

    @property
    def uses(self) -> list[int]:
        """How many sequences each position (P,) is a part of: a shared prompt's as many as share
        it, filler none.

        >>> Layout(start=(0, 3, 6), length=(3, 3, 2), prefix=(-1, 0, 0), total=9).uses
        [2, 2, 2, 1, 1, 1, 1, 1, 0]
        """
        members = [sum(prefix == s for prefix in self.prefix) or 1 for s in range(self.segments)]
        uses = [
            count for count, length in zip(members, self.length, strict=True) for _ in range(length)
        ]
        return uses + [0] * (self.total - len(uses))


class ImageSpan(NamedTuple):
    """Positions of a stream whose sequence has images in its prompt."""

    start: int
    stop: int
    place: int
    """Place of the first position in its sequence."""
    images: Any
    """`Prompt.images`."""


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where the tokens of a step are sent by a mixture of experts: each sequence counts its prompt
    and its completion.
    """

    part_KE: Tensor
    """The part of the tokens whose choice k (of k experts) is expert E, over all layers."""
    tokens: float
    """Tokens of the step, times layers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """A flat stream of P tokens.  Position p predicts `target[p]`; a position that predicts nothing
    has weight 0.
    """

    layout: Layout
    tokens_P: Tensor
    position_P: Tensor
    """Place in its own sequence, prompt included, from 0."""
    segment_P: Tensor
    """Segment of each position, -1 for filler."""
    target_P: Tensor
    """The token that position p predicts; -1 where it predicts none."""
    weight_P: Tensor
    advantage_P: Tensor
    behavior_logp_P: Tensor
    temperature_P: Tensor
    trained_M: Tensor
    """The M positions whose weight is not 0, ascending: only they get logits."""
    reference_logp_P: Tensor | None = None
    support: tuple[Tensor, Tensor] | None = None
    """Ids that could be drawn, flat (E,), and where each trained position's begin (M + 1,); an
    empty span means all.
    """
    extra_P: Mapping[str, Tensor] = field(default_factory=dict)
    sequence_P: Tensor = None  # type: ignore[assignment]
    """Which completion each position belongs to, by the first of its segments; another than
    `segment_P`, the default, only where a sample has branches."""
    samples: tuple[int, ...] = ()
    """For each segment the index of its sample in the list that was packed; -1 for a prefix."""
    tokens: tuple[tuple[int, int], ...] = ()
    """For each segment the tokens of its sample's completion that it predicts: the first, and one
    behind the last.
    """
    images: tuple[ImageSpan, ...] = ()
    """The segments of prompts with images."""
    routing: Routing | None = None
    """What the tokens of the whole step ask of a mixture's experts, where the loss balances them.
    """
    prepared: Any = None
    """What attention on a GPU reads of the layout, which lies there with the columns."""

    def __post_init__(self) -> None:
        total = self.layout.total
        if self.sequence_P is None:
            object.__setattr__(self, "sequence_P", self.segment_P)
        columns = [self.tokens_P, self.position_P, self.segment_P, self.target_P, self.weight_P]
        columns += [self.advantage_P, self.behavior_logp_P, self.temperature_P]
        columns += self.extra_P.values()
        columns += [] if self.reference_logp_P is None else [self.reference_logp_P]
        assert all(column.shape == (total,) for column in columns), [
            tuple(column.shape) for column in columns
        ]
        assert len(self.samples) in (0, self.layout.segments) and len(self.tokens) == len(
            self.samples
        )

    def column(self, name: str) -> Tensor | None:
        """Return a number for each position (P,) by the name that `Sample` has for it, or None
        where no sample has it.
        """
        if name in OWN_COLUMNS:
            return getattr(self, f"{name}_P")
        return self.extra_P.get(name)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Step:
    """The result of a step, which a training loop yields."""

    number: int
    """Steps completed, from 1."""
    metrics: Mapping[str, float]
    """Flat names ("reward", "completions/mean_length"); a quantity that was not computed has no
    key.
    """
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    groups: Sequence[RolloutGroup] = ()
    advantages: Sequence[Sequence[np.ndarray]] = ()
    """Per group and completion (n_i,), as trained."""
    current_logp: Sequence[Sequence[np.ndarray]] = ()
    """Per group and completion (n_i,): log-probs under the policy at the first update; empty where
    nothing was scored.
    """
    columns: Mapping[str, Sequence[Sequence[np.ndarray]]] = field(default_factory=dict)
    """What the step's updates did, by name, per group and completion (n_i,); empty where nothing
    was computed: `weight` (of the loss, first update), `entropy` (nats, first update), `last_logp`
    (nats, last update), `clipped` (share of the updates that cut it), `gradient` (size of the
    loss's gradient by the log-prob, last update)."""
    evaluation: Mapping[str, float] | None = None
    """Metrics on the held-out set, at the steps where it was evaluated."""

    def __repr__(self) -> str:
        """Return one line: the training figures, and behind `held out` those of the evaluation."""
        figures = [
            f"{name} {self.metrics[name]:.4g}"
            for name in ("reward", "loss")
            if name in self.metrics
        ]
        if self.evaluation:
            held_out = []
            for name, value in self.evaluation.items():
                if "/half_width" not in name:
                    held_out.append(f"{name.removeprefix('eval/')} {value:.4g}")
            figures.append(f"held out: {', '.join(held_out)}")
        figures += [f"{len(self.groups)} groups", f"{len(self.metrics)} metrics"]
        return f"Step({self.number}, {', '.join(figures)})"


def __getattr__(name: str) -> object:
    """Answer the former name of a record, with a warning."""
    if name == "Scored":
        warnings.warn(
            "records.Scored is now records.RolloutGroup", DeprecationWarning, stacklevel=2
        )
        return RolloutGroup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
