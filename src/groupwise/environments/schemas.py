"""Tools as the policy sees them: JSON schemas from type hints and docstrings, and arguments held against a schema."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from groupwise.errors import ConfigError

Schema = Mapping[str, Any]
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`."""


def schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The JSON schema of a function by transformers' rules: every parameter has a type hint, and a line under `Args:`.

    name: what the tool is called in messages.   Raises ConfigError for what is missing.
    """
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

    if not inspect.getdoc(function):
        raise ConfigError(f"the tool {name!r} has no docstring: say what it does, and each parameter under `Args:`")
    try:
        return get_json_schema(function)
    except DocstringParsingException as error:
        raise ConfigError(f"the tool {name!r}: {error}; write a line `name: what it is` under `Args:` in its docstring") from None
    except TypeHintParsingException as error:
        raise ConfigError(f"the tool {name!r}: {error}; give every parameter a type hint that JSON can hold") from None
    except (TypeError, NameError, ValueError) as error:
        raise ConfigError(f"the tool {name!r} cannot be described: {type(error).__name__}: {error}") from None


def name_of(schema: Schema) -> str:
    """What the policy calls it."""
    return str(schema["function"]["name"])


def wrong_arguments(schema: Schema, arguments: Mapping[str, Any]) -> str | None:
    """Why a tool cannot be called with these arguments, in words for the policy; None if it can.

    >>> tool = {"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}}}
    >>> wrong_arguments(tool, {"n": "3"}), wrong_arguments(tool, {"n": 3})
    ('the argument n is "3", expected integer', None)
    """
    parameters = schema["function"].get("parameters") or {}
    known = parameters.get("properties") or {}
    takes = f"{name_of(schema)} takes {', '.join(known) or 'no arguments'}"
    for key in arguments:
        if key not in known:
            return f"there is no argument {key!r}: {takes}"
    for key in parameters.get("required") or ():
        if key not in arguments:
            return f"the argument {key} is missing: {takes}"
    for key, value in arguments.items():
        if not _fits(known[key], value):
            return f"the argument {key} is {_shown(value)}, expected {_expected(known[key])}"
    return None


_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _fits(schema: Mapping[str, Any], value: Any) -> bool:
    """True if a value is what the part of JSON Schema that `get_json_schema` writes asks for."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(one, value) for one in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in schema["enum"])
    kinds = schema.get("type")
    if kinds is None:
        return True
    named = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is_kind(kind, value) for kind in named):
        return False
    if isinstance(value, list) and "prefixItems" in schema:
        items = schema["prefixItems"]
        return len(items) == len(value) and all(_fits(one, inner) for one, inner in zip(items, value, strict=True))
    if isinstance(value, list) and "items" in schema:
        return all(_fits(schema["items"], inner) for inner in value)
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), Mapping):
        return all(_fits(schema["additionalProperties"], inner) for inner in value.values())
    return True


def _is_kind(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()  # `2.0` is an integer to JSON Schema
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
    import json

    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
