"""`groupwise install-vllm`: vLLM in an environment of its own."""

from __future__ import annotations

import argparse

EXAMPLES = (
    "groupwise install-vllm                 the CPU build into .venv-vllm",
    "groupwise install-vllm --gpu           the CUDA build",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument(
        "folder", nargs="?", default=".venv-vllm", metavar="FOLDER", help="default: .venv-vllm"
    )
    command.add_argument(
        "--gpu", action="store_true", help="vLLM's CUDA build instead of its CPU build"
    )


def run(options: argparse.Namespace) -> int:
    """Install, and say where it is."""
    from groupwise.rollout.vllm.server import ENVIRONMENT, FOLDER, install
    from groupwise.utils.files import expanded

    folder = expanded(options.folder)
    print(f"installing vLLM into {folder}: 2.5 GB, a few minutes", flush=True)
    install(folder, gpu=options.gpu)
    where = (
        "it is found there"
        if options.folder == FOLDER
        else f"say where it is: export {ENVIRONMENT}={folder.absolute()}"
    )
    print(f"done; {where}.  Next: groupwise train RECIPE rollout.engine=vllm")
    return 0
