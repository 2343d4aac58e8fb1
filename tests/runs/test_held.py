"""What a run remembers of live functions and objects: the same in every process, another for what does something else."""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import sys
import threading
import tracemalloc
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import groupwise as gw
from groupwise.runs import held
from groupwise.runs.held import held_digest
from groupwise.runs.inputs import inputs_of


class Holder:
    """Something that is called and holds a value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, completion: str) -> float:
        return 0.0


grading: Any = None
"""A module, while a test has made it one."""


class Colour(Enum):
    RED, GREEN = 1, 2


@dataclass
class Limits:
    low: float
    high: Any = None


SCRIPT = """
from datetime import datetime, timedelta, tzinfo
from enum import Enum
from pathlib import Path
from collections import defaultdict
from groupwise.runs import held
from groupwise.runs.held import held_digest

class Zone(tzinfo):
    def utcoffset(self, when):
        return timedelta(0)

class Way(Enum):
    NORTH, SOUTH, EAST = 1, 2, 3

class Counts(defaultdict):
    def __init__(self):
        super().__init__(int)

class Holder:
    def __init__(self, value):
        self.value, self.lock = value, object()
    def __call__(self, completion):
        return 0.0

words = {"alpha", "beta", "gamma", "delta"}
counts = Counts()
for word in words:
    counts[word] += 1
values = [
    words,
    {(word, len(word)) for word in words},
    {frozenset({word, "x"}) for word in words},
    {(word, (word,)): word for word in words},
    {Path(word): [word] for word in words},
    {way: way.name for way in set(Way)},
    {1, "1", 1.5, None, ("a",), b"a", Way.NORTH},
    counts,
    {word: {inner for inner in words} for word in words},
    datetime(2026, 1, 1, tzinfo=Zone()),
]
many = {(str(number), (number, str(number))) for number in range(100)}
own = {"a", "b", "c"}
def graded(text):
    return text in {"a", "b", "c"} or text in WORDS
WORDS = frozenset(words)
print([held_digest(Holder(value)) for value in values], held_digest(graded), held_digest(lambda text: graded(text)))
held.MOST_VALUES = 400  # they end within the set
print(held_digest(Holder(many)), held_digest(Holder(dict.fromkeys(many, 1))), held_digest(Holder([many, "a"])))
"""


@pytest.mark.slow
def test_a_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    said = [
        subprocess.check_output([sys.executable, str(script)], text=True, env=os.environ | {"PYTHONHASHSEED": seed})
        for seed in ("1", "3", "7")
    ]
    assert len(set(said)) == 1


def test_a_recursive_function_is_the_same_wherever_it_is_met_first() -> None:
    """The order of functions in a set is that of their addresses."""

    def made(between: list[Callable[[], int]], number: int) -> set[Any]:
        def again(text: str) -> float:
            return again(text[1:])

        between += [lambda: 0 for _ in range(number % 7)]

        def rule(text: str, again: Callable[[str], float] = again) -> float:
            return again(text)

        return {again, rule}

    kept = list[Callable[[], int]]()
    sets = [made(kept, number) for number in range(100)]
    assert len({next(iter(functions)).__name__ for functions in sets}) == 2
    assert len({held_digest(Holder(functions)) for functions in sets}) == 1


def test_values_that_differ_have_other_digests() -> None:
    one, other = [1], [1]
    values: list[Any] = [
        ((1, 2), (3, 4)), ((1, 2, 3), (4,)), [(1, 2)], [[1, 2]], {(1, 2)}, frozenset({1}), {1: 2}, {2: 1}, [1, 2], [2, 1],
        1, 1.0, True, "1", b"1", 1j, Decimal("1"), Decimal("1.0"), Fraction(1, 2), 10**5000, 10**5000 + 1, None, range(3), range(4),
        Path("a"), Path("b"), Colour.RED, Colour.GREEN, datetime(2026, 1, 1), datetime(2026, 1, 1, 1),
        datetime(2026, 1, 1, tzinfo=UTC), Limits(1.0), Limits(2.0), Limits(1.0, Limits(3.0)), np.float32(1), np.array([1]),
        np.array(["a", None], object), np.array(["b", None], object), torch.eye(2), torch.eye(2).to_sparse(),
        (torch.eye(2) * 2).to_sparse(), torch.zeros(2, dtype=torch.bfloat16), OrderedDict(a=1), defaultdict(int, a=2),
        [one, other, 2], [one, 2, other],
        functools.partial(len, [1]), functools.partial(len, [2]), functools.partial(max, [1]), len, max, {1: 1}.get, {1: 2}.get,
        re.compile("a"), re.compile("b"), re.compile("a", re.IGNORECASE), bytearray(b"1"), "\ud800",
    ]  # fmt: skip
    found = [held_digest(Holder(value)) for value in values]
    assert len(set(found)) == len(found)
    assert found == [held_digest(Holder(value)) for value in values]
    p, q = [1], [2]
    assert held_digest(Holder([p, q, p])) != held_digest(Holder([p, q, q]))
    assert held_digest(Holder({"a": 1, "b": 2})) == held_digest(Holder({"b": 2, "a": 1}))


def around(function: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(function)
    def inner(*args: Any) -> float:
        return function(*args)

    return inner


def variants(of: Callable[[float], Any]) -> list[str]:
    return [held_digest(of(value)) for value in (1.0, 2.0, 1.0)]


@pytest.mark.parametrize("how", ["static", "class", "property", "cached", "remembered", "partial", "private", "wrapped", "nested"])
def test_code_is_noticed_wherever_it_stands(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two functions that differ in a constant, behind everything that functions stand behind."""
    codes = {1.0: lambda *_: 1.0, 2.0: lambda *_: 2.0}

    def made(value: float) -> Any:
        code: Any = codes[value]
        kinds: dict[str, Any] = {
            "static": staticmethod(code), "class": classmethod(code), "property": property(code),
            "cached": functools.cached_property(code), "remembered": functools.lru_cache(code),
            "partial": functools.partialmethod(code, 3), "private": code,
        }  # fmt: skip
        if how == "wrapped":
            return around(around(code))
        if how == "nested":
            inner: Any = type("Inner", (Holder,), {"judge": code})(0)
            return functools.partial(inner.judge)
        name = "_help" if how in ("private", "remembered") else "help"
        return type("Judge", (Holder,), {name: kinds[how], "__module__": __name__})(0)

    first, second, again = variants(made)
    assert first == again != second


