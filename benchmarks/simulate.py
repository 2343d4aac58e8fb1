"""A run as a simulation of discrete events: how long a step takes with so many servers, and what `ahead` saves.

    python benchmarks/simulate.py                       # published step times of NeMo RL and verl beside predictions
    python benchmarks/simulate.py --own RUN [RUN ...]   # runs of ours: rates from the first, predictions for all of them
    python benchmarks/simulate.py --prompts 64 --group 16 --mean 2000 --cap 8192 --billions 8 --servers 8 --trainers 8 --ahead 1

Completions have lengths from a log-normal distribution that is cut at the cap.  A server decodes its rows together; a decoded token
takes the time that the card needs to read the weights once and the keys and values of every row, or to multiply, whichever is
longer.  Rollout j begins when the weights of step j - 1 - ahead have arrived (`groupwise.training.groups`); step k is trained when
all of its completions are there.  Left out: prefill, rewards, evaluations, checkpoints.  Nothing here needs a GPU or torch.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import mean, median

import numpy as np
from _machine import save

STEPS, SKIPPED = 6, 2
"""Steps of a simulation, and those at its beginning that are not counted."""


# ---------------------------------------------------------------- what is simulated


@dataclass(frozen=True)
class Lengths:
    """Tokens of completions: log-normal, cut at `cap`, with this mean after the cut.   prompt: tokens of a prompt."""

    mean: float
    cap: int
    prompt: int = 0
    spread: float = 0.8
    """Standard deviation of the logarithm; 0: all are equal."""

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """Draw lengths whose expectation is `mean`."""
        normal = generator.standard_normal(count)
        return self._cut(self._scale(), normal)

    def _cut(self, scale: float, normal: np.ndarray) -> np.ndarray:
        return np.clip(np.round(scale * np.exp(self.spread * normal)), 1, self.cap)

    def _scale(self) -> float:
        """Find the median before the cut by bisection, on a fixed sample."""
        normal = np.random.default_rng(0).standard_normal(20_000)
        low, high = 1.0, 1e3 * self.cap
        for _ in range(60):
            middle = math.sqrt(low * high)
            if self._cut(middle, normal).mean() < self.mean:
                low = middle
            else:
                high = middle
        return low


@dataclass(frozen=True)
class Setup:
    """A run.   token_seconds: of one decoded token for each of so many rows of a server.
    train_seconds: of a step with so many tokens.   weights_seconds: until a server has new weights, in which it decodes nothing.
    """

    prompts: int
    group: int
    lengths: Lengths
    servers: int
    slots: int
    token_seconds: Callable[[int], float]
    train_seconds: Callable[[float], float]
    weights_seconds: float = 0.0
    ahead: int = 0


@dataclass
class Server:
    """A vLLM server: rows that are decoded together."""

    setup: Setup
    decoded: float = 0.0
    """Tokens of each row since the beginning."""
    rows: list[tuple[float, int]] = field(default_factory=list)
    """A heap: the value of `decoded` at which a row ends, and its rollout."""
    moment: float = 0.0
    """The time up to which it is simulated."""

    def advance(self, now: float) -> None:
        """Decode until now."""
        if self.rows and now > self.moment:
            self.decoded += (now - self.moment) / self.setup.token_seconds(len(self.rows))
        self.moment = max(now, self.moment)

    def next_end(self) -> float:
        """Return the time at which its first row ends."""
        if not self.rows:
            return math.inf
        tokens = self.rows[0][0] - self.decoded
        return self.moment + max(tokens, 0.0) * self.setup.token_seconds(len(self.rows))

    def pause(self, seconds: float) -> None:
        """Decode nothing for some seconds."""
        self.moment += seconds


@dataclass(frozen=True)
class Simulated:
    """Seconds of a step, and for how many of them the trainer waited."""

    step: float
    waited: float


def simulate(setup: Setup, seed: int = 0) -> Simulated:
    """Run the steps, event by event."""
    generator = np.random.default_rng(seed)
    servers = [Server(setup) for _ in range(setup.servers)]
    waiting: deque[tuple[float, int]] = deque()
    left: dict[int, int] = {}
    tokens: dict[int, float] = {}
    begun = trained = 0
    done_training, ends, waits = math.inf, [0.0], []
    now = idle_since = 0.0
    while trained < STEPS:
        # Rollouts begin as soon as their weights are there.
        while begun <= trained + setup.ahead and begun < STEPS:
            drawn = setup.lengths.draw(setup.prompts * setup.group, generator)
            waiting.extend((float(length), begun) for length in drawn)
            left[begun] = len(drawn)
            tokens[begun] = float(drawn.sum()) + setup.lengths.prompt * setup.prompts
            begun += 1
        fill(servers, waiting, now)
        if done_training == math.inf and left[trained] == 0:
            waits.append(now - idle_since)
            done_training = now + setup.train_seconds(tokens[trained])
        ending = min(servers, key=Server.next_end)
        now = min(ending.next_end(), done_training)
        for server in servers:
            server.advance(now)
        if now == done_training:
            trained += 1
            done_training, idle_since = math.inf, now
            ends.append(now)
            for server in servers:
                server.pause(setup.weights_seconds)
            continue
        _, rollout = heapq.heappop(ending.rows)
        left[rollout] -= 1
    steps = np.diff(ends)[SKIPPED:]
    return Simulated(float(steps.mean()), mean(waits[SKIPPED:]))


def fill(servers: Sequence[Server], waiting: deque[tuple[float, int]], now: float) -> None:
    """Give waiting completions to the servers with the fewest rows."""
    while waiting:
        server = min(servers, key=lambda one: len(one.rows))
        if len(server.rows) >= server.setup.slots:
            return
        server.advance(now)
        length, rollout = waiting.popleft()
        heapq.heappush(server.rows, (server.decoded + length, rollout))


# ---------------------------------------------------------------- cards and models


@dataclass(frozen=True)
class Card:
    """A GPU: bytes per second, products per second in bfloat16, bytes of memory, by the maker's data sheet."""

    bandwidth: float
    flops: float
    memory: float


