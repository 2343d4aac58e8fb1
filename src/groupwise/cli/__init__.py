"""What can be typed: the command `groupwise` and its subcommands, with a file for each that does more than call the library.

In: arguments. Out: text on the terminal and an exit code. Nothing heavy is imported before the command that needs it runs.
"""

from groupwise.cli.commands import main

__all__ = ["main"]
