"""The process in which chat templates run.  It imports nothing of Groupwise: `rendering` starts this file as a script.

One line of JSON in, one line of JSON out.  In: `{"template", "variables", "seconds", "memory", "length", "chats": [{"messages",
"tools", "options"}, ...]}`.  Out: a list of `["text", text]`, `["refused", why]` (this conversation) or `["exhausted", why]` (the
template ran out of time, memory, depth or length; the list ends there).
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KILLED_AFTER = 2
"""Times its processor time a conversation may take if Python cannot stop it; then the kernel ends the process."""


class OutOfTime(BaseException):
    """The conversation's processor time is over."""


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which may still need a prompt
    from transformers.utils.chat_template_utils import render_jinja_template

    def out_of_time(*_: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGPROF, out_of_time)
    start = _address_space()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if start is not None:
            limit = start + int(request["memory"])
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        answers = []
        for chat in request["chats"]:
            answers.append(_answer(render_jinja_template, chat, request))
            if answers[-1][0] == "exhausted":
                break
        sys.stdout.buffer.write(json.dumps(answers).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(render: Any, chat: Mapping[str, Any], request: Mapping[str, Any]) -> tuple[str, str]:
    """One conversation, on its budget."""
    seconds = float(request["seconds"])
    _kernel_limit(KILLED_AFTER * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        rendered, _ = render(
            conversations=[chat["messages"]],
            tools=chat["tools"],
            chat_template=request["template"],
            **{**request["variables"], **chat["options"]},
        )
        text = rendered[0]
    except OutOfTime:
        return "exhausted", f"it ran for {seconds:g} seconds on one conversation and was stopped"
    except MemoryError:
        return "exhausted", f"it needed more than {int(request['memory']) >> 20} MiB for one conversation"
    except RecursionError:
        return "exhausted", "it calls itself without end"
    except Exception as error:  # whatever a template does: it is not our code
        return "refused", f"{error}" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    if len(text) > int(request["length"]):
        return "exhausted", f"it wrote {len(text):,} characters for one conversation"
    return "text", text


def _kernel_limit(seconds: float) -> None:
    """Have the kernel end this process after so many more seconds of processor time, which Python's timer cannot always do."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, hard))


def _address_space() -> int | None:
    """Bytes of this process's address space; None where the system does not say (it then sets no limit to memory)."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else None


if __name__ == "__main__":
    main()
