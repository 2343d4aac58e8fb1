"""GRPO in one file: torch, a transformer of its own, and nothing else.  `python docs/grpo_in_one_file.py` learns a toy in seconds.

Read it from top to bottom: the model, the stream, sampling, scoring, the loss, the loop.  It does what `groupwise.train_online`
does with the preset `grpo`, without what makes that fast (a cache of keys and values, prompts computed once per group, logits in
chunks); a test runs both on the same weights, prompts and random numbers and asks for the same ten steps.

P positions of a stream   N completion tokens of a step, one completion after the other   R completions   V vocabulary   D width
l log-prob of a token under the policy being trained, old under the policy before the step, which drew it, ref under the reference
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# ---- the model: GPT-2, for a flat stream ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention, then a wide layer for each token on its own; both add to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_PD: Tensor, seen_PP: Tensor) -> Tensor:
        """seen_PP: True where position p (row) may look at position q (column)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(0, 1) for part in self.qkv(self.norm_1(x_PD)).chunk(3, -1))
        score_HPP = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~seen_PP, -math.inf)
        x_PD = x_PD + self.out((score_HPP.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return x_PD + self.down(F.gelu(self.up(self.norm_2(x_PD)), approximate="tanh"))


class GPT(nn.Module):
    """Logits of the next token at every position of a stream.  The head is the transposed embedding."""

    def __init__(self, vocabulary: int, *, width: int = 32, layers: int = 2, heads: int = 4, context: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(self, token_P: Tensor, position_P: Tensor, segment_P: Tensor) -> Tensor:
        """(P, V).  A token sees the tokens of its own segment up to itself: no padding, so no mask of padding."""
        seen_PP = (segment_P[:, None] == segment_P) & torch.ones(len(segment_P), len(segment_P), dtype=torch.bool).tril()
        x_PD = self.tokens(token_P) + self.positions(position_P)
        for block in self.blocks:
            x_PD = block(x_PD, seen_PP)
        return self.norm(x_PD) @ self.tokens.weight.T


# ---- the stream: sequences of any length, one after the other ------------------------------------------------------------------


def stream(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences end to end: P tokens, the place of each in its own sequence, and which sequence that is."""
    tokens = [token for sequence in sequences for token in sequence]
    places = [place for sequence in sequences for place in range(len(sequence))]
    numbers = [number for number, sequence in enumerate(sequences) for _ in sequence]
    return torch.tensor(tokens), torch.tensor(places), torch.tensor(numbers)


@dataclass
class Rollout:
    """A completion: its tokens, EOS included where the policy sampled it, and the log-prob of each when it was drawn (b)."""

    prompt: list[int]
    group: str
    index: int
    tokens: list[int] = field(default_factory=list)
    behavior_logp: list[float] = field(default_factory=list)


# ---- sampling and scoring: the same distribution, or nothing below is true -----------------------------------------------------

Uniform = Callable[[str, int, int], float]
"""(group, index, token) -> a number in [0, 1): each completion has its own stream, whoever is sampled next to it."""


def uniform(group: str, index: int, token: int, seed: int = 0) -> float:
    """Python's generator, seeded by what the number is for."""
    return random.Random(f"{seed}/{group}/{index}/{token}").random()


@torch.no_grad()
def sample(model: GPT, rollouts: Sequence[Rollout], *, eos: int, longest: int, temperature: float, draw: Uniform) -> None:
    """Extend every rollout until EOS or `longest` tokens.  Everything is computed again for each token: short, and slow."""
    for t in range(longest):
        growing = [rollout for rollout in rollouts if eos not in rollout.tokens]
        if not growing:
            return
        sequences = [rollout.prompt + rollout.tokens for rollout in growing]
        ends = torch.tensor([len(sequence) for sequence in sequences]).cumsum(0) - 1
        logp_RV = (model(*stream(sequences))[ends] / temperature).log_softmax(-1)
        for rollout, logp_V in zip(growing, logp_RV, strict=True):
            cumulative_V = logp_V.exp().cumsum(0)
            token = int((cumulative_V <= draw(rollout.group, rollout.index, t) * cumulative_V[-1]).sum())
            rollout.tokens.append(token)
            rollout.behavior_logp.append(float(logp_V[token]))


def score(model: GPT, rollouts: Sequence[Rollout], *, temperature: float) -> Tensor:
    """l of every completion token (N,): position p predicts the token behind it, so a text's last token is no input."""
    texts = [rollout.prompt + rollout.tokens for rollout in rollouts]
    logits = model(*stream([text[:-1] for text in texts])).split([len(text) - 1 for text in texts])
    logits_NV = torch.cat([part_PV[-len(rollout.tokens) :] for part_PV, rollout in zip(logits, rollouts, strict=True)])
    target_N = torch.tensor([token for rollout in rollouts for token in rollout.tokens])
    return (logits_NV / temperature).log_softmax(-1).gather(1, target_N[:, None])[:, 0]


# ---- GRPO ----------------------------------------------------------------------------------------------------------------------


def advantages(reward_G: Tensor) -> Tensor:
    """How much better than its siblings: the group's mean is the critic.  All equal: exactly 0."""
    if reward_G.max() == reward_G.min():
        return torch.zeros_like(reward_G)
    return (reward_G - reward_G.mean()) / (reward_G.std() + 1e-4)


def token_loss(logp_N: Tensor, old_N: Tensor, advantage_N: Tensor, reference_N: Tensor, clip: float, beta: float) -> Tensor:
    """The worse of ratio and clipped ratio, plus the KL to the reference by the estimator k3 (DeepSeekMath, equations 3 and 4)."""
    ratio_N = (logp_N - old_N).exp()
    gain_N = torch.minimum(ratio_N * advantage_N, ratio_N.clamp(1 - clip, 1 + clip) * advantage_N)
    gap_N = reference_N - logp_N
    return -gain_N + beta * (gap_N.exp() - gap_N - 1)


def train(
    model: GPT,
    prompts: Callable[[int], Sequence[list[int]]],
    reward: Callable[..., list[float]],
    *,
    eos: int,
    steps: int,
    group_size: int = 8,
    longest: int = 4,
    lr: float = 1e-3,
    mu: int = 1,
    clip: float = 0.2,
    beta: float = 0.0,
    temperature: float = 1.0,
    draw: Uniform = uniform,
) -> Iterator[dict[str, float]]:
    """Train in place and yield what each step saw.  prompts(step) are the step's; mu passes over every rollout."""
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        rollouts = [Rollout(prompt, f"{step}/{i}", k) for i, prompt in enumerate(prompts(step)) for k in range(group_size)]
        sample(model, rollouts, eos=eos, longest=longest, temperature=temperature, draw=draw)
        rewards = torch.tensor(reward([r.prompt for r in rollouts], [r.tokens for r in rollouts]), dtype=torch.float64)
        advantage_R = torch.cat([advantages(reward_G) for reward_G in rewards.split(group_size)])
        # A completion whose advantage is 0 has no gradient but the KL's; it still counts in R.
        live = [i for i, advantage in enumerate(advantage_R.tolist()) if advantage or beta]
        trained = [rollouts[i] for i in live]  # none at all: nothing to learn from this step
        lengths = torch.tensor([len(rollout.tokens) for rollout in trained], dtype=torch.int64)
        advantage_N = advantage_R[torch.tensor(live, dtype=torch.int64)].repeat_interleave(lengths)
        weight_N = (1 / (len(rollouts) * lengths.double())).repeat_interleave(lengths)  # every completion counts the same
        old_N = torch.tensor([logp for rollout in trained for logp in rollout.behavior_logp], dtype=torch.float64)
        seen: dict[str, list[float]] = {"loss": [], "grad_norm": [], "progress": []}
        for _ in range(mu if trained else 0):
            logp_N = score(model, trained, temperature=temperature)
            with torch.no_grad():
                reference_N = score(reference, trained, temperature=temperature) if beta else logp_N
            loss = (weight_N * token_loss(logp_N, old_N, advantage_N, reference_N, clip, beta)).sum()
            optimizer.zero_grad()
            loss.backward()
            seen["grad_norm"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            seen["loss"].append(float(loss.detach()))
            seen["progress"].append(float((advantage_N * logp_N.detach()).mean()))
        yield {"reward": float(rewards.mean()), **{name: sum(values) / mu for name, values in seen.items()}}


# ---- a toy: say the digit that you were shown, then stop -----------------------------------------------------------------------

EOS = 10
"""After the digits 0 to 9; there is no other token."""


def echo(prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """Half the reward for starting with the prompt's digit, the other half for stopping right there."""
    pairs = zip(prompt_ids, completion_ids, strict=True)
    return [0.5 * (answer[0] == prompt[-1]) * (2 if answer[1:] == [EOS] else 1) for prompt, answer in pairs]


def main(steps: int = 60) -> float:
    """Learn the toy, print every tenth step, and return the last mean reward (1 is perfect)."""
    torch.manual_seed(0)
    digits = [[digit] for digit in range(10)]
    run = train(GPT(vocabulary=EOS + 1), lambda step: digits, echo, eos=EOS, steps=steps, group_size=16, lr=3e-3, mu=2)
    metrics: dict[str, float] = {}
    for number, metrics in enumerate(run, 1):
        if number == 1 or number % 10 == 0:
            print(f"step {number:2}  " + "  ".join(f"{name} {value:+.4f}" for name, value in metrics.items()))
    return metrics["reward"]


if __name__ == "__main__":
    torch.set_num_threads(1)  # nothing here is large enough for two
    main()
