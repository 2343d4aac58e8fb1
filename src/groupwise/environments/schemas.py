"""Tools as the policy sees them: JSON schemas from type hints and docstrings, and arguments held
against a schema.

The schemas are those of transformers' `get_json_schema`, which chat templates were written for.
They are made here because tools
live in processes of their own: importing transformers and torch would be most of the start of each.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from groupwise.errors import ConfigError

Schema = Mapping[str, Any]
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`."""


def schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The JSON schema of a function: every parameter has a type hint, and a line under `Args:` in a
    docstring of Google's style.

    An object is described by its `__call__`, a `functools.partial` by what it calls, without the
    arguments that it sets by name. A description that ends in `(choices: ["a", "b"])` offers these
    alone.   name: what the policy calls it.
    Raises ConfigError for what is missing, and for what no call by name can give or answer.
    """
    set_already = function.keywords if isinstance(function, partial) else {}
    written = _written(function)
    if inspect.isgeneratorfunction(written) or inspect.isasyncgenfunction(written):
        raise ConfigError(f"the tool {name!r} yields its result bit by bit: return it as one text")
    documentation = inspect.getdoc(written)
    inherited = type.__call__.__doc__  # by every `__call__` without one
    if not documentation or documentation == inherited:
        raise ConfigError(
            f"the tool {name!r} has no docstring: say what it does, and each parameter under"
            " `Args:` (a method that is no tool: begin its name with _)"
        )
    about, described, returned = _sections(documentation)
    try:
        hints = get_type_hints(written)
        parameters = {
            key: one
            for key, one in inspect.signature(function).parameters.items()
            if key not in set_already
        }
        if unnamed := next((one for one in parameters.values() if one.kind in _UNNAMED), None):
            raise _Missing(
                f"the policy gives arguments by name, which {str(unnamed).partition(':')[0]!r} does"
                " not take; name each"
            )
        takes: dict[str, Any] = {
            "type": "object",
            "properties": {key: _of_parameter(key, hints, described) for key in parameters},
        }
        if required := [key for key, one in parameters.items() if one.default is one.empty]:
            takes["required"] = required
    except _Missing as error:
        raise ConfigError(f"the tool {name!r}: {error}") from None
    except (TypeError, NameError, ValueError) as error:
        raise ConfigError(
            f"the tool {name!r} cannot be described: {type(error).__name__}: {error}"
        ) from None
    whole = {"name": name, "description": about, "parameters": takes}
    try:
        result = _of_hint(hints["return"]) if "return" in hints else None
    except _Missing:  # the policy never writes it
        result = None
    if result is not None:
        whole["return"] = result | ({} if returned is None else {"description": returned})
    return {"type": "function", "function": whole}


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    """What has the docstring and the type hints."""
    while isinstance(function, partial):
        function = function.func
    is_one = (
        inspect.isroutine(function) or inspect.isclass(function) or hasattr(function, "__wrapped__")
    )
    return function if is_one else function.__call__


_UNNAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)


class _Missing(Exception):
    """What a schema cannot be made without, and the remedy."""


def _of_parameter(
    key: str, hints: Mapping[str, Any], described: Mapping[str, str]
) -> dict[str, Any]:
    if key not in hints:
        raise _Missing(
            f"the argument {key!r} has no type hint; give every parameter one that JSON can hold"
        )
    schema = _of_hint(hints[key])
    if key not in described:
        raise _Missing(
            f"the argument {key!r} has no description; write a line `{key}: what it is` under"
            " `Args:` in the docstring"
        )
    text = described[key]
    if choices := re.search(r"\(choices:(.*)\)$", text, re.IGNORECASE):
        offered = json.loads(choices[1])
        schema["enum"] = [one.strip() if isinstance(one, str) else one for one in offered]
        text = text[: choices.start()].strip()
    return schema | {"description": text}


_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_PLAIN = _SCALARS | {list: "array", tuple: "array", dict: "object"}


def _of_hint(hint: Any) -> dict[str, Any]:
    """Raises _Missing for a hint whose values JSON cannot hold."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _of_values(hint, [member.value for member in hint])
    if origin is Literal:
        return _of_values(hint, inner)
    if origin in (Union, types.UnionType):
        return _of_union(inner)
    if origin is tuple and len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [_of_hint(one) for one in inner]}
    if origin is list and inner:
        return {"type": "array", "items": _of_hint(inner[0])}
    if origin is dict and inner:
        return {"type": "object", "additionalProperties": _of_hint(inner[-1])}
    if not inner and isinstance(bare := origin or hint, type) and bare in _PLAIN:
        return {"type": _PLAIN[bare]}
    raise _Missing(
        f"the type hint {hint!r} is none that JSON can hold; use int, float, str, bool, an Enum,"
        " Literal, or list, tuple[a, b], dict and unions of these"
    )


def _of_values(hint: Any, values: Sequence[Any]) -> dict[str, Any]:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise _Missing(
            f"the type hint {hint!r} offers {list(values)}; expected at least one value, and texts,"
            " numbers, bool or None"
        )
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}


def _of_union(hints: Sequence[Any]) -> dict[str, Any]:
    schemas = [_of_hint(one) for one in hints if one is not type(None)]
    kinds = sorted({one["type"] for one in schemas if one.keys() == {"type"}})
    if len(schemas) == 1:
        union = schemas[0]
    elif all(one.keys() == {"type"} for one in schemas):
        union = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        union = {"anyOf": schemas}
    return union | ({"nullable": True} if len(schemas) < len(hints) else {})