H100 = Card(3.35e12, 989e12, 80e9)
H20 = Card(4.0e12, 148e12, 96e9)


@dataclass(frozen=True)
class Model:
    """Parameters, those that a token uses, blocks, and bytes of keys and values of a token."""

    parameters: float
    active: float
    layers: int
    cache: float

    def read(self, rows: int) -> float:
        """Bytes of weights that a step with so many rows reads: of a mixture those experts that are used."""
        used = 1.0 - (1.0 - self.active / self.parameters) ** rows
        return 2.0 * self.parameters * used


MODELS = {
    "Llama 3.1 8B": Model(8.03e9, 8.03e9, 32, 2 * 32 * 8 * 128 * 2),
    "Qwen3 32B": Model(32.8e9, 32.8e9, 64, 2 * 64 * 8 * 128 * 2),
    "Qwen3 30B-A3B": Model(30.5e9, 3.3e9, 48, 2 * 48 * 4 * 128 * 2),
    "Qwen3 235B-A22B": Model(235e9, 22e9, 94, 2 * 94 * 4 * 128 * 2),
    "DeepSeek V3": Model(671e9, 37e9, 61, 61 * 576 * 2),
}


@dataclass(frozen=True)
class Efficiency:
    """What programs reach of a card's figures.

    dense, mixture: share of the products per second in an update.   layer: seconds of a block in a decoded token beside reading
    and multiplying; hop: the same for each further machine that a server spans.
    """

    dense: float
    mixture: float
    layer: float
    hop: float

    def training(self, model: Model) -> float:
        """Share of the products per second in an update."""
        return self.dense if model.active == model.parameters else self.mixture


BANDWIDTH, PRODUCTS = 0.7, 0.7
"""Shares of a card's bytes and products per second that decoding reaches; not fitted."""
NODE = 8
"""Cards of a machine."""
PASSES = 10
"""Products per token and parameter of a step: 6 of the update, 2 of the policy's log-probs, 2 of the reference's."""
WEIGHTS_PER_SECOND, WEIGHTS_SECONDS = 1e11, 2.0
"""How fast new weights reach the servers: bytes per second, and what every transfer takes beside."""


