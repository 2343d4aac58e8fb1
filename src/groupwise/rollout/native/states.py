"""Convolutions and recurrent states of the native engine's passes: read from the stores, and kept in them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from groupwise.ops.recurrence import Runs, convolve, rule_for
from groupwise.rollout.native.kv_cache import Place


class KeptStates:
    """`models.recurrence.Recurrent` over runs whose states come from a store and go to one."""

    def __init__(self, runs: Runs, read: Callable[[Place], Tensor | None], keep: Callable[[Place, Tensor], None]) -> None:
        """read: the runs' states before this pass; None: zeros.   keep: takes those behind it."""
        self.runs, self.read, self.keep = runs, read, keep

    def convolve(self, place: Place, x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor | None) -> Tensor:
        """See `Recurrent`."""
        out, state = convolve(x_TD, weight_DW, bias_D, self.runs, self.read(place))
        self.keep(place, state)
        return out

    def rule(self, place: Place, *columns: Tensor | None) -> Tensor:
        """See `Recurrent`."""
        rule = rule_for(columns[2], columns[4])  # type: ignore[arg-type]
        out, state = rule(*columns, self.runs, self.read(place))
        self.keep(place, state)
        return out