def helper(text: str) -> float:
    return 1.0


LIMIT, WORD, PATTERN, MEMORY = 3, "a", re.compile("a"), dict[str, int]()


def test_what_a_function_names_of_its_module_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def reward(completion: str) -> float:
        MEMORY[completion] = len(completion)
        found = PATTERN.findall(completion) + completion.split(WORD)
        return max((helper(word) for word in found), default=0.0) + LIMIT

    before = held_digest(reward)
    MEMORY["x"] = 1
    assert held_digest(reward) == before, "what it remembers makes it no other"
    others: dict[str, Any] = {"LIMIT": 4, "WORD": "b", "PATTERN": re.compile("b"), "helper": lambda text: 2.0}
    found = [before]
    for name, value in others.items():
        monkeypatch.setattr(sys.modules[__name__], name, value)
        found.append(held_digest(reward))
    assert len(set(found)) == 5


def test_a_long_list_hides_no_code() -> None:
    """Code is looked at before values, of which there may be too many."""

    def made(value: float) -> Callable[..., float]:
        words, judge = [str(number) for number in range(200_000)], {1.0: lambda _: 1.0, 2.0: lambda _: 2.0}[value]
        return lambda completion: judge(completion) if completion in words else 0.0

    first, second, again = variants(made)
    assert first == again != second


def test_an_attribute_is_no_name_of_the_module_and_own_modules_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`found.start()` is not the global `start`; `grading.score()` is code of the user's, `logging.getLogger()` is not."""
    own = ModuleType("grading")
    own.score = lambda text: 1.0  # type: ignore[attr-defined]
    here = vars(sys.modules[__name__])
    monkeypatch.setitem(sys.modules, "grading", own)
    monkeypatch.setitem(here, "grading", own)
    monkeypatch.setitem(here, "logging", logging)

    def reward(completion: str) -> float:
        logging.getLogger(completion)
        found = re.search("a", completion)
        return grading.score(completion) + (0 if found is None else found.start())

    before = held_digest(reward)
    monkeypatch.setitem(here, "start", 5.0)
    monkeypatch.setattr(logging, "_startTime", 0.0)
    assert held_digest(reward) == before
    own.score = lambda text: 2.0  # type: ignore[attr-defined]
    assert held_digest(reward) != before


def test_a_value_that_is_kept_once_it_was_computed_makes_no_other() -> None:
    class Table(Holder):
        @functools.cached_property
        def known(self) -> dict[str, int]:
            return {"a": 1}

    table = Table(0)
    before = held_digest(table)
    assert table.known == {"a": 1} and held_digest(table) == before


