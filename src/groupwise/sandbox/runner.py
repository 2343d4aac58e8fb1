"""The process inside a sandbox that runs programs: it imports once, and forks a child for each.

This file is given to Python as text, and needs the standard library alone.  It uses three pipes:

    0   requests.   The server reads a header; the child that it forks reads the rest.
    1   answers.    Only children write here.
    2   control.    Only the server writes here: a line when it is ready, a line when a child ended.

The server never reads a program, an argument or an answer, so a child finds nothing of other
programs in the memory that it was forked with.  A child may send what it likes on pipe 1: whoever
reads it takes it as data.  A child cannot make processes, so it ends without descendants.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import os
import platform
import resource
import select
import signal
import struct
import sys
import traceback
import types
from typing import Any

WARM = (
    "abc array ast base64 bisect cmath collections copy dataclasses datetime decimal enum fractions"
    " functools hashlib heapq inspect io itertools math numbers operator random re statistics"
    " string textwrap types typing zlib"
)
"""Modules that programs commonly import, loaded before the forks."""

REQUESTS, ANSWERS, CONTROL = 0, 1, 2
LENGTH = struct.Struct(">I")
DEPTH = 200
"""Values that are nested deeper than this do not cross."""
TOLD = 300
"""Characters of an exception that cross."""
LOOK = 0.02
"""Seconds between two looks at a program's folder."""
ENTRIES = 1000
"""Files and folders that a program may make."""
PATH = 512
"""Characters of the path of a folder that it may make: the cost of a look grows with the depth."""
ALIKE = 100
"""Members of a set that may share a hash: the time to make it grows with their number's square."""


# --- values ---------------------------------------------------------------------------------------


def encode(value: Any, depth: int = DEPTH) -> Any:
    """Return a value as JSON; what is no plain data becomes the name of its type.

    >>> encode([1, (2.5, "x"), {3}])
    [1, {'tuple': [2.5, 'x']}, {'set': [3]}]
    >>> encode(object())
    {'object': 'object'}
    """
    if depth == 0:
        return {"object": "a value nested too deep"}
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return _integer(int.__index__(value))
    if isinstance(value, float):
        return _float(float.__float__(value))
    if isinstance(value, complex):
        return {"complex": [_float(value.real), _float(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"dict": [[encode(key, depth - 1), encode(item, depth - 1)] for key, item in pairs]}
    if isinstance(value, list):
        return [encode(item, depth - 1) for item in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, depth - 1) for item in value]}
    return {"object": type(value).__name__}


def _integer(value: int) -> Any:
    """Return an integer; a large one in hexadecimal digits, which have no limit of length."""
    return value if abs(value) < 1 << 53 else {"int": hex(value)}


def _float(value: float) -> Any:
    """Return a float; JSON has no infinity and no NaN."""
    return value if value - value == 0.0 else {"float": repr(value)}


