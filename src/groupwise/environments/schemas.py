"""Tools as the policy sees them: JSON schemas from type hints and docstrings, and arguments held
against a schema.

The schemas are those of transformers' `get_json_schema`, which chat templates were written for.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, get_type_hints

from groupwise.errors import ConfigError

Schema = Mapping[str, Any]
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`."""


def schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the JSON schema of a function, as transformers' `get_json_schema` writes it.

    Every parameter has a type hint, and a line under `Args:` in a docstring of Google's style.  An
    object is described by its `__call__`, a `functools.partial` by what it calls, without the
    arguments that it sets by name.   name: what the policy calls it.
    Raises ConfigError for what is missing, and for what no call by name can give or answer.
    """
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
    # Here, and not with this module: it takes longer to import than the rest of a worker process.
    from transformers.utils import chat_template_utils

    try:
        described = _signed(function, written, documentation, name)
        return chat_template_utils.get_json_schema(described)
    except (
        chat_template_utils.TypeHintParsingException,
        chat_template_utils.DocstringParsingException,
    ) as error:
        raise ConfigError(f"the tool {name!r}: {' '.join(map(str, error.args))}") from None
    except (TypeError, NameError, ValueError) as error:
        raise ConfigError(
            f"the tool {name!r} cannot be described: {type(error).__name__}: {error}"
        ) from None


def _signed(
    function: Callable[..., Any], written: Callable[..., Any], documentation: str, name: str
) -> Callable[..., Any]:
    """Return a function with the name, docstring and type hints of a tool, without the parameters
    that a `functools.partial` sets.

    Raises ValueError for a parameter that no call by name can give.
    """

    def tool() -> None: ...

    hints = get_type_hints(written)
    set_already = {}
    if isinstance(function, partial):
        set_already = function.keywords
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in set_already:
            continue
        if parameter.kind in _UNNAMED:
            raise ValueError(
                f"the policy gives arguments by name, which {str(parameter).partition(':')[0]!r}"
                " does not take; name each"
            )
        hint = hints.get(parameter.name, inspect.Parameter.empty)
        parameters.append(parameter.replace(annotation=hint))
    tool.__name__, tool.__doc__ = name, documentation
    tool.__annotations__ = {one.name: one.annotation for one in parameters if one.name in hints}
    if "return" in hints:
        tool.__annotations__["return"] = hints["return"]
    tool.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return tool


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


_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


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
    for key in arguments:
        if key not in known:
            raise WrongArguments(f"there is no argument {key!r}: {takes}")
    for key in parameters.get("required") or ():
        if key not in arguments:
            raise WrongArguments(f"the argument {key} is missing: {takes}")
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
    if isinstance(kinds, str):
        return [kinds]
    return list(kinds or ())


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
    kinds = _kinds(schema.get("type")) or _kinds_of_values(schema)
    alternatives: list[Any] = []
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives += schema.get(key) or ()
    if isinstance(schema.get("$ref"), str):
        alternatives.append(_definition(schema["$ref"], root))
    for alternative in alternatives:
        kinds += kinds_of(alternative, root, depth - 1)
    if kinds and schema.get("nullable"):
        kinds.append("null")
    return list(dict.fromkeys(kinds))


def _kinds_of_values(schema: Mapping[str, Any]) -> list[str]:
    """The JSON types of the values that a schema lists."""
    values = [*(schema.get("enum") or ())]
    if "const" in schema:
        values.append(schema["const"])
    return [_SCALARS[type(value)] for value in values if type(value) in _SCALARS]


def _definition(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference names in the schema that holds the definitions; None if nothing."""
    definition: Any = root
    for step in reference.removeprefix("#/").split("/"):
        if not isinstance(definition, Mapping):
            return None
        definition = definition.get(step)
    return definition


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
    shown = " or ".join(_kinds(schema.get("type", "something else")))
    inner = schema.get({"array": "items", "object": "additionalProperties"}.get(shown, ""))
    if isinstance(inner, Mapping) and inner:
        shown = f"{shown} of {_expected(inner)}"
    if schema.get("nullable"):
        shown += " or null"
    return shown


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > 60:
        text = text[:57] + "..."
    return text
