"""`groupwise serve`: a model behind an address, by vLLM or by our own engine."""

from __future__ import annotations

import argparse
import os
import time

from groupwise.cli import arguments as typed
from groupwise.errors import ConfigError
from groupwise.utils.secrets import TOKEN

EXAMPLES = (
    "groupwise serve my/model --port 8001                  then: groupwise train ... rollout.engine='{name: vllm, servers: [...]}'",
    "groupwise serve my/model -- --tensor-parallel-size 2  what stands behind -- goes to vLLM as it is",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument("model", metavar="MODEL", help="a model folder or a hub name: the model that will be trained")
    host = "whoever reaches it can replace its weights (default %(default)s)"
    native = "without vLLM: OpenAI's chat and vLLM's token ids, for agents and evaluations; other hosts need GROUPWISE_TOKEN"
    command.add_argument("--native", action="store_true", help=native)
    command.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    command.add_argument("--port", type=typed.port, default=8000, metavar="N", help="default %(default)s")
    command.add_argument(
        "--rows", type=typed.positive, default=256, metavar="N", help="completions at a time (default %(default)s)"
    )
    command.add_argument("--dtype", metavar="TYPE", help="float32 or bfloat16 (default: the checkpoint's)")
    command.add_argument("--cache", metavar="SIZE", help="keys and values, e.g. 4G (default: 512M on a CPU, vLLM's own on a GPU)")
    command.set_defaults(more=[])


def run(options: argparse.Namespace) -> int:
    """Become the server, or serve until Ctrl-C."""
    if not options.native:
        from groupwise.rollout.vllm.server import serve

        serve(
            options.model,
            host=options.host,
            port=options.port,
            rows=options.rows,
            dtype=options.dtype,
            cache=options.cache,
            more=options.more,
        )
    return _native(options)


def _native(options: argparse.Namespace) -> int:
    if options.cache is not None or options.more:
        raise ConfigError("--cache and arguments behind -- are vLLM's: leave them out with --native")
    from groupwise.api.loaded_policy import load_policy
    from groupwise.rollout.serving import Served

    token = os.environ.get(TOKEN) or None
    policy = load_policy(options.model, dtype=options.dtype)
    where = {"host": options.host, "port": options.port, "token": token}
    with Served(policy, name=options.model, rows=options.rows, variables=policy.variables, **where) as served:
        print(f"{served.base_url}  (Ctrl-C ends it)", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return 0
