"""`groupwise completion`: a script that completes commands, options, recipes, runs and keys in a shell."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

EXAMPLES = (
    'eval "$(groupwise completion bash)"                                 in ~/.bashrc; the same with zsh in ~/.zshrc',
    "groupwise completion fish > groupwise.fish                          in ~/.config/fish/completions",
)
SHELLS = ("bash", "zsh", "fish")
RUNS = ("eval", "check", "score", "chat", "view", "replay", "explain")
"""Commands that take a run."""
RECIPES = ("train", "check")
"""Commands that take a recipe and keys."""


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument("shell", choices=SHELLS, help="whose script to print")


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    print(script(options.shell), end="")
    return 0


def script(shell: str) -> str:
    """The completion of a shell, for the commands, recipes and keys of this version."""
    from groupwise.cli.commands import COMMANDS, parsers
    from groupwise.config.bundled import bundled_recipes
    from groupwise.config.schema import knobs

    _, found = parsers(list(COMMANDS))
    options = {name: _options(found[name]) for name in COMMANDS}
    words = {name: list(_words(name, bundled_recipes())) for name in COMMANDS}
    keys = [f"{key}=" for key in knobs() if ".N." not in key]
    return (_fish if shell == "fish" else _bash)(COMMANDS, options, words, keys, shell)


def _options(command: argparse.ArgumentParser) -> list[str]:
    return [text for action in command._actions for text in action.option_strings if text.startswith("--")]


def _words(name: str, recipes: Sequence[str] | dict) -> Sequence[str]:
    """What may stand as first word behind a command, files and runs left out."""
    if name == "recipes":
        return ["copy", "show", "import-trl", *recipes]
    if name == "completion":
        return SHELLS
    return list(recipes) if name in RECIPES else []


def _bash(
    commands: dict[str, str], options: dict[str, list[str]], words: dict[str, list[str]], keys: Sequence[str], shell: str
) -> str:
    cases = "\n".join(f'    {name}) options="{" ".join(options[name])}"; words="{" ".join(words[name])}" ;;' for name in commands)
    load = "autoload -Uz bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    compinit = "autoload -Uz compinit && compinit -u\n" if shell == "zsh" else ""
    return f"""\
# groupwise: completion for {shell}
{compinit}{load}_groupwise() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" options="" words=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(commands)}" -- "$current"))
    return
  fi
  case "$command" in
{cases}
  esac
  if [ "${{current#-}}" != "$current" ]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
    return
  fi
  case "$command" in
    config) COMPREPLY=($(compgen -W "{" ".join(key[:-1] for key in keys)}" -- "$current")); return ;;
    {"|".join(RECIPES)})
      if [ "$COMP_CWORD" -gt 2 ]; then
        COMPREPLY=($(compgen -W "{" ".join(keys)}" -- "$current"))
        [ "${{#COMPREPLY[@]}}" -eq 1 ] && compopt -o nospace 2>/dev/null
        return
      fi ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  local IFS=$'\\n'
  COMPREPLY+=($(compgen -f -- "$current"))
  compopt -o filenames 2>/dev/null
}}
complete -F _groupwise groupwise
"""


def _fish(
    commands: dict[str, str], options: dict[str, list[str]], words: dict[str, list[str]], keys: Sequence[str], shell: str
) -> str:
    lines = [f"# groupwise: completion for {shell}"]
    for name, text in commands.items():
        said = re.sub(r"(['\\])", r"\\\1", text)
        lines.append(f"complete -c groupwise -n __fish_use_subcommand -f -a {name} -d '{said}'")
        seen = f"'__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c groupwise -n {seen} -l {option[2:]}" for option in options[name]]
        if words[name]:
            lines.append(f"complete -c groupwise -n {seen} -a '{' '.join(words[name])}'")
        if name in RECIPES:
            lines.append(f"complete -c groupwise -n {seen} -a '{' '.join(keys)}'")
        if name == "config":
            lines.append(f"complete -c groupwise -n {seen} -f -a '{' '.join(key[:-1] for key in keys)}'")
    return "\n".join(lines) + "\n"
