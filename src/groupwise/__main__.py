"""`python -m groupwise` is the command `groupwise`."""

from groupwise.cli.commands import command

if __name__ == "__main__":
    command()
