"""A digest of a function or an object of the running program: of its code, and of the plain values that it holds.

It is the same in every process, whatever order sets have there and wherever objects lie, and another one where the code is another,
or a value: a number, a text, a pattern, an array, a tensor, a date, a member of an enumeration, also in lists, tuples,
dictionaries, sets and data classes.  Functions and classes that a function calls by their names count too, and those that it
closes over (a decorator's), as long as they are the user's own; and so do numbers and texts that it reads from its module, not
lists and dictionaries there, which may be a memory.  Of anything else (a client, a lock, an open file) nothing counts, nor does
an attribute whose name begins with _.

Somebody else's objects do as they like when they are asked: nothing here raises, and what is looked at has an end.
"""

from __future__ import annotations

import datetime
import dis
import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.config.live_objects import short_digest
from groupwise.runs.user_code import is_own

MOST_VALUES, DEEPEST = 100_000, 60
"""How many values are looked at, and how many levels of lists within lists."""
WHOLE, SAMPLE, SAMPLES, FEWEST = 1 << 26, 1 << 16, 1 << 20, 64
"""Bytes of all arrays and tensors together that are looked at whole; numbers of each beyond that are, evenly spread, and of all
of those together; numbers of each after that."""
NOTHING = b""

_WRITTEN = (type(None), bool, float, complex, range, Decimal, Fraction, PurePath)
_DATES = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)


def held_digest(function: object) -> str:
    """Eight hexadecimal digits.   function: what is called: a function, a method, a `partial`, a class or an object."""
    return short_digest([Held().called(function)])


