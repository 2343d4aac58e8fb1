"""`groupwise completion`: what a shell completes behind `groupwise`.

The script holds all words: a completion starts no Python.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

EXAMPLES = (
    'eval "$(groupwise completion bash)"                in ~/.bashrc; zsh: in ~/.zshrc',
    "groupwise completion fish > ~/.config/fish/completions/groupwise.fish",
)
SHELLS = ("bash", "zsh", "fish")


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument("shell", choices=SHELLS, help="the shell to complete for")


@dataclass(frozen=True)
class Words:
    """What may stand behind a command.

    options: such as --dry-run.  recipes: whether it takes a recipe and keys of it.
    shown: the sentence of its help.
    """

    options: tuple[str, ...]
    recipes: bool
    shown: str


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    from groupwise.config.bundled import bundled_recipes
    from groupwise.config.schema import knobs

    words = words_by_command()
    recipes = sorted(bundled_recipes())
    keys = [f"{key}=" for key in knobs() if ".N." not in key]
    if options.shell == "fish":
        print(_fish(words, recipes, keys), end="")
    else:
        print(_bash(words, recipes, keys, zsh=options.shell == "zsh"), end="")
    return 0


def words_by_command() -> dict[str, Words]:
    """Return what may stand behind each command, as its parser has it."""
    from groupwise.cli.commands import COMMANDS, parsers

    _, commands = parsers(list(COMMANDS))
    found = {}
    for name, command in commands.items():
        options: list[str] = []
        positional = set()
        for action in command._actions:
            options += [text for text in action.option_strings if text.startswith("--")]
            positional.add(action.dest)
        recipes = "recipe" in positional and "overrides" in positional
        found[name] = Words(tuple(options), recipes, COMMANDS[name])
    return found


def _bash(words: dict[str, Words], recipes: list[str], keys: list[str], *, zsh: bool) -> str:
    """Return the script for bash, which zsh reads too."""
    lines = ["autoload -U +X bashcompinit && bashcompinit"] if zsh else []
    lines += [
        "_groupwise() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" words="" key=""',
        "  COMPREPLY=()",
        "  if [ $COMP_CWORD -eq 1 ]; then",
        f'    COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word"))',
        "    return",
        "  fi",
        '  case "${COMP_WORDS[1]}" in',
    ]
    for name, about in words.items():
        known = list(about.options)
        if about.recipes:
            known += [*recipes, *keys]
        if name == "config":
            known += [key.removesuffix("=") for key in keys]
        if name == "completion":
            known += SHELLS
        lines.append(f'    {name}) words="{" ".join(known)}" ;;')
    lines += [
        "  esac",
        # bash splits KEY=VALUE at the equals sign; zsh does not, and wants it back whole.
        '  if [[ "$word" == "=" ]]; then',
        '    word="" words=""',
        '  elif [[ "${COMP_WORDS[COMP_CWORD-1]}" == "=" ]]; then',
        '    words=""',
        '  elif [[ "$word" == *=* ]]; then',
        '    key="${word%%=*}=" word="${word#*=}" words=""',
        "  fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "  if [ ${#COMPREPLY[@]} -eq 0 ]; then",
        "    local IFS=$'\\n'",
        "    compopt -o filenames 2>/dev/null",
        '    COMPREPLY=($(compgen -P "$key" -f -- "$word"))',
        # A key is followed by its value, without a blank.
        '  elif [ ${#COMPREPLY[@]} -eq 1 ] && [[ "${COMPREPLY[0]}" == *= ]]; then',
        "    compopt -o nospace 2>/dev/null",
        "  fi",
        "}",
        "complete -F _groupwise groupwise",
    ]
    return "\n".join(lines) + "\n"


def _fish(words: dict[str, Words], recipes: list[str], keys: list[str]) -> str:
    """Return the script for fish."""
    lines = []
    for name, about in words.items():
        shown = about.shown.replace("'", "")
        first = "complete -c groupwise -n __fish_use_subcommand"
        lines.append(f"{first} -f -a {name} -d '{shown}'")
        behind = f"complete -c groupwise -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{behind} -l {option.removeprefix('--')}" for option in about.options]
        if about.recipes:
            lines.append(f"{behind} -a '{' '.join([*recipes, *keys])}'")
        if name == "config":
            lines.append(f"{behind} -f -a '{' '.join(key.removesuffix('=') for key in keys)}'")
    return "\n".join(lines) + "\n"
