"""The kernels' interface as ctypes has to know it, read from `kernels.h`: one description, which the C++ files include too.

An argument is checked before it is passed: a pointer takes a tensor on the CPU of the type that the header names (`void`: float32
or bfloat16), an array of ctypes, a tuple of what it points to, or None; anything else is a TypeError that names the function and
the argument.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HEADER = Path(__file__).with_name("kernels.h")
SCALARS: dict[str, Any] = {"int": ctypes.c_int, "long": ctypes.c_long, "float": ctypes.c_float, "int64_t": ctypes.c_int64}
TENSORS = {
    "void": (torch.float32, torch.bfloat16),
    "float": (torch.float32,),
    "double": (torch.float64,),
    "int64_t": (torch.int64,),
    "Stretch": (torch.int64,),  # structures of nothing else
    "Part": (torch.int64,),
}
"""What the numbers of a tensor may be where the header says `type *`."""


def address(kind: str, of: Any, value: Any) -> Any:
    """What a pointer to `kind`, which ctypes knows as `of`, is passed as.  Raises TypeError for what it cannot point to."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.dtype not in TENSORS.get(kind, ()):
            raise TypeError(f"a pointer to {kind} was given a tensor of {value.dtype} on {value.device}")
        return value.data_ptr()
    if isinstance(value, tuple):
        return array(of, value)
    if (value._type_ if isinstance(value, ctypes.Array) else type(value)) is of:
        return ctypes.addressof(value)
    raise TypeError(f"a pointer to {kind} was given {type(value).__name__}")


@functools.cache  # reading takes milliseconds, and every kernel asks
def declarations(text: str) -> tuple[dict[str, list[tuple[str, str]]], dict[str, tuple[str, list[tuple[str, str]]]]]:
    """Structures and functions of a header: name -> fields, and name -> (what it returns, arguments); each (type, name).

    >>> declarations('struct A { long x, y; }; extern "C" { void f(int n, const A *a); }')
    ({'A': [('long', 'x'), ('long', 'y')]}, {'f': ('void', [('int', 'n'), ('A *', 'a')])})
    """
    text = re.sub(r"//[^\n]*|#[^\n]*", "", text)
    inside = re.search(r'extern "C" \{(.*)\}', text, re.DOTALL)
    structures, functions = {}, {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        fields = [field for line in body.split(";") if line.strip() for field in _declared(line)]
        structures[name] = fields
    for gives, name, arguments in re.findall(r"(\w+) (\w+)\(([^)]*)\);", inside[1] if inside else ""):
        functions[name] = (gives, [field for one in arguments.split(",") if one.strip() for field in _declared(one)])
    return structures, functions


def _declared(line: str) -> list[tuple[str, str]]:
    """`const float *x` -> [("float *", "x")], `long a, b` -> [("long", "a"), ("long", "b")]."""
    words = line.replace("const", " ").split()
    kind, names = words[0], " ".join(words[1:])
    if "*" in names:
        return [(f"{kind} *", names.replace("*", "").strip())]
    return [(kind, name.strip()) for name in names.split(",")]


def structures(text: str) -> dict[str, type[ctypes.Structure]]:
    """The header's structures, in its order, as ctypes' ones; pointers are addresses."""
    made: dict[str, type[ctypes.Structure]] = {}
    for name, fields in declarations(text)[0].items():
        kinds = [(field, ctypes.c_void_p if kind.endswith("*") else made.get(kind) or _number(kind)) for kind, field in fields]
        made[name] = type(name, (ctypes.Structure,), {"_fields_": kinds})
    return made


def _number(kind: str) -> Any:
    return ctypes.c_uint16 if kind == "uint16_t" else SCALARS[kind]


def typed(library: ctypes.CDLL, text: str) -> None:
    """Give every function of a loaded library the types of the header.  AttributeError if it lacks one."""
    for name, (gives, arguments) in declarations(text)[1].items():
        function = getattr(library, name)
        function.restype = None if gives == "void" else SCALARS[gives]
        function.argtypes = [ctypes.c_void_p if kind.endswith("*") else SCALARS[kind] for kind, _ in arguments]


_TEXT = HEADER.read_text(encoding="utf-8")
_MADE = structures(_TEXT)
Strides, Stretch, Part = _MADE["Strides"], _MADE["Stretch"], _MADE["Part"]
Weight, Norm, Block = _MADE["Weight"], _MADE["Norm"], _MADE["Block"]
Model, Ends, Tokens = _MADE["Model"], _MADE["Ends"], _MADE["Tokens"]


_POINTERS: dict[str, list[tuple[int, str, Any]]] = {
    name: [
        (place, kind[:-2], _MADE.get(kind[:-2]) or SCALARS.get(kind[:-2]))
        for place, (kind, _) in enumerate(arguments)
        if kind.endswith("*")
    ]
    for name, (_, arguments) in declarations(_TEXT)[1].items()
}
"""Of each function the places of its pointers, and what they point to."""


def passed(name: str, arguments: Sequence[Any]) -> list[Any]:
    """The arguments of a kernel with addresses for what pointers point to.

    Not done by ctypes while it calls (`from_param`): it would make a TypeError of any exception, also of one that a signal raises.
    """
    given = list(arguments)
    for place, kind, of in _POINTERS[name] if len(given) == len(declared(name)) else ():
        try:
            given[place] = address(kind, of, given[place])
        except TypeError as error:
            raise TypeError(f"the kernel {name}, argument {declared(name)[place]}: {error}") from None
    return given


@functools.cache
def declared(name: str) -> list[str]:
    """The names of a kernel's arguments."""
    return [argument for _, argument in declarations(_TEXT)[1][name][1]]


def array(kind: Any, values: Sequence[Any]) -> ctypes.Array[Any]:
    """Values as an array that a pointer takes: of structures from tuples, of numbers from numbers."""
    return (kind * len(values))(*values)


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """A loaded library whose functions take what `kernels.h` says, and nothing else."""
    typed(library, _TEXT)
    return library


def explained(name: str, arguments: Sequence[Any], error: Exception) -> str:
    """What was wrong with a call of a kernel, with the argument's name in the header."""
    names = declared(name)
    if len(names) != len(arguments):
        return f"the kernel {name} takes {len(names)} arguments ({', '.join(names)}), got {len(arguments)}"
    place = re.match(r"argument (\d+)", str(error))
    which = f", argument {names[int(place[1]) - 1]}" if place else ""
    return f"the kernel {name}{which}: {error}"
