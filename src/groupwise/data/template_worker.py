"""The process in which chat templates run (`rendering`).

A request is JSON: `{"template", "variables", "seconds", "memory", "length", "chats": [{"messages", "tools", "options"}, ...]}`.
There is an answer for each conversation: `["text", text]`, `["refused", why]`, or `["unusable", why]` (the template is none, or ran
out of time, memory, depth or length), which is the last one.
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

KILLED_AFTER = 1.5
"""Times its processor time a conversation may take if Python cannot stop it; then the kernel ends the process."""


class OutOfTime(BaseException):
    """The conversation's processor time is over."""


def serve_templates() -> Callable[[str], Iterator[tuple[str, str]]]:
    """In a process: what answers requests."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    def out_of_time(*_: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGPROF, out_of_time)
    start = _address_space()

    def answer(text: str) -> Iterator[tuple[str, str]]:
        request = json.loads(text)
        if start is not None:
            limit = start + int(request["memory"])
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        for chat in request["chats"]:
            kind, text_or_why = _answer(render_jinja_template, (SyntaxError, TemplateSyntaxError), chat, request)
            yield kind, text_or_why
            if kind == "unusable":
                return

    return answer


def _answer(
    render: Any, broken: tuple[type[Exception], ...], chat: Mapping[str, Any], request: Mapping[str, Any]
) -> tuple[str, str]:
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
        return "unusable", f"it ran for {seconds:g} seconds on one conversation and was stopped"
    except MemoryError:
        return "unusable", f"it needed more than {int(request['memory']) >> 20} MiB for one conversation"
    except RecursionError:
        return "unusable", "it calls itself without end"
    except broken as error:
        return "unusable", f"it is no Jinja template that can be run: {error}"
    except Exception as error:  # whatever a template does: it is not our code
        return "refused", f"{error}" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    if len(text) > int(request["length"]):
        return "unusable", f"it wrote {len(text):,} characters for one conversation"
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
