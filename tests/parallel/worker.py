"""One of the processes of `conftest.Ranks`: meets the others, then runs functions of `cases.py` until its input ends."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
import traceback
from pathlib import Path

import torch

from groupwise import parallel


def main() -> None:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("cases", Path(__file__).with_name("cases.py"))
    assert spec is not None and spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = cases
    spec.loader.exec_module(cases)
    parallel.join(60.0, cuda=False)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = getattr(cases, request["case"])(**request["arguments"])
        except Exception:
            found = None
            traceback.print_exc()
            Path(request["out"]).write_bytes(pickle.dumps((False, traceback.format_exc())))
            raise SystemExit(1) from None
        Path(request["out"]).write_bytes(pickle.dumps((True, found)))
        print("done", flush=True)


if __name__ == "__main__":
    main()
