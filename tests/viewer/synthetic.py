"""Run folders made up for the tests of the viewer: small ones through the library's own writers, and a large one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.data import vocabulary
from groupwise.data.vocabulary import Vocabulary
from groupwise.records import Branch, Episode, Finish, Prompt, Rollout, RolloutGroup, Sampling, Step, ToolCall, Turn
from groupwise.runs import rollout_files
from groupwise.runs.folder import CONFIG, DONE
from groupwise.runs.metrics_log import METRICS
from groupwise.runs.rollout_files import TOKENS
from groupwise.runs.run_files import CHECKSUMS, RunFiles
from groupwise.runs.starts import ENVIRONMENT

HOSTILE = (
    "<script>window.pwned = 1</script>",
    '<img src=x onerror="window.pwned = 2">',
    "</script><script>window.pwned = 3</script>",
    "<a href=\"javascript:window.pwned = 4\">click</a> javascript:window.pwned=5",
    "\x1b[31mred\x1b]8;;http://evil.example/\x07link\x1b]8;;\x07\x1b]0;title\x07",
    "[red]rich[/red] [/oops] {{ 7 * 7 }} ${7*7} <%= 7 %>",
    "\u202egnp.exe\u202c \u2066isolated\u2069 zero\u200bwidth\ufeff soft\u00adhyphen",
    "<svg/onload=window.pwned=6> <iframe srcdoc='<script>parent.pwned=7</script>'>",
    "<style>*{display:none}</style><base href=//evil.example/><meta http-equiv=refresh content=0>",
    "nul\x00byte \x7f \x85 bell\x07",
    "lone \\ud800 surrogate",
    "<!--<script>--> ]]> &lt;script&gt; &#x3c;b&#x3e;",
    "__proto__ constructor toString",
    "שלום עולם مرحبا بالعالم",
    "x" * 100_000,
)  # fmt: skip
"""Completions that try to be more than text."""


def make_step(
    number: int,
    *,
    groups: int = 3,
    size: int = 4,
    texts: Sequence[str] = (),
    length: int = 6,
    clipped: bool = True,
    reference: bool = True,
    prompts: int = 5,
) -> Step:
    """A step whose rewards rise with its number; a token is a character of `texts`, or of a made-up answer."""
    chance = np.random.default_rng(number)
    found = []
    columns: dict[str, list[list[np.ndarray]]] = {name: [] for name in ("weight", "entropy", "clipped", "gradient", "last_logp")}
    advantages, current = [], []
    for g in range(groups):
        asked = (number * groups + g) % prompts
        prompt = Prompt(
            id=f"{number}/{g}", tokens=np.array([65, 66]), text=f"What is {asked} + {asked}?", row={"answer": str(2 * asked)}
        )
        rewards = np.clip(np.round(chance.random((size, 2)) + 0.01 * number - 0.3), 0, 1)
        if g == 0:
            rewards[:] = 1.0  # a dead group
        rollouts = []
        for i in range(size):
            text = (
                texts[(g * size + i) % len(texts)] if texts else ("therefore " if number > 20 else "so ") + "7" * (1 + i % length)
            )
            ids = np.frombuffer(text.encode("utf-8", "backslashreplace"), np.uint8).astype(np.int64)
            ids = np.concatenate([ids, [256]])
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    index=i,
                    tokens=ids,
                    behavior_logp=-chance.random(ids.size).astype(np.float32),
                    finish=Finish.EOS,
                    eos_ids=(256,),
                    sampling=Sampling(),
                    text=text,
                    trained=np.ones(ids.size, bool),
                    version=np.full(ids.size, number),
                )
            )
        reward = rewards @ np.array([1.0, 0.5])
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        signals = {"reference_logp": tuple(-chance.random(len(r)).astype(np.float32) for r in rollouts)} if reference else {}
        found.append(
            RolloutGroup(
                rollouts=tuple(rollouts),
                names=("accuracy", "format"),
                rewards=rewards,
                reward=reward,
                weights=(1.0, 0.5),
                signals=signals,
            )
        )
        advantages.append([np.full(len(r), a) for r, a in zip(rollouts, advantage, strict=True)])
        current.append([r.behavior_logp + np.float32(1e-4) for r in rollouts])
        columns["weight"].append([np.full(len(r), 1 / len(r) / size) for r in rollouts])
        columns["entropy"].append([chance.random(len(r)).astype(np.float32) for r in rollouts])
        moved = [chance.normal(0, 0.15, len(r)).astype(np.float32) for r in rollouts]
        columns["last_logp"].append([r.behavior_logp + by for r, by in zip(rollouts, moved, strict=True)])
        cut = [clipped & (by * np.sign(a) > 0) & (np.abs(np.exp(by) - 1) > 0.2) for by, a in zip(moved, advantage, strict=True)]
        columns["clipped"].append([one.astype(np.float32) for one in cut])
        pushes = zip(moved, cut, rollouts, advantage, strict=True)
        columns["gradient"].append([np.abs(a) * np.exp(by) * ~out / len(r) / size for by, out, r, a in pushes])
    every = np.concatenate([group.reward for group in found])
    metrics = {
        "reward": float(every.mean()),
        "entropy": 1.0 / number,
        "groups/dead": 1 / groups,
        "completions/mean_length": 5.0,
    }
    return Step(
        number=number,
        metrics={**metrics, "tokens/sampled": 100.0, "kl": math.nan if number == 1 else 0.01 * number},
        timings={"rollout": 1.0},
        groups=found,
        advantages=advantages,
        current_logp=current,
        columns=columns,
    )


def make_run(
    folder: Path,
    steps: int = 12,
    *,
    config: str = "objective: grpo\nsteps: 40\ngroup: {beta: 0.01}\n",
    evaluated: bool = True,
    **keywords: object,
) -> Path:
    """A finished run folder of small steps."""
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(config, encoding="utf-8")
    start = {"versions": {"torch": "2.13.0"}, "cpu": "a processor", "command": ["groupwise", "train"]}
    (folder / ENVIRONMENT).write_text(json.dumps({"attempts": [start]}), encoding="utf-8")
    pieces = Vocabulary([*(bytes([byte]) for byte in range(256)), b"<|end|>"], frozenset({256}))
    (folder / TOKENS).write_bytes(vocabulary.to_bytes(pieces))
    for number in range(1, steps + 1):
        add_step(folder, number, **keywords)
    if evaluated:
        held_out = Step(number=steps, metrics={}, groups=make_step(steps).groups)
        rollout_files.write(RunFiles(folder), rollout_files.EVALUATIONS, held_out, folder.name)
    (folder / DONE).write_text(json.dumps({"step": steps}), encoding="utf-8")
    return folder


def make_episodes(folder: Path, texts: Sequence[str] = ()) -> Path:
    """A run whose completions are episodes: one with a tool that worked and one that failed, one out of time behind a split.

    texts: what the world says, instead of harmless words.
    """
    make_run(folder, 1, evaluated=False, groups=1, size=2)
    say = texts[0] if texts else "4"
    prompt = Prompt(id="1/0", tokens=np.array([65]), text="What is 2 + 2?")

    def rollout(index: int, parts: Sequence[tuple[str, bool]], finish: Finish, make: Callable[[list[int]], Episode]) -> Rollout:
        pieces = [np.frombuffer(text.encode("utf-8", "backslashreplace"), np.uint8).astype(np.int64) for text, _ in parts]
        ends = np.cumsum([piece.size for piece in pieces]).tolist()
        ids = np.concatenate(pieces)
        trained = np.concatenate([np.full(piece.size, own) for piece, (_, own) in zip(pieces, parts, strict=True)])
        return Rollout(
            prompt=prompt, index=index, tokens=ids, behavior_logp=np.full(ids.size, -0.5, np.float32), finish=finish,
            eos_ids=(256,), sampling=Sampling(), text="".join(text for text, _ in parts), trained=trained, episode=make([0, *ends]),
        )  # fmt: skip

    def worked(at: list[int]) -> Episode:
        calls = (
            ToolCall(name="add", arguments='{"a": 2, "b": 2}', result=say, seconds=0.25),
            ToolCall(name="divide", arguments='{"a": 1, "b": 0}', result="division by zero", seconds=0.5, failure="exception"),
        )
        turns = (
            Turn(begin=0, end=at[1], finish=Finish.TOOL_CALLS, calls=calls, answer=say, seconds=1.0, truncated=True),
            Turn(begin=at[2], end=at[3], finish=Finish.DONE, seconds=0.0, reward=1.0),
        )
        return Episode(turns=turns, environment="calculator", reward=1.0)

    def late(at: list[int]) -> Episode:
        turns = (
            Turn(begin=0, end=at[1], finish=Finish.EOS, answer=say, seconds=30.0),
            Turn(begin=at[2], end=at[3], finish=Finish.DEADLINE, seconds=2.0),
        )
        return Episode(turns=turns, branches=(Branch(begin=at[2], context=np.arange(1, 12)),), environment="calculator")

    rollouts = (
        rollout(0, [("call add and divide", True), (f"[{say}]", False), ("the answer is 4", True)], Finish.DONE, worked),
        rollout(1, [("let me think", True), (f"[{say}]", False), ("still thinking", True)], Finish.DEADLINE, late),
    )
    reward = np.array([1.0, 0.0])
    group = RolloutGroup(rollouts=rollouts, names=("accuracy",), rewards=reward[:, None], reward=reward)
    columns = {"weight": [[np.where(one.trained, 0.1, 0.0) for one in rollouts]]}
    advantages = [[np.full(len(one), 1.0 - 2 * i) for i, one in enumerate(rollouts)]]
    step = Step(number=1, metrics={}, groups=[group], advantages=advantages, columns=columns)
    rollout_files.write(RunFiles(folder), rollout_files.ROLLOUTS, step, folder.name)
    return folder


def make_agents(folder: Path, texts: Sequence[str] = ()) -> Path:
    """A run whose completions are episodes of agents: one with a title on the side, two agents and files; one that left nothing.

    texts: what the agent prints, instead of harmless words.
    """
    make_run(folder, 1, evaluated=False, groups=1, size=2)
    row = {"files": {"solution.py": "x = 1\n", "gone.py": "", "kept.py": "y"}}
    prompt = Prompt(id="1/0", tokens=np.array([65]), text="Repair it.", row=row)
    ids = lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int64)  # noqa: E731
    title, work, answer, done = "A title", "I look", "[x = 1]", "Done"
    at = np.cumsum([0, *map(len, (title, work, answer, done))]).tolist()
    call = ToolCall(name="bash", arguments='{"command": "cat solution.py"}', result="x = 1", seconds=0.5)
    unread = ToolCall(name="bash", arguments='{"command": "exit"}', result="", seconds=0.0)
    turns = (
        Turn(begin=at[0], end=at[1], finish=Finish.EOS, side=True),
        Turn(begin=at[1], end=at[2], finish=Finish.TOOL_CALLS, calls=(call,), answer="x = 1", seconds=0.5, wishes=("web_search",)),
        Turn(begin=at[3], end=at[4], finish=Finish.TOOL_CALLS, agent=1, calls=(unread,)),
    )
    branches = (Branch(begin=0, context=ids("Name it.")), Branch(begin=at[1], context=ids("Repair it.")))
    files = {"solution.py": "x = 2\n", "new.py": "z = 3\n", "kept.py": "y"}
    printed = texts[0] if texts else "all checks pass"
    episodes = (
        Episode(turns=turns, branches=branches, state={"files": files, "output": printed}),
        Episode(turns=turns[:1], branches=branches[:1], state={"files": row["files"], "output": ""}),
    )
    rollouts = []
    for index, episode in enumerate(episodes):
        text = title if index else title + work + answer + done
        tokens = ids(text)
        trained = np.zeros(tokens.size, bool)
        for turn in episode.turns:
            trained[turn.begin : turn.end] = not turn.side
        rollouts.append(
            Rollout(
                prompt=prompt, index=index, tokens=tokens, behavior_logp=np.full(tokens.size, -0.5), finish=Finish.DONE,
                eos_ids=(256,), sampling=Sampling(), text=text, trained=trained, episode=episode,
            )
        )  # fmt: skip
    reward = np.array([1.0, 0.0])
    group = RolloutGroup(rollouts=tuple(rollouts), names=("code",), rewards=reward[:, None], reward=reward)
    step = Step(number=1, metrics={}, groups=[group])
    rollout_files.write(RunFiles(folder), rollout_files.ROLLOUTS, step, folder.name)
    return folder


def make_game(folder: Path, asked: str, openings: Sequence[str | tuple[str, ...]]) -> Path:
    """A run of one step whose groups are games of two completions.

    asked: the prompt, with `{}` where `reset` adds its text.   openings: what it adds, of each group or each completion.
    """
    make_run(folder, 1, evaluated=False, groups=1, size=2)
    ids = lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int64)  # noqa: E731
    groups = []
    for g, opening in enumerate(openings):
        prompt = Prompt(id=f"1/{g}", tokens=ids(asked.format("")), text=asked.format(""))
        rollouts = []
        for index, added in enumerate((opening, opening) if isinstance(opening, str) else opening):
            seen = asked.format(added)
            turn = Turn(begin=0, end=1, finish=Finish.DONE, seconds=3.7e-4, answer="right")
            episode = Episode(
                turns=(turn,), branches=(Branch(begin=0, context=ids(seen)),), environment="game", opening=added, prompt_text=seen
            )
            rollouts.append(
                Rollout(
                    prompt=prompt, index=index, tokens=ids(str(index)), behavior_logp=np.full(1, -0.5), finish=Finish.DONE,
                    eos_ids=(256,), sampling=Sampling(), text=str(index), episode=episode,
                )
            )  # fmt: skip
        reward = np.array([1.0, 0.0])
        groups.append(RolloutGroup(rollouts=tuple(rollouts), names=("won",), rewards=reward[:, None], reward=reward))
    rollout_files.write(RunFiles(folder), rollout_files.ROLLOUTS, Step(number=1, metrics={}, groups=groups), folder.name)
    return folder


def add_step(folder: Path, number: int, **keywords: object) -> None:
    """One step more, as a run writes it: completions first, then the line."""
    step = make_step(number, **keywords)  # type: ignore[arg-type]
    rollout_files.write(RunFiles(folder), rollout_files.ROLLOUTS, step, folder.name)
    limit = {"tokens/shared": 90.0, "tokens/dead": 20.0, "tokens/recomputed": 0.0, "flops/per_second": 2.5e6}
    times = {"time/rollout": 1.0, "time/update": 3.0}
    line = {"step": number, **step.metrics, **limit, **times, "wall": 1.7e9 + 10 * number}
    with open(folder / METRICS, "a", encoding="utf-8") as file:
        file.write(json.dumps({name: str(value) if value != value else value for name, value in line.items()}) + "\n")


def make_large(folder: Path, steps: int = 10_000, *, groups: int = 8, size: int = 8, tokens: int = 32) -> Path:
    """A run of `steps` x `groups` x `size` completions, in the files that a long run has."""
    first = make_run(folder, 1, evaluated=False)
    (first / CHECKSUMS).unlink()
    with pq.ParquetFile(_template(first)) as file:
        schema = file.schema_arrow
    chance = np.random.default_rng(0)
    rows = groups * size
    words = ["so", "then", "add", "carry", "the", "one", "and", "write", "42", "done", "=", "+"]
    texts = [" ".join(chance.choice(words, 8)) for _ in range(997)]
    for step in range(1, steps + 1):
        pq.write_table(
            _rows(step, schema, chance, texts, groups, rows, tokens),
            first / rollout_files.ROLLOUTS / f"{step:06d}.parquet",
            compression="zstd",
        )
    names = [f"metric/{i}" for i in range(34)]
    with open(first / METRICS, "w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            line = {
                "step": step,
                "reward": 0.5 + step / steps / 3,
                "entropy": 1 / step,
                **dict(zip(names, chance.random(34).round(6), strict=True)),
            }
            file.write(json.dumps({**line, "tokens/sampled": rows * tokens, "wall": 1.7e9 + step}) + "\n")
    (first / DONE).write_text(json.dumps({"step": steps}), encoding="utf-8")
    return first


def _template(folder: Path) -> Path:
    rollout_files.write(RunFiles(folder), "template", make_step(1), folder.name)
    return folder / "template" / "000001.parquet"


def _rows(
    step: int, schema: pa.Schema, chance: np.random.Generator, texts: list[str], groups: int, rows: int, tokens: int
) -> pa.Table:
    """The completions of one step, straight into columns."""
    flat = rows * tokens
    offsets = pa.array(np.arange(0, flat + 1, tokens), pa.int32())

    def per_token(values: np.ndarray, kind: pa.DataType) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, pa.array(values, kind))

    numbers = chance.random(flat).astype(np.float32)
    place = np.repeat(np.arange(groups), rows // groups)
    prompts = [f"What is {(step * groups + group) % 4999} + 1?" for group in range(groups)]
    reward = chance.random(rows).round(1)
    plain = {
        "step": np.full(rows, step), "group": place, "index": np.tile(np.arange(rows // groups), groups), "reward": reward,
        "rewards/accuracy": reward, "rewards/format": np.ones(rows), "finish": ["eos"] * rows,
        "sampling": ["{}"] * rows, "row": ["{}"] * rows,
        "prompt_id": [f"{step}/{group}" for group in place], "prompt_text": [prompts[group] for group in place],
        "completion_text": [texts[i] for i in chance.integers(0, len(texts), rows)], "run": ["large"] * rows,
    }  # fmt: skip
    columns = []
    for field in schema:
        if field.name in plain:
            columns.append(pa.array(plain[field.name]).cast(field.type))
        elif field.name == "support" or not pa.types.is_list(field.type):  # and what only episodes have
            columns.append(pa.nulls(rows, field.type))
        elif field.name in ("prompt_ids", "eos_ids"):
            columns.append(pa.array([[1, 2]] * rows, field.type))
        elif field.name == "completion_ids":
            columns.append(per_token(chance.integers(97, 122, flat), pa.int64()))
        elif field.name in ("trained", "version", "advantages", "update/weight", "update/clipped"):
            constant = (
                np.repeat(reward, tokens) if field.name == "advantages" else np.full(flat, step if field.name == "version" else 1)
            )
            columns.append(per_token(constant.astype(bool) if field.name == "trained" else constant, field.type.value_type))
        else:
            columns.append(per_token(-numbers, field.type.value_type))
    return pa.Table.from_arrays(columns, schema=schema)