def _sections(documentation: str) -> tuple[str, dict[str, str], str | None]:
    """Split a docstring in Google's style: what the function does, what its parameters are, and
    what it returns, where it says so.
    """
    about = re.split("Args:|Returns:|Raises:", documentation)[0].strip()
    returned = _under("Returns", "Raises:", documentation)
    described: dict[str, str] = {}
    key = indent = None
    for line in (_under("Args", "Returns:|Raises:", documentation) or "").splitlines():
        entry = re.match(r"([ \t]*)(\w+):(.*)", line)
        if entry and not (indent is not None and line.startswith((f"{indent} ", f"{indent}\t"))):
            indent, key = entry[1], entry[2]
            described[key] = entry[3].strip()
        elif key is not None and line.strip():  # it goes on, further in
            described[key] = f"{described[key]} {line.strip()}".strip()
    return about, described, None if returned is None else returned.strip()


def _under(heading: str, ends: str, documentation: str) -> str | None:
    """What stands under a heading, to the next."""
    start = re.search(rf"(?:^|\n)\s*{heading}:\n", documentation)
    return None if start is None else re.split(ends, documentation[start.end() :])[0]


def name_of(schema: Schema) -> str:
    """What the policy calls it."""
    return str(schema["function"]["name"])


class WrongArguments(Exception):
    """Why a tool cannot be called, in words for the policy."""


def typed(schema: Schema, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as the tool's function wants them: what must be an integer is no `2.0`.  Raises
    WrongArguments.

    >>> takes = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    >>> tool = {"function": {"name": "f", "parameters": takes}}
    >>> typed(tool, {"n": 2.0})
    {'n': 2}
    >>> typed(tool, {"n": "3"})
    Traceback (most recent call last):
    groupwise.environments.schemas.WrongArguments: the argument n is "3", expected integer
    """
    parameters = schema["function"].get("parameters") or {}
    known = parameters.get("properties") or {}
    takes = f"{name_of(schema)} takes {', '.join(known) or 'no arguments'}"
    if unknown := next((key for key in arguments if key not in known), None):
        raise WrongArguments(f"there is no argument {unknown!r}: {takes}")
    if missing := next(
        (key for key in parameters.get("required") or () if key not in arguments), None
    ):
        raise WrongArguments(f"the argument {missing} is missing: {takes}")
    values = {}
    for key, value in arguments.items():
        try:
            values[key] = _typed(known[key], value)
        except _Misfit:
            raise WrongArguments(
                f"the argument {key} is {_shown(value)}, expected {_expected(known[key])}"
            ) from None
    return values


class _Misfit(Exception):
    """Raised for a value that is not what its schema asks for."""


def _typed(schema: Any, value: Any) -> Any:
    """A value as the part of JSON Schema that `schema_of` writes asks for it.  Raises _Misfit."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return value
    for option in schema.get("anyOf", ()):
        with suppress(_Misfit):
            return _typed(option, value)
    if "enum" in schema:
        for option in schema["enum"]:
            if value == option and isinstance(value, bool) is isinstance(option, bool):
                return option
    kinds = _kinds(schema.get("type"))
    if schema.keys() & {"anyOf", "enum"} or (
        kinds and not any(is_kind(kind, value) for kind in kinds)
    ):
        raise _Misfit
    if isinstance(value, float) and "integer" in kinds and "number" not in kinds:
        return int(value)
    if isinstance(value, list):
        first = schema.get("prefixItems", [schema.get("items")] * len(value))
        if len(first) != len(value):
            raise _Misfit
        return [_typed(option, inner) for option, inner in zip(first, value, strict=True)]
    if isinstance(value, dict):
        known, other = schema.get("properties") or {}, schema.get("additionalProperties")
        return {key: _typed(known.get(key, other), inner) for key, inner in value.items()}
    return value


def _kinds(kinds: Any) -> list[str]:
    """JSON Schema's `type`: one or several."""
    return [] if kinds is None else [kinds] if isinstance(kinds, str) else list(kinds)


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 8) -> list[str]:
    """The JSON types of what a schema describes, those of its alternatives and definitions among
    them; empty: it names none.

    root: the schema that holds the definitions.

    >>> schema = {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/P"}], "nullable": True}
    >>> kinds_of(schema, {"$defs": {"P": {"type": "object"}}})
    ['integer', 'object', 'null']
    """
    if not isinstance(schema, Mapping) or depth == 0:
        return []
    kinds = _kinds(schema.get("type"))
    values = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]
    kinds += [_SCALARS[type(value)] for value in values if not kinds and type(value) in _SCALARS]
    inner = [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key) or ()]
    if isinstance(reference := schema.get("$ref"), str):
        definition: Any = root
        for step in reference.removeprefix("#/").split("/"):
            definition = definition.get(step) if isinstance(definition, Mapping) else None
        inner.append(definition)
    kinds += [kind for one in inner for kind in kinds_of(one, root, depth - 1)]
    return list(dict.fromkeys([*kinds, *(["null"] if kinds and schema.get("nullable") else [])]))


_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def is_kind(kind: str, value: Any) -> bool:
    """True if a value is of a JSON type; `2.0` is an integer, and a boolean is no number."""
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _KINDS.get(kind, (object,)))


def _expected(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(_shown, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(_expected(one) for one in schema["anyOf"])
    kinds = schema.get("type", "something else")
    shown = kinds if isinstance(kinds, str) else " or ".join(kinds)
    inner = schema.get({"array": "items", "object": "additionalProperties"}.get(shown, ""))
    if isinstance(inner, Mapping) and inner:
        shown = f"{shown} of {_expected(inner)}"
    return f"{shown} or null" if schema.get("nullable") else shown


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
