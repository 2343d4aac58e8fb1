"""`python -m groupwise` is the command `groupwise`."""

from groupwise.cli import command

if __name__ == "__main__":
    command()
