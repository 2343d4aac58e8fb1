"""Random runs: a recipe, its data, reward functions, chat template and tools, all drawn from a seed.

`Case(seed).write(folder)` writes the files of one; most have something wrong with them, as a rule one or two things.
"""

from __future__ import annotations

import json
import random
import typing
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from annotated_types import Ge, Gt, Le, Lt

from groupwise.algorithms.table import ALGORITHMS
from groupwise.config.objectives import DATASET
from groupwise.config.schema import settings_table

REWARDS = """
import asyncio, os, sys, time

def length(completions, **_): return [float(len(str(one))) for one in completions]
def one(completion): return len(str(completion)) / 9
def column(completions, answer): return [float(str(gold) in str(text)) for text, gold in zip(completions, answer)]
def missing(completions, nosuch): return [0.0] * len(completions)
def none(completions, **_): return [None] * len(completions)
def some(completions, **_): return [None if n % 2 else 1.0 for n, _ in enumerate(completions)]
def words(completions, **_): return ["good"] * len(completions)
def short(completions, **_): return [1.0]
def nothing(completions, **_): pass
def nan(completions, **_): return [float("nan")] * len(completions)
def raises(completions, **_): raise KeyError("inside")
def leaves(completions, **_): sys.exit(3)
def dies(completions, **_): os._exit(4)
def prints(completions, **_): print("x" * 100_000); return [1.0] * len(completions)
def sleeps(completions, **_): time.sleep(30); return [1.0] * len(completions)
async def waits(completions, **_): await asyncio.sleep(0.001); return [1.0] * len(completions)
def positional(completions, /): return [1.0] * len(completions)
def generator(completions, **_): yield 1.0
def messages(completions, **_): return [float(len(one[0]["content"])) for one in completions]
def logs(completions, log_metric, log_extra, **_):
    log_metric("x", 1.0); log_extra("y", ["z"] * len(completions)); return [1.0] * len(completions)
def bad_logs(completions, log_metric, **_): log_metric("x", float("nan")); return [1.0] * len(completions)
class Held:
    def __call__(self, completion): return 1.0
held, NUMBER = Held(), 3
"""
FUNCTIONS = (
    "length", "one", "column", "missing", "none", "some", "words", "short", "nothing", "nan", "raises", "leaves", "dies", "prints",
    "sleeps", "waits", "positional", "generator", "messages", "logs", "bad_logs", "held", "NUMBER", "Held", "typo",
)  # fmt: skip
SOUND = ("length", "one", "some", "waits", "logs", "held")
BUILT_IN = ("accuracy", "exact", "number", "think_format", "tags", "repetition", "soft_overlong", "cosine_length", "regex", "model",
            "environment")  # fmt: skip

TOOLS = '''
import os, time

def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: another
    """
    return a + b

def bare(a, b): return a
def undocumented(a: int) -> int: return a
def raises(a: int) -> int:
    """Raise.

    Args:
        a: a number
    """
    raise ValueError("no")
def huge(a: int) -> str:
    """Much.

    Args:
        a: a number
    """
    return "x" * 1_000_000
async def waits(a: int) -> int:
    """Wait.

    Args:
        a: a number
    """
    return a
def odd(*a: int, **b: str) -> object:
    """Odd."""
    return object()

class Room:
    """A room."""
    def reset(self, **row): return "You are in a room."
    def look(self, where: str) -> str:
        """Look.

        Args:
            where: a direction
        """
        return where
    def get_reward(self): return 1.0

class Steps:
    def reset(self, **row): return None
    def step(self, text): return "again", 0.5, len(text) > 3

class Broken:
    def reset(self, **row): raise RuntimeError("no reset")
    def step(self, text): return None

class Untyped:
    def reset(self): pass
    def act(self, x): return x

def harness(base_url, row): return 1.0
NUMBER = 3
'''
TOOL_NAMES = ("add", "bare", "undocumented", "raises", "huge", "waits", "odd", "NUMBER", "typo")
ROOMS = ("Room", "Steps", "Broken", "Untyped", "NUMBER", "typo", "add")