def on_cards(
    model: Model,
    card: Card,
    efficiency: Efficiency,
    *,
    prompts: int,
    group: int,
    lengths: Lengths,
    sampling: int,
    together: int,
    training: int,
    memory: float,
    ahead: int,
) -> Setup:
    """A run on GPUs.   sampling, training: numbers of cards.   together: cards of a server.
    memory: share of a card's memory that a server may fill.
    """
    context = lengths.prompt + lengths.mean / 2
    free = memory * card.memory * together - 2.0 * model.parameters
    overhead = model.layers * (efficiency.layer + efficiency.hop * (math.ceil(together / NODE) - 1))
    slots = max(1, int(free / (model.cache * (lengths.prompt + lengths.mean))))

    def token_seconds(rows: int) -> float:
        read = (model.read(rows) + rows * context * model.cache) / (card.bandwidth * BANDWIDTH * together)
        multiply = 2.0 * model.active * rows / (card.flops * PRODUCTS * together)
        return max(read, multiply) + overhead

    def train_seconds(tokens: float) -> float:
        return PASSES * model.active * tokens / (card.flops * efficiency.training(model) * training)

    weights = 2.0 * model.parameters / WEIGHTS_PER_SECOND + WEIGHTS_SECONDS
    servers = max(1, sampling // together)
    return Setup(prompts, group, lengths, servers, min(slots, 1024), token_seconds, train_seconds, weights, ahead)


# ---------------------------------------------------------------- NeMo RL


@dataclass(frozen=True)
class NemoRow:
    """A row of NeMo RL v0.4's performance summary: DGX H100, GRPO on OpenMathInstruct-2.  Asynchronous rows give half of the cards
    to the servers (their recipes' `generation.colocated.resources`)."""

    model: str
    ahead: int
    cap: int
    mean: int
    gpus: int
    completions: int
    together: int
    seconds: float

    def setup(self, efficiency: Efficiency) -> Setup:
        """Make its run."""
        cards = self.gpus // 2 if self.ahead else self.gpus
        return on_cards(
            MODELS[self.model],
            H100,
            efficiency,
            prompts=self.completions // 32,
            group=32,
            lengths=Lengths(self.mean, self.cap),  # their mean counts the prompt
            sampling=cards,
            together=self.together,
            training=cards,
            memory=0.8 if self.ahead else 0.6,
            ahead=self.ahead,
        )


NEMO_SOURCE = "NVIDIA-NeMo/RL, docs/about/performance-summary.md at 06beed91 (v0.4), DGX H100"
NEMO = (
    NemoRow("Llama 3.1 8B", 0, 4096, 1060, 16, 2048, 1, 97.7),
    NemoRow("Qwen3 32B", 0, 4096, 3206, 32, 2048, 4, 393),
    NemoRow("Qwen3 30B-A3B", 0, 4096, 3154, 32, 2048, 4, 225),
    NemoRow("Qwen3 235B-A22B", 0, 8192, 5671, 128, 512, 16, 506),
    NemoRow("DeepSeek V3", 0, 1536, 745, 256, 512, 32, 154),
    NemoRow("Llama 3.1 8B", 1, 4096, 1129, 16, 2048, 1, 74.6),
    NemoRow("Qwen3 32B", 1, 4096, 3207, 64, 2048, 4, 215),
    NemoRow("Qwen3 30B-A3B", 1, 4096, 3158, 32, 2048, 2, 244),
    NemoRow("Qwen3 235B-A22B", 1, 8192, 5691, 256, 512, 8, 241),
    NemoRow("DeepSeek V3", 1, 1536, 744, 512, 512, 32, 77.9),
)


FITTED = {"share of a dense model": 5, "share of a mixture": 7, "layer": 0, "hop": 3}
"""What each row of `NEMO` is used for; the other rows are predictions."""


@cache
def fitted() -> Efficiency:
    """Find the four numbers of an efficiency, each from one row.

    A row that is ahead takes as long as its trainers, which gives their share of the card's products per second.  What a row in
    turn takes beside training is sampling: a block's seconds in a decoded token, on one machine and on several.
    """
    dense = trainer_bound(NEMO[FITTED["share of a dense model"]])
    mixture = trainer_bound(NEMO[FITTED["share of a mixture"]])
    layer = bisected(lambda value: Efficiency(dense, mixture, value, 0.0), NEMO[FITTED["layer"]])
    hop = bisected(lambda value: Efficiency(dense, mixture, layer, value), NEMO[FITTED["hop"]])
    return Efficiency(dense, mixture, layer, hop)


def trainer_bound(row: NemoRow) -> float:
    """Return the share with which a row's trainers take all of its step."""
    setup = row.setup(Efficiency(1.0, 1.0, 0.0, 0.0))
    return setup.train_seconds(row.completions * row.mean) / row.seconds


def bisected(make: Callable[[float], Efficiency], row: NemoRow) -> float:
    """Find the seconds for which a row's simulation takes what was published."""
    low, high = 0.0, 2e-3
    for _ in range(9):
        middle = (low + high) / 2
        if simulate(row.setup(make(middle))).step < row.seconds:
            low = middle
        else:
            high = middle
    return low


def nemo() -> list[dict]:
    """Predictions beside the rows: efficiencies from those in turn, errors of those ahead."""
    efficiency = fitted()
    print(f"\n{NEMO_SOURCE}")
    print(f"four numbers from four rows: {efficiency}")
    print("| model | GPUs | ahead | published s | simulated s | error | |\n|---|---|---|---|---|---|---|")
    found = []
    for number, row in enumerate(NEMO):
        seconds = simulate(row.setup(efficiency)).step
        off = seconds / row.seconds - 1
        how = "fitted" if number in FITTED.values() else "predicted"
        print(f"| {row.model} | {row.gpus} | {row.ahead} | {row.seconds:g} | {seconds:.0f} | {off:+.0%} | {how} |")
        found.append({"model": row.model, "ahead": row.ahead, "published": row.seconds, "simulated": seconds, "how": how})
    return found


# ---------------------------------------------------------------- verl

VERL_SOURCE = (
    "volcengine/verl, docs/advance/fully_async.md at 21470098, H20, Qwen2.5-Math-7B, 512 x 16 completions up to 28K tokens"
)
VERL = (
    # GPUs, colocated: step, gen, old_log_prob, update; half training and half sampling: step, update
    (32, (790.10, 357.41, 107.71, 313.81), (294.77, 269.80)),
    (64, (365.28, 150.72, 70.26, 133.41), (189.26, 156.98)),
    (128, (356.30, 177.85, 53.92, 113.81), (150.63, 113.16)),
)
"""Their lengths are not published, and differ between the runs of a row: an update takes as long on half of the cards.  So the mean
length of each run is the one that its own update tells, at half of the card's products per second."""
QWEN_7B = Model(7.6e9, 7.6e9, 28, 2 * 28 * 4 * 128 * 2)
VERL_SHARE, VERL_COMPLETIONS = 0.5, 512 * 16


def verl(efficiency: Efficiency) -> list[dict]:
    """Predict the sampling of the colocated runs and the step of the asynchronous ones, from the update of each."""
    print(f"\n{VERL_SOURCE}")
    print("| run | cards | mean length by its update | published s | simulated s | error |\n|---|---|---|---|---|---|")
    found = []
    for gpus, (_, sampling, _, own_update), (step, update) in VERL:
        for name, cards, ahead, training, published in (
            ("colocated, sampling", gpus, 0, own_update, sampling),
            ("asynchronous, step", gpus // 2, 1, update, step),
        ):
            length = training * cards * H20.flops * VERL_SHARE / (6 * QWEN_7B.active) / VERL_COMPLETIONS
            made = on_cards(
                QWEN_7B,
                H20,
                efficiency,
                prompts=512,
                group=16,
                lengths=Lengths(length, 28_672),
                sampling=cards,
                together=1,
                training=cards,
                memory=0.8,
                ahead=ahead,
            )
            seconds = simulate(replace(made, train_seconds=always(training if ahead else 0.0))).step
            off = seconds / published - 1
            print(f"| {name} | {cards} | {length:.0f} | {published:g} | {seconds:.0f} | {off:+.0%} |")
            found.append({"run": name, "cards": cards, "length": length, "published": published, "simulated": seconds})
    return found


def always(seconds: float) -> Callable[[float], float]:
    """Return a trainer that takes as long whatever the number of tokens."""
    return lambda _: seconds


# ---------------------------------------------------------------- runs of ours


def own(folders: Sequence[Path]) -> list[dict]:
    """Predict the step of runs with vLLM from the phases of the first one, which samples and trains in turn."""
    runs = {folder: logged(folder) for folder in folders}
    first = runs[folders[0]]
    print("\n| run | ahead | measured s | simulated s | error |\n|---|---|---|---|---|")
    found = []
    for folder, run in runs.items():
        lengths = Lengths(first["length"], int(first["length"]), spread=0.0)
        setup = Setup(
            prompts=1,
            group=int(first["completions"]),
            lengths=lengths,
            servers=1,
            slots=1024,
            token_seconds=row_seconds(first["sampling"] / first["length"] / first["completions"]),
            train_seconds=always(first["training"]),
            weights_seconds=first["weights"],
            ahead=int(run["ahead"]),
        )
        seconds = simulate(setup).step
        off = seconds / run["step"] - 1
        print(f"| {folder.name} | {run['ahead']} | {run['step']:.2f} | {seconds:.2f} | {off:+.0%} |")
        found.append({"run": folder.name, **run, "simulated": seconds})
    return found


def row_seconds(seconds: float) -> Callable[[int], float]:
    """Return a server on a processor, whose decoded token takes as much longer as there are rows."""
    return lambda rows: seconds * rows


def logged(folder: Path) -> dict[str, float]:
    """Medians of a run's log: seconds of a step and of its phases, behind the first two steps."""
    from groupwise.config.recipes import parse_recorded

    recipe = parse_recorded((folder / "config.yaml").read_text(encoding="utf-8"), "config.yaml")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["step"] > SKIPPED and "time/rollout" in line]

    def seconds(name: str) -> float:
        return median([line.get(f"time/{name}", 0.0) for line in lines])

    phases = [name for name in lines[-1] if name.startswith("time/") and name.count("/") == 1]
    whole = [sum(line.get(name, 0.0) for name in phases) for line in lines]
    return {
        "ahead": recipe.rollout.engine.ahead,
        "step": median(whole),
        "sampling": seconds("rollout"),
        "weights": seconds("sync"),
        "training": median(whole) - seconds("rollout") - seconds("sync"),
        "length": median([line["completions/mean_length"] for line in lines]),
        "completions": recipe.group.prompts_per_step * recipe.group.group_size,
    }


# ---------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", nargs="+", type=Path, metavar="RUN", help="run folders; the first has ahead 0")
    parser.add_argument(
        "--billions", type=float, metavar="N", help="parameters of a dense model: simulate the run of these options"
    )
    for name, default in (("prompts", 64), ("group", 16), ("cap", 8192), ("prompt", 200), ("servers", 8), ("trainers", 8)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--mean", type=float, default=2000.0, help="tokens of a completion (default %(default)s)")
    parser.add_argument("--ahead", type=int, default=0)
    options = parser.parse_args()
    if options.own:
        save("simulate_own", {"runs": own(options.own)})
    elif options.billions:
        chosen(options)
    else:
        rows = nemo()
        save("simulate", {"nemo": rows, "verl": verl(fitted())})


def chosen(options: argparse.Namespace) -> None:
    """Simulate the run that the options describe, on H100s, one for each server."""
    count = options.billions * 1e9
    setup = on_cards(
        Model(count, count, 32, 1.3e5),
        H100,
        fitted(),
        prompts=options.prompts,
        group=options.group,
        lengths=Lengths(options.mean, options.cap, options.prompt),
        sampling=options.servers,
        together=1,
        training=options.trainers,
        memory=0.8,
        ahead=options.ahead,
    )
    done = simulate(setup)
    print(f"{done.step:.1f} s a step, in which the trainers wait {done.waited:.1f} s")


if __name__ == "__main__":
    main()
