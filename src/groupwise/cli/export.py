"""`groupwise export`: the final model of a run as a GGUF file, with Ollama's Modelfile."""

from __future__ import annotations

import argparse

EXAMPLES = (
    "groupwise export runs/mine --gguf q8_0                   runs/mine/gguf-q8_0/mine.gguf",
    "groupwise export runs/mine --gguf f16 --out mine.gguf    into this folder",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument("run_folder", metavar="RUN", help="the folder of a finished run")
    command.add_argument(
        "--gguf",
        required=True,
        metavar="TYPE",
        help="write a GGUF file whose matrices are f32, f16, bf16, q8_0 or q4_0",
    )
    command.add_argument(
        "--out",
        metavar="FILE",
        help="the file; Ollama's Modelfile is written beside it (default RUN/gguf-TYPE/NAME.gguf)",
    )


def run(options: argparse.Namespace) -> int:
    """Write the file, and print its path and how Ollama takes it."""
    from groupwise.api.export import export_gguf

    file = export_gguf(options.run_folder, options.gguf, options.out)
    print(f"{file} ({file.stat().st_size / 1e6:,.0f} MB)")
    print(f"ollama create {file.stem} -f {file.with_name('Modelfile')}")
    return 0
