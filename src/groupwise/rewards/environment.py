"""What reward functions see of an environment once its episode is over, and the reward that it
gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.utils.built_in import built_in


class EnvironmentState:
    """Stands for an environment that lived elsewhere and has been closed: its public attributes can
    be read as they were then.

    There are those whose values JSON holds (a tuple is a list).  `get_reward()` gives what the
    environment gave.  Other methods are
    gone with it: what a reward function wants to know, the environment keeps in an attribute.

    >>> EnvironmentState("Guess", {"tries": 3}, 0.5).tries
    3
    """

    def __init__(self, name: str, attributes: Mapping[str, Any], reward: float | None) -> None:
        self.__dict__.update(attributes)
        self.__dict__ |= {"_name": name, "_reward": reward}

    def get_reward(self) -> float | None:
        """What the environment gave for the episode; None if it gave nothing."""
        return self._reward

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(key for key in self.__dict__ if not key.startswith("_"))) or "none"
        raise AttributeError(
            f"{name!r}: of an environment that has been closed there are the public attributes that"
            f" JSON can hold ({known}); keep what rewards need in one of them"
        )

    def __repr__(self) -> str:
        return f"EnvironmentState({self._name!r})"


@built_in("environment")
def environment(
    completions: Sequence[str], environment_rewards: Sequence[float | None]
) -> list[float | None]:
    """The environment's reward of the episode: `get_reward()`, or the sum of the rewards of `step`;
    None if there is none.

    >>> environment(["5"], [0.5])
    [0.5]
    """
    return list(environment_rewards) or [None for _ in completions]
