"""All that is wrong with a recipe, collected while it is read and reported at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from groupwise.errors import ConfigError, DataError, GroupwiseError, Problems


class Findings:
    """Collects what is wrong with a recipe while it is read, so that all is reported at once."""

    def __init__(self) -> None:
        self.errors: list[GroupwiseError] = []

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Keep a ConfigError or DataError that is raised inside, and go on.   key: of the recipe,
        if the error names none.
        """
        try:
            yield
        except Problems as several:
            self.errors += several.errors
        except (ConfigError, DataError) as error:
            error.key = error.key or key
            self.errors.append(error)

    def settle(self) -> None:
        """Raises what was found: one error as it is, several as Problems."""
        if len(self.errors) > 1:
            raise Problems(self.errors)
        if self.errors:
            raise self.errors[0]