TEMPLATES = (
    None,
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
    "{% for m in messages %}{{ m.content }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{{ messages[0]['content'] }}",
    "{% for m in messages %}{{ m.nosuch.deeper }}{% endfor %}",
    "{{ raise_exception('only users') }}",
    "{% for m in messages %}",
    "{{ 1 / 0 }}",
    "",
    "constant",
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content | upper }} {% endfor %}",
    "missing.jinja",
)

TOOLED = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>'
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that shows tools."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 1e3, 0.5, -0.1, 1e30, 10**20, "", "x", "none", "true", "1", "a:b", "a.py:f", "live:x",
    "stage:x", "/", "..", "x" * 300, "\u0000", "\U0001f600", [], [1], ["a"], [[]], {}, {"a": 1}, {"name": "x"}, [{}],
    {"function": 1},
)  # fmt: skip


def messages_of(rng: random.Random, text: str) -> list[Any]:
    turns: list[Any] = [{"role": "user", "content": text}]
    if rng.random() < 0.3:
        turns.insert(0, {"role": "system", "content": "brief"})
    if rng.random() < 0.3:
        turns += [{"role": "assistant", "content": text[::-1]}, {"role": "user", "content": "and?"}]
    if rng.random() < 0.15:
        wrong: list[Any] = ["x", None, {"role": "user"}, {"content": "x"}, {"role": "robot", "content": "x"}]
        wrong += [{"role": "user", "content": content} for content in (3, None, [{"type": "text", "text": "part"}])]
        turns.insert(rng.randrange(len(turns) + 1), rng.choice(wrong))
    return turns


def row_of(rng: random.Random, form: str, n: int) -> Any:
    """One row; now and then a wrong one."""
    text, answer = f"{n}+{n}=", str(2 * n)
    row: dict[str, Any]
    match form:
        case "text":
            row = {"prompt": text, "answer": answer}
        case "messages":
            row = {"prompt": messages_of(rng, text), "answer": answer}
        case "conversation":
            row = {"messages": [*messages_of(rng, text), {"role": "assistant", "content": answer}]}
        case "json":
            row = {"messages": json.dumps(messages_of(rng, text)), "answer": answer}
        case "sft":
            row = {"prompt": text, "completion": answer}
        case "pairs":
            row = {"prompt": text, "chosen": answer, "rejected": "x"}
        case "implicit":
            asked = [{"role": "user", "content": text}]
            row = {side: [*asked, {"role": "assistant", "content": said}] for side, said in (("chosen", answer), ("rejected", "x"))}
        case "steps":
            row = {"prompt": text, "completions": [answer, "."], "labels": [True, False]}
        case "alpaca":
            row = {"instruction": text, "input": "", "output": answer}
        case _:
            row = {"question": text, "solution": answer, "tests": [answer]}
    draw = rng.random()
    if draw < 0.03:
        row[rng.choice(list(row))] = rng.choice([None, "", 3, 1.5, [], {}, "\x1b[31m", "é" * 200, True, [None], {"a": [1]}])
    elif draw < 0.04:
        del row[rng.choice(list(row))]
    elif draw < 0.06:
        row |= {"tools": rng.choice([[], None, [{"type": "function"}], "x"]), "environment": "room"}
    elif draw < 0.08:
        row["chat_template_kwargs"] = {"enable_thinking": False}
    return row


FORMS = ("text", "messages", "conversation", "json", "sft", "pairs", "implicit", "steps", "alpaca", "question")
FITTING = {"sft": ("sft", "conversation", "alpaca"), "reward": ("pairs", "implicit"), "dpo": ("pairs", "implicit"),
           "prm": ("steps",)}  # fmt: skip


def value_of(rng: random.Random, hint: Any) -> Any:
    """A value of a setting's type and range, or one that is neither."""
    if rng.random() < 0.3:
        return rng.choice(VALUES)
    members = [one for one in typing.get_args(hint) if one is not type(None)] if typing.get_origin(hint) in UNIONS else [hint]
    member = rng.choice(members)
    if typing.get_origin(member) is typing.Literal:
        return rng.choice(typing.get_args(member))
    base, *bounds = typing.get_args(member) if typing.get_origin(member) is typing.Annotated else (member,)
    low = next((float(getattr(one, "ge", getattr(one, "gt", 0))) for one in bounds if isinstance(one, Ge | Gt)), 0.0)
    high = next((float(getattr(one, "le", getattr(one, "lt", 0))) for one in bounds if isinstance(one, Le | Lt)), low + 8.0)
    if base is int:
        return rng.randint(int(low), int(min(high, low + 8)))
    if base is float:
        return rng.choice([low, high, (low + high) / 2, 1e-3])
    if base is bool:
        return rng.random() < 0.5
    return rng.choice(VALUES)


