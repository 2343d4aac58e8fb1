"""`groupwise view`: the run viewer in a browser, or one page to hand on."""

from __future__ import annotations

import argparse
import time
from functools import partial

from groupwise.cli import arguments as typed
from groupwise.errors import ConfigError

PORT = 8765
EXAMPLES = (
    (
        "groupwise view runs/demo/grpo                             in the browser, also during"
        " training"
    ),
    "groupwise view 'runs/mine-lr=1e-6-*' 'runs/mine-lr=3e-6-*'  two settings: means over seeds",
    "groupwise view runs/demo/grpo --export report.html        one self-contained page",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument(
        "paths",
        nargs="+",
        metavar="RUN",
        help="run folders, patterns in quotes for the seeds of a setting, or files of completions",
    )
    command.add_argument(
        "--export",
        metavar="FILE",
        help="write one self-contained page, for example report.html, and stop",
    )
    command.add_argument(
        "--port",
        type=partial(typed.port, least=0),
        metavar="N",
        help=f"default: {PORT}, or any that is free",
    )
    command.add_argument("--open", action="store_true", help="open a browser on this machine")
    command.epilog = (
        f"From another machine: ssh -L {PORT}:127.0.0.1:{PORT} HOST, and open the address there."
    )


def run(options: argparse.Namespace) -> int:
    """Export, or serve until Ctrl-C."""
    from groupwise.viewer.report import export
    from groupwise.viewer.server import serve

    if options.export is not None:
        print(export(options.paths, options.export))
        return 0
    try:
        viewer = serve(options.paths, PORT if options.port is None else options.port)
    except ConfigError:
        if options.port is not None:
            raise
        viewer = serve(options.paths, 0)
    print(f"{viewer.address}  (Ctrl-C ends it)", flush=True)
    if options.open:
        import webbrowser

        webbrowser.open(viewer.address)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return 0
    finally:
        viewer.close()
