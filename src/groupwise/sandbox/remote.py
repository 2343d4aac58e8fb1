"""Programs that run elsewhere: in a SandboxFusion service, or by a function of the user."""

from __future__ import annotations

import http.client
import inspect
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from groupwise.sandbox import runner
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.server import LIMITS, Ran, SandboxFailed

ESCAPED = 8
"""Bytes of JSON for a byte of output."""
WAIT = 30.0
"""Seconds beyond the program's that a service has to answer in."""

Run = Callable[[str, str, str, Limits], Ran]
"""(source, language, standard input, limits) -> what the program printed."""


class SandboxFusion:
    """A service that answers `POST /run_code` as SandboxFusion does."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __call__(self, source: str, language: str, text: str, limits: Limits) -> Ran:
        """Run a program.  Raises SandboxFailed if the service does not."""
        body = {
            "code": source,
            "language": language,
            "stdin": text,
            "compile_timeout": limits.seconds,
            "run_timeout": limits.seconds,
            "memory_limit_MB": limits.memory >> 20,
        }
        request = urllib.request.Request(
            f"{self.url}/run_code",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        longest = limits.output * ESCAPED + (1 << 20)
        try:
            with urllib.request.urlopen(request, timeout=2 * limits.seconds + WAIT) as answer:
                data = answer.read(longest + 1)
            if len(data) > longest:
                return Ran(b"", LIMITS["output"])
            said = json.loads(data)
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise SandboxFailed(f"{self.url}/run_code: {error}") from None
        if not isinstance(said, dict) or said.get("status") == "SandboxError":
            raise SandboxFailed(f"{self.url}/run_code: {str(said)[:300]}")
        result = said.get("run_result") or said.get("compile_result")
        if not isinstance(result, dict):
            raise SandboxFailed(f"{self.url}/run_code: no result in {str(said)[:300]}")
        output = str(result.get("stdout") or "").encode("utf-8", "replace")[: limits.output]
        if result.get("status") == "TimeLimitExceeded":
            return Ran(output, LIMITS["seconds"])
        return Ran(output, str(result.get("return_code")))


def calls_as_script(source: str, name: str) -> str:
    """Return a program that reads the arguments of one call, and prints its value behind all else.

    Values cross as `runner.encode` writes them.
    """
    needed = (
        runner._integer,
        runner._float,
        runner.encode,
        runner.Opaque,
        runner._spread,
        runner._decoded,
        runner.decode,
    )
    parts = ["import json, sys", "from typing import Any"]
    parts += [f"DEPTH, ALIKE = {runner.DEPTH}, {runner.ALIKE}"]
    parts += [inspect.getsource(one) for one in needed]
    parts.append(inspect.getsource(runner._function))
    parts.append(f"_program = {{}}\nexec(compile({source!r}, 'program.py', 'exec'), _program)")
    parts.append("_given = json.loads(sys.stdin.read())")
    parts.append(f"_value = _function(_program, {name!r})(*decode(_given))")
    parts.append("print('\\n' + json.dumps(encode(_value)))")
    return "\n".join(parts)


def last_line(ran: Ran) -> Any:
    """Return the value that `calls_as_script` printed.  Raises ValueError where there is none."""
    lines = ran.output.decode(errors="replace").strip().splitlines()
    if not lines:
        raise ValueError("the program printed nothing")
    return runner.decode(json.loads(lines[-1]))