class Opaque:
    """A value that is no plain data.  It equals nothing, not even itself."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def decode(data: Any) -> Any:
    """Return the value behind `encode`.  Raises ValueError for what `encode` does not write.

    >>> decode(encode({(1, 2): [3.0, None]}))
    {(1, 2): [3.0, None]}
    """
    try:
        return _decoded(data)
    except (TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no value: {error}") from None


def _decoded(data: Any) -> Any:
    if isinstance(data, list):
        return [_decoded(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "object":
        return Opaque(str(content))
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    if kind == "complex":
        real, imaginary = content
        return complex(_decoded(real), _decoded(imaginary))
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        keys = _spread([_decoded(key) for key, _ in content])
        return dict(zip(keys, [_decoded(item) for _, item in content], strict=True))
    if kind == "tuple":
        return tuple(map(_decoded, content))
    for made in (set, frozenset):
        if kind == made.__name__:
            return made(_spread([_decoded(item) for item in content]))
    raise ValueError(f"unknown kind of value {kind!r}")


def _spread(members: list[Any]) -> list[Any]:
    """Return the members of a set.  Raises ValueError where too many share a hash."""
    counts: dict[int, int] = {}
    for member in members:
        place = hash(member)
        counts[place] = counts.get(place, 0) + 1
    if counts and max(counts.values()) > ALIKE:
        raise ValueError(f"more than {ALIKE} members of a set share a hash")
    return members


# --- frames ---------------------------------------------------------------------------------------


def _read_exactly(pipe: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(pipe, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_frame(pipe: int) -> Any:
    """Return the next message.  Raises EOFError at the end."""
    (length,) = LENGTH.unpack(_read_exactly(pipe, LENGTH.size))
    return json.loads(_read_exactly(pipe, length))


def write_frame(pipe: int, message: Any) -> None:
    """Send a message."""
    data = json.dumps(message).encode()
    data = LENGTH.pack(len(data)) + data
    while data:
        data = data[os.write(pipe, data) :]


# --- what a child may do --------------------------------------------------------------------------

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 4, 24, 38, 22
PR_SET_PDEATHSIG = 1
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446

_FORBIDDEN = {
    # processes and other processes
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "kcmp": (312, 272),
    "process_mrelease": (448, 448),
    "prlimit64": (302, 261),
    "setrlimit": (160, 164),
    # namespaces, mounts, privileges
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # the network, and memory that limits do not count
    "socket": (41, 198),
    "socketpair": (53, 199),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
"""System calls that fail with EPERM, with their numbers on x86-64 and on arm64."""
_MAKES_PROCESSES = (
    "fork",
    "vfork",
    "execve",
    "setpgid",
    "setsid",
    "prlimit64",
    "setrlimit",
)
"""The ones that a shell needs.  Limits are those of the caller alone, and hard ones cannot be
raised without capabilities.
"""
_CLONE, _CLONE3, _KILL, _TGKILL = (56, 220), (435, 435), (62, 129), (234, 131)
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACE = 0x7E020000
"""All flags of namespaces."""
_OPEN, _OPENAT, _OPENAT2 = (2, None), (257, 56), (437, 437)
_O_TMPFILE = 0x00400000
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _EPERM, _ENOSYS, _ASK = 0x7FFF0000, 0x00050001, 0x00050026, 0x7FC00000
_SECCOMP, _NEW_LISTENER = (317, 277), 1 << 3
_NOTIF_RECV, _NOTIF_SEND = 0xC0502100, 0xC0182101


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("true", ctypes.c_uint8),
        ("false", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    ]


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction))]


_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32)


def _seccomp_filter(own: int | None, fork: int = _ALLOW) -> list[tuple[int, int, int, int]]:
    """Return the instructions of the filter.

    own: the process that may get its own signals; None: processes may be made, and signalled.
    fork: what becomes of a call that makes a process.
    """
    column, architecture = _MACHINES[platform.machine()]
    forbidden = dict(_FORBIDDEN)
    if own is None:
        for name in _MAKES_PROCESSES:
            del forbidden[name]
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _EPERM),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if column == 0:  # the second numbering of x86-64
        code += [(_ANY_BIT, 0, 1, 0x40000000), (_RETURN, 0, 0, _EPERM)]
    for numbers in forbidden.values():
        if numbers[column] is not None:
            code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _EPERM)]
    for numbers in (_CLONE3, _OPENAT2):
        code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ENOSYS)]
    for number, flags in ((_OPEN[column], _ARGUMENTS[1]), (_OPENAT[column], _ARGUMENTS[2])):
        if number is not None:  # a file without a name escapes the limit on files
            code += [
                (_EQUAL, 0, 4, number),
                (_LOAD, 0, 0, flags),
                (_ANY_BIT, 0, 1, _O_TMPFILE),
                (_RETURN, 0, 0, _EPERM),
                (_RETURN, 0, 0, _ALLOW),
            ]
    if own is None:
        for number in (_FORBIDDEN["fork"][column], _FORBIDDEN["vfork"][column]):
            if number is not None:
                code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, fork)]
        return [
            *code,
            (_EQUAL, 0, 4, _FORBIDDEN["prlimit64"][column]),
            (_LOAD, 0, 0, _ARGUMENTS[0]),
            (_EQUAL, 1, 0, 0),
            (_RETURN, 0, 0, _EPERM),
            (_RETURN, 0, 0, _ALLOW),
            (_EQUAL, 0, 5, _CLONE[column]),
            (_LOAD, 0, 0, _ARGUMENTS[0]),
            (_ANY_BIT, 0, 1, _CLONE_NAMESPACE),
            (_RETURN, 0, 0, _EPERM),
            (_ANY_BIT, 1, 0, _CLONE_THREAD),
            (_RETURN, 0, 0, fork),
            (_RETURN, 0, 0, _ALLOW),
        ]
    for number in (_KILL[column], _TGKILL[column]):  # to itself alone
        code += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARGUMENTS[0]),
            (_EQUAL, 1, 0, own),
            (_RETURN, 0, 0, _EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    code += [  # threads alone
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _ARGUMENTS[0]),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return code


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def prctl(option: int, *arguments: Any) -> None:
    """Set an attribute of this process.  Raises OSError."""
    if _libc().prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def drop_privileges() -> None:
    """Give up all capabilities, also those of programs that are executed."""
    libc = _libc()
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(header), ctypes.byref(nothing)) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def filter_calls() -> None:
    """Forbid the system calls of `_FORBIDDEN`."""
    program, _ = _program(_seccomp_filter(os.getpid()))
    prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)


def filter_calls_of_a_shell(*, asks: bool) -> int | None:
    """Forbid the system calls of `_FORBIDDEN`, but those that make processes.

    asks: whether each call that makes a process waits for an answer on the file that is returned.
    """
    if not asks:
        program, _ = _program(_seccomp_filter(None))
        prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)
        return None
    program, _ = _program(_seccomp_filter(None, _ASK))
    libc, number = _libc(), _SECCOMP[_MACHINES[platform.machine()][0]]
    listener = libc.syscall(number, 1, _NEW_LISTENER, ctypes.byref(program))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(listener)


def _program(code: list[tuple[int, int, int, int]]) -> tuple[_Filter, Any]:
    """Return a filter, and the instructions that it points to."""
    instructions = (_Instruction * len(code))(*code)
    return _Filter(len(code), instructions), instructions


def answer_fork(listener: int, allowed: bool) -> None:
    """Let a call that waits on a filter's file make its process, or fail with EAGAIN."""
    try:
        asked = fcntl.ioctl(listener, _NOTIF_RECV, bytes(80))
        (identity,) = struct.unpack_from("=Q", asked)
        error, flags = (0, 1) if allowed else (-errno.EAGAIN, 0)
        fcntl.ioctl(listener, _NOTIF_SEND, struct.pack("=QqiI", identity, 0, error, flags))
    except FileNotFoundError:  # who asked was killed meanwhile
        return


