"""How the Python reference reads docstrings: their examples become code blocks, which Markdown would show as quotations."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

EXAMPLE = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)
"""From a prompt to the next empty line."""


class Examples(Extension):
    """Fences the examples of every docstring."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Once per module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring with its examples in fences."""
    return EXAMPLE.sub(lambda match: f"```python\n{match[0].rstrip()}\n```\n", text)
