"""Run a command by sandlock: sandlock_launcher.py FOLDER PACKAGES READABLE COMMAND...

It is a process of its own, because sandlock watches what it starts from threads of its own.  It
removes the folder when the command has ended.
"""

import os
import shutil
import sys
from importlib import import_module


def main(folder: str, packages: str, readable: str, *command: str) -> int:
    """Run the command to its end.   packages: where sandlock is imported from."""
    sys.path.append(packages)
    sandbox = import_module("sandlock").Sandbox(
        fs_readable=[*readable.split(os.pathsep), "/dev", "/etc/ld.so.cache"],
        fs_writable=[folder, "/dev/null"],
        clean_env=True,
        max_processes=64,
        cwd=folder,
    )
    try:
        return int(sandbox.run_interactive(list(command)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
