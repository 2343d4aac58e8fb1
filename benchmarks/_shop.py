"""An environment as TRL's documentation writes them: `reset(**row)`, public methods are tools, `get_reward()`."""

from __future__ import annotations

import time

PRICES = {"tea": 4, "cup": 12, "pot": 30}


class Shop:
    """A till with a price list.  A row says which total is right, and how long the till takes for an answer."""

    def reset(self, **row) -> str | None:
        """Begin: an empty till."""
        self.total = 0
        self.right = row.get("right", 0)
        self.seconds = row.get("seconds", 0.0)
        return row.get("greeting") or None

    def price(self, article: str) -> int:
        """
        Look up a price.

        Args:
            article: What.

        Returns:
            The price.
        """
        time.sleep(self.seconds)
        return PRICES[article]

    def add(self, amount: int) -> int:
        """
        Add an amount to the till.

        Args:
            amount: How much.

        Returns:
            The total.
        """
        time.sleep(self.seconds)
        self.total += amount
        return self.total

    def get_reward(self) -> float:
        """1 if the till is right."""
        return float(self.total == self.right)