class Held:
    """What one digest has looked at."""

    def __init__(self) -> None:
        self._left, self._whole, self._samples, self._depth = MOST_VALUES, WHOLE, SAMPLES, 0
        self._known: dict[int, tuple[object, bytes | int]] = {}
        """By place: the value, so that nothing else comes to lie there, and its digest; while that is made, how deep it lies."""

    def of(self, value: Any) -> bytes:
        """The digest of a value; `NOTHING` of what does not count."""
        if self._left <= 0 or self._depth >= DEEPEST:
            return NOTHING
        self._left -= 1
        if id(value) in self._known:
            known = self._known[id(value)][1]
            return f"{self._depth - known} levels up".encode() if isinstance(known, int) else known
        self._known[id(value)] = value, self._depth
        self._depth += 1
        found = _digest(self._parts(value))
        self._depth -= 1
        self._known[id(value)] = value, found
        return found

    def called(self, value: object) -> bytes:
        """Also of an object whose class has `__call__`: the class, its attributes, and what it holds if it is a container."""
        return self.of(value) if issubclass(type(value), _CALLED) else _digest(self._instance(value))

    def _parts(self, value: Any) -> Iterator[bytes]:
        """By the type, and by what built-in types do: a class's own `__iter__`, `__len__` and `__class__` are not asked."""
        kind = type(value)
        read = next((read for kinds, read in _READERS if issubclass(kind, kinds)), None)
        if read is not None:
            yield from read(self, value)
        elif is_dataclass(kind):
            yield kind.__qualname__.encode()
            yield from self._named({one.name: getattr(value, one.name, None) for one in fields(value)})

    def _all(self, values: Iterable[Any]) -> Iterator[bytes]:
        """In their order."""
        for value in values:
            if self._left <= 0:
                return
            yield self.of(value)

    def _named(self, values: dict[Any, Any]) -> Iterator[bytes]:
        """Attributes by their names."""
        for name in sorted(name for name in values if isinstance(name, str) and not name.startswith("_")):
            yield _name(name)
            yield self.of(values[name])

    # ------------------------------------------------------------ plain values

    def _text(self, value: Any) -> Iterator[bytes]:
        own: Any = next(kind for kind in _WRITTEN if issubclass(type(value), kind))  # a user's class may write an address
        yield f"{type(value).__name__} {own.__repr__(value)}".encode("utf-8", "surrogatepass")

    def _string(self, value: Any) -> Iterator[bytes]:
        yield type(value).__name__.encode()
        yield str.encode(value, "utf-8", "surrogatepass") if issubclass(type(value), str) else bytes(memoryview(value))

    def _pattern(self, value: re.Pattern[Any]) -> Iterator[bytes]:
        yield from self._all([value.pattern, value.flags])

    def _date(self, value: Any) -> Iterator[bytes]:
        yield re.sub(" at 0x[0-9a-fA-F]+", "", repr(value)).encode()  # a time zone of a user's may write its address

    def _integer(self, value: int) -> Iterator[bytes]:
        yield f"int {value:x}".encode()  # in decimals long ones are refused

    def _member(self, value: Enum) -> Iterator[bytes]:
        yield f"{type(value).__qualname__} {value._name_}".encode()
        yield self.of(value._value_)

    def _list(self, value: Any) -> Iterator[bytes]:
        own: Any = list if issubclass(type(value), list) else tuple
        yield f"{own.__name__} of {own.__len__(value)}".encode()
        yield from self._all(own.__iter__(value))

    def _set(self, value: Any) -> Iterator[bytes]:
        own: Any = set if issubclass(type(value), set) else frozenset
        yield f"set of {own.__len__(value)}".encode()
        if own.__len__(value) <= self._left:
            members = sorted(self._all(own.copy(value)))
            if self._left > 0:  # else which of them were looked at is chance
                yield from members

    def _dictionary(self, value: Any) -> Iterator[bytes]:
        yield f"dict of {dict.__len__(value)}".encode()
        if 2 * dict.__len__(value) <= self._left:
            items = list(dict.items(value))
            keys = sorted(((self.of(key), place) for place, (key, _) in enumerate(items)), key=lambda key: key[0])
            if self._left > 0:
                yield from (part for pair in sorted((key, self.of(items[place][1])) for key, place in keys) for part in pair)

    def _array(self, value: Any) -> Iterator[bytes]:
        yield f"{value.dtype} {value.shape}".encode()
        if value.dtype.hasobject:
            yield from self._all(value.flat)
        else:
            yield np.asarray(value if self._affords(value.nbytes) else value.flat[:: self._step(value.size)]).tobytes()

    def _tensor(self, value: Tensor) -> Iterator[bytes]:
        value = value.detach()
        if value.layout != torch.strided:
            value = value.to_sparse_coo().coalesce()
            yield f"sparse {tuple(value.shape)}".encode()
            yield from self._all([value.indices(), value.values()])
            return
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if not self._affords(value.numel() * value.element_size()):
            places = np.unravel_index(np.arange(0, value.numel(), self._step(value.numel())), tuple(value.shape))
            value = value[tuple(torch.from_numpy(place).to(value.device) for place in places)]
        yield value.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    def _affords(self, size: int) -> bool:
        if size > self._whole:
            return False
        self._whole -= size
        return True

    def _step(self, numbers: int) -> int:
        """How far apart those lie that are looked at."""
        looked_at = max(FEWEST, min(SAMPLE, self._samples))
        self._samples -= looked_at
        return -(-numbers // looked_at)

    # ------------------------------------------------------------ code

    def _function(self, function: FunctionType) -> Iterator[bytes]:
        """Its code, its defaults, what it closes over, and what it names; of an installed one, which is known by its name, the
        functions that it closes over: a user's, where it is a decorator's."""
        own = _own(function.__globals__.get("__name__"))  # `functools.wraps` makes `__module__` another's
        if own:
            yield from _instructions(function.__code__)
        else:
            yield f"{function.__globals__.get('__name__')}.{function.__code__.co_qualname}".encode()
        held: list[tuple[str, Any]] = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not filled yet
                held.append((name, cell.cell_contents))
        held = [(name, value) for name, value in held if own or issubclass(type(value), _CALLED)]
        if own:
            held += [("", function.__defaults__), ("", function.__kwdefaults__), *_named_by(function)]
        held.sort(key=lambda one: not issubclass(type(one[1]), _CALLED))  # code first: long lists must not use its share up
        for name, value in held:
            yield from (_name(name), self.of(value))

    def _method(self, method: MethodType) -> Iterator[bytes]:
        yield self.of(method.__func__)
        yield self.called(method.__self__)

    def _partial(self, value: Any) -> Iterator[bytes]:
        yield self.called(value.func)
        yield from self._all([value.args, value.keywords])

    def _builtin(self, function: BuiltinFunctionType) -> Iterator[bytes]:
        yield f"{function.__module__}.{function.__qualname__}".encode()
        yield self.of(function.__self__)

    def _around(self, value: Any) -> Iterator[bytes]:
        """What `classmethod`, `property` and their like stand around."""
        for name in ("__func__", "__wrapped__", "func", "fget", "fset", "fdel"):
            yield self.of(getattr(value, name, None))

    def _class(self, kind: type) -> Iterator[bytes]:
        """All that it and its bases say: functions of any name, and values whose names do not begin with _."""
        for base in kind.__mro__:
            yield base.__qualname__.encode()
            if _own(base.__module__):
                said = dict(vars(base))
                code = {name: one for name, one in said.items() if issubclass(type(one), _CODE)}
                yield from (part for name in sorted(code) for part in (_name(name), self.of(code[name])))
                yield from self._named({name: one for name, one in said.items() if name not in code})

    def _instance(self, value: object) -> Iterator[bytes]:
        """Attributes in slots are attributes too."""
        yield from self._all([type(value), value])
        state: dict[Any, Any] = {}
        with suppress(Exception):
            state |= object.__getattribute__(value, "__dict__")
        for base in type(value).__mro__:
            for name in _slots(base):
                with suppress(Exception):  # not filled yet
                    state[name] = object.__getattribute__(value, name)
        kept = {name for base in type(value).__mro__ for name, one in vars(base).items() if type(one) is functools.cached_property}
        yield from self._named({name: one for name, one in state.items() if name not in kept})


_CODE = (
    *(FunctionType, staticmethod, classmethod, property, functools.cached_property, functools.partialmethod),
    type(functools.lru_cache(len)),
)
_CALLED = (*_CODE, type, MethodType, BuiltinFunctionType, functools.partial)
_FIXED = (*_CODE, *_WRITTEN, *_DATES, type, int, str, bytes, np.generic, tuple, frozenset, Enum, re.Pattern, functools.partial)
"""What a module holds that does not change while it is used."""
_READERS: tuple[tuple[Any, Callable[[Held, Any], Iterator[bytes]]], ...] = (
    (Enum, Held._member),
    (_WRITTEN, Held._text),
    ((str, bytes, bytearray), Held._string),
    (re.Pattern, Held._pattern),
    (_DATES, Held._date),
    (int, Held._integer),
    ((list, tuple), Held._list),
    ((set, frozenset), Held._set),
    (dict, Held._dictionary),
    (Tensor, Held._tensor),
    ((np.ndarray, np.generic), Held._array),
    (FunctionType, Held._function),
    (MethodType, Held._method),
    ((functools.partial, functools.partialmethod), Held._partial),
    (BuiltinFunctionType, Held._builtin),
    (type, Held._class),
    (_CODE, Held._around),
)
"""How the values of a type are read; the first that fits."""


@functools.cache
def _own(module: str | None) -> bool:
    """True of the user's modules, also of one without a file, as a notebook is."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return is_own(Path(file).resolve()) if file else module not in sys.builtin_module_names


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function names of its module, and the functions and classes of the user's other modules that it names through them."""
    for name in sorted(_names(function.__code__, _globals_of)):
        value: Any = function.__globals__.get(name)
        if issubclass(type(value), ModuleType) and _own(value.__name__):
            inside = vars(value)
            attributes = sorted(_names(function.__code__, _attributes_of))
            yield from ((one, inside[one]) for one in attributes if issubclass(type(inside.get(one)), _CALLED))
        elif issubclass(type(value), _FIXED):
            yield name, value


def _names(code: CodeType, of: Callable[[CodeType], Iterable[str]]) -> set[str]:
    """Of a function and those inside it."""
    return set(of(code)).union(*(_names(inner, of) for inner in code.co_consts if isinstance(inner, CodeType)))


def _globals_of(code: CodeType) -> Iterator[str]:
    """Names of its module; not attributes, which may be called like something there."""
    return (str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def _attributes_of(code: CodeType) -> Iterable[str]:
    """Attributes, and names of its module."""
    return code.co_names


def _name(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _slots(kind: type) -> tuple[str, ...]:
    said = vars(kind).get("__slots__", ())
    return (said,) if isinstance(said, str) else tuple(said)


def _digest(parts: Iterable[bytes]) -> bytes:
    """`NOTHING` of no parts.  Where an error ends them, those before it count."""
    found, some = hashlib.blake2b(digest_size=16), False
    with suppress(Exception):
        for part in parts:
            some = True
            found.update(len(part).to_bytes(8, "little"))
            found.update(part)
    return found.digest() if some else NOTHING


def _instructions(code: CodeType) -> Iterator[bytes]:
    """Of a function and those inside it, wherever they stand."""
    yield code.co_code
    yield code.co_exceptiontable
    yield repr((code.co_names, code.co_varnames)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
        else:  # the order of a set is another one in each process
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode()
