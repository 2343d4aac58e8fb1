"""How the Python reference reads docstrings, which are plain text: examples become code blocks, and parameters a list."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

EXAMPLE = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)
"""From a prompt to the next empty line."""
PARAMETER = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): ", re.MULTILINE)
"""A line that begins with the name of a parameter, or several."""


class Plain(Extension):
    """Makes Markdown of every docstring."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Once per module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """A docstring with a list of its parameters, a paragraph for what it raises, and its examples in fences."""
    text = PARAMETER.sub(r"\n- **\1**: ", text)
    text = re.sub(r"^(Raises |The other )", r"\n\1", text, flags=re.MULTILINE)
    return EXAMPLE.sub(lambda match: f"\n```python\n{match[0].rstrip()}\n```\n", text)