def test_where_an_error_is_caught_is_code() -> None:
    def inside(text: str) -> float:
        try:
            value = float(text)
            value += 1
        except ValueError:
            return 0.0
        return value

    def outside(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            return 0.0
        value += 1
        return value

    assert held_digest(inside) != held_digest(outside)


class Hostile(list[int]):
    """It says of itself what it likes, and raises."""

    __slots__ = ("unset",)

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("no order")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no class")

    def __call__(self, completion: str) -> float:
        return 0.0


class HostileKind(type):
    """The class of a class that answers nothing."""

    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(name)


def no_class(self: Any) -> Any:
    raise RuntimeError("no class")


def test_nothing_that_an_object_does_ends_a_digest() -> None:
    assert held_digest(Hostile([1])) != held_digest(Hostile([2]))
    assert held_digest(Holder(Hostile([1]))) != held_digest(Holder(Hostile([2])))
    for kind in (tuple, frozenset, set, str, bytes, float):
        odd_kind: Any = type("Odd", (kind,), {"__class__": property(no_class)})
        first, second = ("1", "2") if kind in (str, float) else ([1], [2])
        assert held_digest(Holder(odd_kind(first))) != held_digest(Holder(odd_kind(second))), kind
    odd_slots: Any = type("Odd", (Holder,), {})
    odd_slots.__slots__ = 3
    assert len(held_digest(odd_slots(0))) == 8
    assert len(held_digest(HostileKind("Odd", (), {"__call__": helper})())) == 8
    codes: list[Any] = [lambda: 1, lambda: 2]
    for code in codes:
        code.__module__ = [1]
    assert held_digest(codes[0]) != held_digest(codes[1]), "what was read before an error counts"
    odd = Holder(0)
    vars(odd)[3] = "no text for a name"  # type: ignore[index]
    assert held_digest(odd) == held_digest(Holder(0))
    deep: Any = 0
    for _ in range(50_000):
        deep = (deep,)
    held_digest(Holder(deep))
    busy, stop = Holder(0), threading.Event()

    def changes() -> None:
        while not stop.is_set():
            for number in range(100):
                setattr(busy, f"x{number}", number)
                delattr(busy, f"x{number}")

    thread = threading.Thread(target=changes)
    thread.start()
    try:
        assert all(len(held_digest(busy)) == 8 for _ in range(200))
    finally:
        stop.set()
        thread.join()


def test_what_is_large_is_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many places of an array that is not looked at whole, an array that is met again once, and no set in part."""
    monkeypatch.setattr(held, "WHOLE", 4096)
    rows = np.zeros(1_000_000, np.float32)
    before = held_digest(Holder(rows))
    rows[: rows.size // 2] = 1.0
    assert held_digest(Holder(rows)) != before
    wide, wider = (torch.full((1, 1), value).expand(1 << 20, 1 << 20) for value in (1.0, 2.0))
    assert held_digest(Holder(wide)) != held_digest(Holder(wider))
    assert len(held_digest(Holder(np.broadcast_to(np.float32(1), (1 << 20, 1 << 20))))) == 8
    read = list[int]()

    class Counted(np.ndarray):
        def tobytes(self, *args: Any) -> bytes:
            read.append(1)
            return super().tobytes(*args)

    held_digest(Holder([np.zeros(3).view(Counted)] * 50))
    assert len(read) <= 1
    sizes, digest = list[int](), held._digest
    monkeypatch.setattr(held, "_digest", lambda parts: digest([parts := list(parts), sizes.extend(map(len, parts))][0]))
    held_digest(Holder([np.zeros(1 << 17) for _ in range(200)]))
    assert sum(sizes) < 2 * 8 * held.SAMPLES, "of very many arrays less of each"
    monkeypatch.undo()
    monkeypatch.setattr(held, "WHOLE", 4096)
    for value in (bytes(10 << 20), "a" * (10 << 20), dict.fromkeys(range(1_000_000))):
        holder = Holder(value)
        tracemalloc.start()
        held_digest(holder)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 15 << 20, type(value)
    monkeypatch.setattr(held, "MOST_VALUES", 100)
    assert held_digest(Holder(set(range(1000)))) == held_digest(Holder(set(range(1, 1001))))
    assert held_digest(Holder(list(range(1000)))) != held_digest(Holder(list(range(1, 1001))))


def test_a_live_harness_is_an_input_of_its_run(tiny_policy: Callable[..., gw.Policy]) -> None:
    policy = tiny_policy()

    def told(answer: str) -> Any:
        environment = {"harness": lambda base_url, **_: answer}
        rows = [{"prompt": "1+1="}]
        training = gw.train(objective="grpo", steps=1, model=policy, data=rows, rewards=[helper], environment=environment)
        return inputs_of(training.recipe)["environment.harness"]

    assert told("a") == told("a") != told("b")
