"""What can be typed: the command `groupwise` (`commands.py`) and a file for each of its
subcommands, which calls the library.

In: arguments.  Out: text on the terminal and an exit code.  `commands` parses, `arguments` reads
values that several commands share, and every other module is one subcommand.  Nothing heavy is
imported before the command that needs it runs.
"""

from groupwise.cli.commands import main

__all__ = ["main"]
