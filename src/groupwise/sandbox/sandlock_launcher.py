"""Run a command by sandlock, with arguments FOLDER PACKAGES READABLE PROCESSES MEMORY COMMAND...

It is a process of its own, because sandlock watches what it starts from threads of its own.  It
removes the folder when the command has ended.
"""

import contextlib
import os
import shutil
import sys
from importlib import import_module


def main(
    folder: str, packages: str, readable: str, processes: str, memory: str, *command: str
) -> int:
    """Run the command to its end.   packages: where sandlock is imported from."""
    for lock in os.listdir("/proc/self/fd"):
        if int(lock) > 2:
            with contextlib.suppress(OSError):  # the listing's own, closed by now
                os.set_inheritable(int(lock), False)
    sys.path.append(packages)
    sandbox = import_module("sandlock").Sandbox(
        fs_readable=[*readable.split(os.pathsep), "/dev", "/etc/ld.so.cache"],
        fs_writable=[folder, "/dev/null"],
        clean_env=True,
        max_processes=int(processes),
        max_memory=int(memory) or None,
        cwd=folder,
    )
    try:
        return int(sandbox.run_interactive(list(command)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
