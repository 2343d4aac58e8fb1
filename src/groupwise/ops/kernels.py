"""The compiled kernels as the rest of the library may ask about them: whether there are any, and which tensors they take.

What they compute is called through the operations beside this file, which take torch's own where there is no kernel.
"""

from __future__ import annotations

from groupwise.ops.cpu.kernels import fit_as_one, fits
from groupwise.ops.cpu.library import absence

__all__ = ["absence", "fit_as_one", "fits"]
