"""One of the processes of `conftest.Ranks`: meets the others, then runs functions of `cases.py` until its input ends.

With a request as its argument it runs that one, as torchrun's processes do, and writes to `out` and its rank.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from groupwise.distributed import process_group


def main() -> None:
    torch.set_num_threads(1)
    sys.path.append(str(Path(__file__).parents[1] / "fixtures"))
    spec = importlib.util.spec_from_file_location("cases", Path(__file__).with_name("cases.py"))
    assert spec is not None and spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = cases
    spec.loader.exec_module(cases)
    here = process_group.join(60.0, cuda=False)
    if len(sys.argv) > 1:
        request = json.loads(sys.argv[1])
        answer(cases, request, Path(f"{request['out']}-{here.rank}"))
        process_group.leave()
        return
    for line in sys.stdin:
        request = json.loads(line)
        answer(cases, request, Path(request["out"]))
        print("done", flush=True)


def answer(cases: Any, request: dict[str, Any], out: Path) -> None:
    try:
        found = getattr(cases, request["case"])(**request["arguments"])
    except Exception:
        traceback.print_exc()
        out.write_bytes(pickle.dumps((False, traceback.format_exc())))
        raise SystemExit(1) from None
    out.write_bytes(pickle.dumps((True, found)))


if __name__ == "__main__":
    main()
