"""`python -m groupwise` is the command `groupwise`."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the working folder: a file there must not stand in for a library's module

from groupwise.cli.commands import command

if __name__ == "__main__":
    command()
