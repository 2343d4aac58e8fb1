"""Files of cases import Triton."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob.append("*_cases.py")