UNIONS = (typing.Union, type(int | None))


class Case:
    """One random run."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)

    def write(self, folder: Path, model: Path) -> Path:
        """The recipe's file, in a folder with all that it names.   model: a small checkpoint with a chat template."""
        rng = self.rng
        (folder / "fuzz_rewards.py").write_text(REWARDS)
        (folder / "fuzz_tools.py").write_text(TOOLS)
        objective = rng.choice(tuple(ALGORITHMS)) if rng.random() < 0.65 else rng.choice(DATASET)
        tree: dict[str, Any] = {"objective": objective, "name": f"run{self.seed}", "steps": 1, "eval": {"at_start": False, "k": 1}}
        if rng.random() < 0.15:
            tree["model"] = {"path": str(model)}
        else:
            family = rng.choice(["llama", "llama", "qwen2", "qwen3", "gpt2", "gemma2", "mixtral"])
            scratch = {"family": family, "hidden": 16, "layers": 1, "heads": 2, "context": rng.choice([64, 128])}
            tree["model"] = {"scratch": scratch | {"tokenizer": rng.choice(["bytes", "bytes", "arithmetic"])}}
        if (template := rng.choice(TEMPLATES) if rng.random() < 0.25 else None) is not None:
            tree["model"]["chat_template"] = template
        tree["data"] = self._data(folder, objective)
        tree["rollout"] = {"max_new_tokens": rng.choice([1, 4, 8])}
        if objective in ALGORITHMS:
            tree["group"] = {
                "prompts_per_step": rng.choice([1, 2, 2, 4]),
                "group_size": rng.choice([2, 2, 3, 1]) if rng.random() < 0.3 else 2,
            }
            tree["rewards"] = [self._reward() for _ in range(rng.choice([1] * 12 + [0, 2, 2, 3]))]
        else:
            tree["batch_size"] = rng.choice([1, 2, 4])
        if objective in ("distill", "distill_sampled", "minillm"):
            tree["teacher"] = rng.choice([{"path": str(model)}, {"hint": "{answer} "}, {"hint": "{nosuch}"}, {}])
        if objective in ALGORITHMS and rng.random() < 0.25:
            tree["environment"] = self._environment()
            tree["data"]["chat"] = rng.random() < 0.9
            tree["model"].setdefault("chat_template", TOOLED)
        for _ in range(rng.choice([0, 0, 0, 0, 0, 1, 1, 3])):
            self._spoil(tree)
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
        return path

    def _data(self, folder: Path, objective: str) -> dict[str, Any]:
        rng = self.rng
        if rng.random() < 0.12:
            tasks = ["addition", "sums", "preferences", "calculator", "guessing", "sums", "nosuch"]
            return {"task": rng.choice(tasks), "limit": 8, "eval_limit": 2}
        fitting = FITTING.get(objective, ("text", "text", "messages", "json", "question"))
        form = rng.choice(fitting) if rng.random() < 0.85 else rng.choice(FORMS)
        rows = [
            row_of(rng, form if rng.random() < 0.97 else rng.choice(FORMS), n)
            for n in range(rng.choice([0, 1, 6, 6, 6, 12, 12, 12]))
        ]
        kind = rng.choice(["jsonl"] * 6 + ["json", "parquet", "parquet", rng.choice(["jsonl", "csv", "txt"])])
        file = folder / f"rows.{kind}"
        if kind == "parquet":
            try:
                pq.write_table(pa.Table.from_pylist(rows), file)
            except (pa.ArrowException, TypeError):
                file.write_bytes(b"PAR1 not a table")
        elif kind == "json":
            file.write_text(json.dumps(rows))
        else:
            lines = [json.dumps(row) for row in rows]
            if lines and rng.random() < 0.05:
                lines[rng.randrange(len(lines))] = rng.choice(["{", "[1, 2]", "", "\ufeff{}", '{"prompt": NaN}', "null", '"x"'])
            file.write_text("\n".join(lines) + "\n")
        found: dict[str, Any] = {"path": file.name}
        if form == "question" and rng.random() < 0.8:
            found["columns"] = {"prompt": "question", "answer": "solution"}
        if form == "alpaca" and rng.random() < 0.8:
            found["template"] = "alpaca"
        for key, values in {
            "chat": (True, True, False), "system": ("brief", ""), "template": ("Q: {prompt}\nA:", "{nosuch}", "{", "{}", "x"),
            "too_long": ("drop", "truncate_left", "error"), "max_prompt_tokens": (1, 8, 32), "eval_fraction": (0.2, 0.5, 0.99),
            "control_tokens": ("warn", "plain", "drop", "error"), "limit": (1, 3), "train_on": ("all", "completion"),
            "eval_path": (file.name,), "retire": (1,), "curriculum": (0.5,), "shuffle": (False,),
            "columns": ({"prompt": "nosuch"}, {"answer": "prompt"}),
        }.items():  # fmt: skip
            if rng.random() < 0.02:
                found[key] = rng.choice(values)
        if form in ("messages", "json", "implicit", "conversation") and rng.random() < 0.8:
            found["chat"] = True
        return found

    def _reward(self) -> Any:
        rng = self.rng
        draw = rng.random()
        if draw < 0.6:
            name = f"fuzz_rewards.py:{rng.choice(SOUND)}"
        elif draw < 0.75:
            name = f"fuzz_rewards.py:{rng.choice(FUNCTIONS)}"
        else:
            name = rng.choice(BUILT_IN)
        entry: dict[str, Any] = {"function": name}
        if rng.random() < 0.15:
            entry["weight"] = rng.choice([0, -1, 0.5, 1e30])
        if name.endswith("sleeps") or rng.random() < 0.05:
            entry["timeout"] = 0.3
        if rng.random() < 0.15:
            entry["args"] = rng.choice([{}, {"column": "answer"}, {"nosuch": 1}, {"pattern": "("}, {"pattern": r"\d"},
                                        {"max_tokens": 8, "cache": 4}, {"path": "nosuch/model"}])  # fmt: skip
        return entry if rng.random() < 0.9 else name

    def _environment(self) -> dict[str, Any]:
        rng = self.rng
        draw = rng.random()
        if draw < 0.5:
            names = rng.sample(TOOL_NAMES, rng.choice([1, 1, 2])) if rng.random() < 0.5 else ["add"]
            found: dict[str, Any] = {"tools": [f"fuzz_tools.py:{name}" for name in names]}
        elif draw < 0.9:
            room = rng.choice(ROOMS)
            found = {"factory": f"fuzz_tools.py:{room}" if rng.random() < 0.8 else {"room": f"fuzz_tools.py:{room}"}}
        else:
            found = rng.choice([{"harness": "fuzz_tools.py:harness"}, {"harness": ["true"]}, {"reasoning_gym": "chain_sum"}])
        if rng.random() < 0.3:
            more: tuple[dict[str, Any], ...] = ({"max_turns": 1}, {"tool_timeout": 0.2}, {"past": "split"})
            found |= rng.choice([*more, {"args": {"x": 1}}, {"max_observation_tokens": 1}, {"runs": "thread"}])
        return found

    def _spoil(self, tree: dict[str, Any]) -> None:
        """One setting, any, gets a value."""
        rng, table = self.rng, settings_table()
        key = rng.choice([key for key, setting in table.items() if setting.section is None and key not in QUIET])
        *sections, last = key.split(".")
        here: Any = tree
        for section in sections:
            if section == "N":
                here = here[0] if here and isinstance(here[0], dict) else {}
            else:
                here = here.setdefault(section, [] if section == "rewards" else {})
        if isinstance(here, dict):
            setting = table[key]
            keep = setting.default is not MISSING and rng.random() < 0.1
            here[last if rng.random() < 0.95 else last[::-1]] = setting.default if keep else value_of(rng, setting.hint)


QUIET = (
    "runs", "name", "threads", "rollout.engine.name", "rollout.engine.servers", "rollout.engine.colocated", "environment.openenv",
    "environment.verifiers", "environment.listen", "save.report_to", "teacher.servers", "environment.harness",
)  # fmt: skip
"""Settings that name places outside of the test, or wait for servers."""
