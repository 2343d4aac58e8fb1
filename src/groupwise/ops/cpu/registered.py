"""How a compiled kernel becomes an operation of `torch.library`: `torch.ops.groupwise.NAME`, with schema, fake and mutations.

A function that makes room for its results and calls a kernel says all that torch has to know: its signature is the schema, and
itself, with the kernel left out, what it does to shapes.  With all checks that costs 6 to 12 us a call, and 23 for the 13 arguments
of `decode_attention`; `torch.library.custom_op` costs 23 to 33 (AMD EPYC, Zen 3).  At shape S decoding a whole model in one call is
as fast as without; kernel by kernel, as top-k and top-p decode, a rollout takes about 7 % longer (0.59 -> 0.63 s).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from groupwise.ops.cpu.library import only_shapes, without_kernels

P = ParamSpec("P")
R = TypeVar("R")
NAMESPACE = "groupwise"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
REGISTERED: dict[str, Any] = {}
"""Every operation by its name."""


def operation(*mutates: str, name: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function of tensors on the CPU; what the name stands for afterwards is the operation.

    mutates: the arguments whose numbers it changes, of which torch then counts the changes.   name: unless the function's own.

    No result may be an argument or share memory with one.  Where a gradient is needed and `torch.library.register_autograd` has
    given it none, it raises RuntimeError.
    """

    def registered(function: Callable[P, R]) -> Callable[P, R]:
        named_as = name or function.__name__
        LIBRARY.define(
            named_as + torch.library.infer_schema(function, mutates_args=mutates),
            # Kernels have found out how far numbers are apart: a compiler must not lay tensors out anew.
            tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
        )
        LIBRARY.impl(named_as, _guarded(function, mutates), "CPU")
        made = getattr(getattr(torch.ops, NAMESPACE), named_as).default

        def fake(*arguments: P.args, **named: P.kwargs) -> R:
            with without_kernels():
                return function(*arguments, **named)

        torch.library.register_fake(f"{NAMESPACE}::{named_as}", fake, lib=LIBRARY)
        made.__doc__ = function.__doc__
        REGISTERED[named_as] = made
        return made

    return registered


def _guarded(function: Callable[..., Any], mutates: tuple[str, ...]) -> Callable[..., Any]:
    places = [place for place, name in enumerate(function.__code__.co_varnames) if name in mutates]

    def run(*arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            for argument in arguments:
                if isinstance(argument, Tensor) and argument.requires_grad:
                    raise RuntimeError(f"{NAMESPACE}::{function.__name__} has no gradient: call it where none is needed")
        result = function(*arguments, **named)
        for place in places:
            changed = arguments[place] if place < len(arguments) else None  # an argument at its default is not passed on
            if changed is not None and not changed.is_inference():
                torch.autograd.graph.increment_version(changed)
        return result

    return run


def require(taken: bool, takes: str, *tensors: Tensor) -> None:
    """Raise ValueError, before memory is touched, for tensors that a kernel does not take.  takes: those that it does."""
    if not taken and not only_shapes():
        shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
        raise ValueError(f"the kernel takes {takes}; got {shapes}")
