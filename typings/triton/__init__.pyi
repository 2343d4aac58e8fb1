"""What the kernels use of Triton: a kernel is no function of Python any more, and its numbers have no types of Python."""

from typing import Any

def jit(function: Any = ..., **options: Any) -> Any: ...
