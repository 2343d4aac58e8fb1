"""The names that `objective` may have."""

from __future__ import annotations

from groupwise.algorithms.table import ALGORITHMS

DATASET = ("sft", "reward", "dpo", "prm")
"""Objectives that learn from a data set."""
OBJECTIVES = (*DATASET, *ALGORITHMS)


def is_online(objective: str) -> bool:
    """Return True for objectives that sample their own completions; a `module:NAME` of one's own is
    such a one.
    """
    return objective in ALGORITHMS or ":" in objective