def _landlock_version(libc: Any) -> int:
    """Return the kernel's version of Landlock; below 1: it has none."""
    return int(libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1))


def landlock(folder: str, *, removes: bool = False) -> None:
    """Let a process write below a folder alone, and reach no other process, where the kernel has
    Landlock.

    removes: whether it can remove files.  One that is removed while it is mapped escapes a limit on
    files that is not the file system's own.
    """
    libc = _libc()
    version = _landlock_version(libc)
    if version < 1:
        return
    write_file, read_rights = 1 << 1, (1 << 0) | (1 << 2) | (1 << 3)
    remove_file = 0 if removes else 1 << 5
    handled = (1 << 13) - 1
    handled |= (1 << 13) if version >= 2 else 0
    handled |= (1 << 14) if version >= 3 else 0
    network = 0b11 if version >= 4 else 0
    scoped = 0b11 if version >= 6 else 0
    words = (ctypes.c_uint64 * 3)(handled, network, scoped)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(words), size, 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    rules = [
        ("/", read_rights & handled),
        (folder, handled & ~remove_file),
        ("/dev/null", write_file),
    ]
    for path, rights in rules:
        _allow_below(libc, ruleset, path, rights)
    if libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def _allow_below(libc: Any, ruleset: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=QI", rights, opened)
    if libc.syscall(_LANDLOCK_ADD_RULE, ruleset, 1, rule, 0) != 0:
        raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
    os.close(opened)


def set_limits(limits: dict[str, Any]) -> None:
    """Hold this process, and those that it makes, to limits."""
    seconds = max(1, -(-int(limits["cpu_seconds"] * 1000) // 1000))
    pairs = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: int(limits["memory"]),
        resource.RLIMIT_FSIZE: int(limits["disk"]),
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: 64 << 20,
    }
    for kind, value in pairs.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        most = value + 1 if kind == resource.RLIMIT_CPU else value  # SIGXCPU, then SIGKILL
        resource.setrlimit(kind, (value, most))


# --- children -------------------------------------------------------------------------------------


def _told(error: BaseException) -> dict[str, str]:
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return {"error": type(error).__name__, "message": text[:TOLD]}


def _child(folder: str, limits: dict[str, Any]) -> None:
    """Read a request, give up all rights, and do it."""
    try:
        os.chdir(folder)
        request = read_frame(REQUESTS)
        null = os.open(os.devnull, os.O_RDWR)
        requests, answers = os.dup(REQUESTS), os.dup(ANSWERS)
        os.dup2(null, REQUESTS)
        if request["do"] == "run":
            _open_as_input(request["stdin"])
        else:
            os.dup2(null, ANSWERS)
        set_limits(limits)
        drop_privileges()
        landlock(folder)
        filter_calls()
    except BaseException as error:  # a program that is not confined does not run
        os.write(CONTROL, f"failed {error!r}\n".encode())
        return
    os.dup2(null, CONTROL)
    os.close(null)
    sys.setrecursionlimit(10_000)
    if request["do"] == "run":
        os.close(requests)
        os.close(answers)
        _run(request["source"])
    elif request["do"] == "serve":
        _serve(request["source"], requests, answers)
    else:
        _judge(request, requests, answers)


def _open_as_input(text: str) -> None:
    """Make a text the standard input."""
    with open("input", "w+b") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        os.dup2(file.fileno(), REQUESTS)
    os.unlink("input")


def namespace(name: str) -> dict[str, Any]:
    """Return the variables of a new module, which the interpreter knows."""
    module = type(sys)(name)
    sys.modules[name] = module
    return module.__dict__


def _run(source: str) -> None:
    """Run a program as a script."""
    variables = namespace("__main__")
    sys.argv = ["program.py"]
    exec(compile(source, "program.py", "exec"), variables)


def _serve(source: str, requests: int, answers: int) -> None:
    """Load a program, then answer calls of its functions: {name, args, kwargs} -> {value, args}."""
    variables = namespace("program")
    try:
        exec(compile(source, "program.py", "exec"), variables)
    except BaseException as error:  # whatever a program raises is its answer
        write_frame(answers, _told(error))
    else:
        write_frame(answers, {"loaded": True})
    while True:
        request = read_frame(requests)
        if request.get("do") == "stop":
            return
        try:
            answer = _called(variables, request)
        except BaseException as error:  # whatever a program raises is its answer
            answer = _told(error)
        write_frame(answers, answer)


def _called(variables: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    function = _function(variables, request["name"])
    arguments = decode(request["args"])
    value = function(*arguments, **decode(request["kwargs"]))
    if isinstance(value, types.GeneratorType):
        value = list(value)
    return {"value": encode(value), "args": encode(arguments)}


def _function(variables: dict[str, Any], name: str) -> Any:
    """Return a function of a program, or a method of its class Solution."""
    if name in variables:
        return variables[name]
    if "Solution" in variables:
        return getattr(variables["Solution"](), name)
    raise NameError(f"the program has no function {name!r}")


def _judge(request: dict[str, Any], requests: int, answers: int) -> None:
    """Run a test whose assertions are calls of `case_`: -> {cases: [true, false ...]}.

    With a program the test runs beside it.  Else each call of a program's function is a message to
    whoever asked, {name, args, kwargs}, and the answer is what the function gave.
    """
    variables = namespace("judge")
    cases: list[bool] = []

    def case_(holds: Any) -> None:
        cases.append(False)
        try:
            cases[-1] = bool(holds())
        except Exception:  # an assertion that raises has failed
            return

    def outside(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            asked = {"name": name, "args": encode(list(args)), "kwargs": encode(kwargs)}
            write_frame(answers, asked)
            return _answered(read_frame(requests), list(args))

        return call

    ended = None
    try:
        if request["source"] is not None:
            exec(compile(request["source"], "program.py", "exec"), variables)
            function = _function(variables, request["entry"]) if request["entry"] else None
        else:
            function = outside(request["entry"])
            variables.update({name: outside(name) for name in request["names"]})
        variables["case_"] = case_
        exec(compile(request["test"], "test.py", "exec"), variables)
        if request["check"]:
            variables["check"](function)
    except BaseException as error:  # whatever a test raises ends it
        ended = _told(error)
    write_frame(answers, {"cases": cases, "ended": ended})
    read_frame(requests)  # stop


def _answered(answer: dict[str, Any], arguments: list[Any]) -> Any:
    """Return what a function gave, after it changed its arguments as the program did."""
    if "error" in answer:
        known = getattr(__import__("builtins"), answer["error"], RuntimeError)
        if not (isinstance(known, type) and issubclass(known, Exception)):
            known = RuntimeError
        if issubclass(known, (StopIteration, StopAsyncIteration)):
            known = RuntimeError  # else `all(map(...))` in a test would end as if all held
        raise known(answer["message"])
    for argument, after in zip(arguments, decode(answer["args"]), strict=False):
        if isinstance(argument, list) and isinstance(after, list):
            argument[:] = after
        elif isinstance(argument, (dict, set)) and type(argument) is type(after):
            argument.clear()
            argument.update(after)
    return decode(answer["value"])


# --- the server -----------------------------------------------------------------------------------


def is_full(folder: str, most: float) -> bool:
    """Return True if a folder holds more bytes, too many entries, or what cannot be looked at."""
    used, entries = used_by(folder, most)
    return used > most or entries > ENTRIES


def used_by(folder: str, most: float = math.inf) -> tuple[float, float]:
    """Return the bytes and the entries of a folder; it stops counting above the limits.

    What cannot be looked at is infinite.
    """
    used = entries = 0
    folders = [folder]
    while folders:
        try:
            inside = list(os.scandir(folders.pop()))
        except FileNotFoundError:
            continue
        except OSError:  # a locked folder
            return math.inf, math.inf
        for entry in inside:
            try:
                used += entry.stat(follow_symlinks=False).st_blocks * 512
                is_folder = entry.is_dir(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:  # a folder that can be listed and not entered
                return math.inf, math.inf
            if not is_folder:
                continue
            if len(entry.path) > PATH:
                return math.inf, math.inf
            folders.append(entry.path)
        entries += len(inside)
        if used > most or entries > ENTRIES:
            break
    return used, entries


def remove(folder: str) -> None:
    """Remove a folder in which no process works any more.

    Folders are moved to its top before they are emptied: they may be nested deeper than functions
    can recurse and paths can be long.
    """
    moved = 0
    name = os.path.join(folder, os.urandom(8).hex())  # the program could not take it
    folders = [folder]
    while folders:
        place = folders[-1]
        os.chmod(place, 0o700)
        inside = list(os.scandir(place))
        for entry in inside:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)  # a folder that is locked cannot be moved
            target = f"{name}-{moved}"
            moved += 1
            os.rename(entry.path, target)
            folders.append(target)
        if not inside:
            os.rmdir(place)
            folders.pop()


def _forget_requests() -> None:
    """Read what an ended program left in the pipe of requests, or wrote into it."""
    pipe = select.poll()
    pipe.register(REQUESTS, select.POLLIN)
    while dict(pipe.poll(0)).get(REQUESTS, 0) & select.POLLIN:
        os.read(REQUESTS, 1 << 16)


def _fork(folder: str, limits: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _child(folder, limits)
        sys.stdout.flush()
        status = 0
    except SystemExit as error:
        sys.stdout.flush()
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # whatever a script raises is the exit code 1
        status = 1
    finally:
        os._exit(status & 0xFF)
    return 0


def _wait(child: int, folder: str, limits: dict[str, Any]) -> str:
    """Wait until a child ends; end it when its folder is too large, or nobody waits for it."""
    watched = select.poll()
    watched.register(REQUESTS, 0)
    end = os.pidfd_open(child)
    watched.register(end, select.POLLIN)
    try:
        while True:
            events = dict(watched.poll(1000 * LOOK))
            if end in events:
                break
            if REQUESTS in events or is_full(folder, limits["disk"]):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "gone" if REQUESTS in events else "disk"
    finally:
        os.close(end)
    _, status = os.waitpid(child, 0)
    return how_it_ended(status)


def how_it_ended(status: int) -> str:
    """Return the name of the signal that ended a process, or its exit code."""
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return str(os.WEXITSTATUS(status))


def hide() -> None:
    """Let no other process read the memory of this one."""
    try:
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    except PermissionError:  # sandlock forbids it; Landlock then keeps children from the server
        if _landlock_version(_libc()) < 1:
            raise


def main(place: str) -> None:
    """Serve requests until the pipe closes.   place: a folder that can be written."""
    for name in WARM.split():
        __import__(name)
    hide()
    os.write(CONTROL, b"ready\n")
    count = 0
    while True:
        try:
            limits = read_frame(REQUESTS)
        except EOFError:
            return
        if "do" in limits:  # the end of a program that had ended by itself
            continue
        count += 1
        folder = os.path.join(place, str(count))
        os.mkdir(folder, 0o700)
        ended = _wait(_fork(folder, limits), folder, limits)
        _forget_requests()
        remove(folder)
        os.write(CONTROL, f"ended {ended}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
