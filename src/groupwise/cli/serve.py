"""`groupwise serve`: a model behind an address: by vLLM for runs that sample there, or for the
Tinker SDK.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from typing import NoReturn

from groupwise.cli import arguments as typed
from groupwise.errors import ConfigError
from groupwise.utils.files import expanded

EXAMPLES = (
    (
        "groupwise serve my/model --port 8001                  then: groupwise train ..."
        " rollout.engine='{name: vllm, servers: [...]}'"
    ),
    (
        "groupwise serve my/model -- --tensor-parallel-size 2  what stands behind -- goes to vLLM"
        " as it is"
    ),
    (
        "groupwise serve smollm2 --tinker                      a script with the Tinker SDK trains"
        " it"
    ),
)
LARGEST_RANK = 64
MODELS, CHECKPOINTS = 2, "tinker"
TOKEN = "GROUPWISE_TINKER_TOKEN"
"""Environment variable with the token that requests must bring."""


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument("model", metavar="MODEL", help="model folder, hub name, or `smollm2`")
    host = "anyone who can reach this address can replace the weights (default %(default)s)"
    command.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    command.add_argument(
        "--port", type=typed.port, default=8000, metavar="N", help="default %(default)s"
    )
    command.add_argument(
        "--rows",
        type=typed.positive,
        default=256,
        metavar="N",
        help="completions at the same time (default %(default)s)",
    )
    command.add_argument(
        "--dtype", metavar="TYPE", help="float32 or bfloat16 (default: the checkpoint's)"
    )
    command.add_argument(
        "--cache",
        metavar="SIZE",
        help="size of the KV cache, e.g. 4G (default: 512M on a CPU, vLLM's own on a GPU)",
    )
    command.add_argument(
        "--lora-rank",
        type=typed.positive,
        metavar="N",
        help=(
            "take adapters up to this rank alone, and not merged into all weights; with --tinker:"
            f" the largest rank that a client may ask for (default {LARGEST_RANK})"
        ),
    )
    command.add_argument(
        "--quantization",
        metavar="TYPE",
        help="have vLLM quantise the weights that it is given, e.g. fp8 (on a GPU)",
    )
    tinker = command.add_argument_group("for the Tinker SDK, without vLLM")
    tinker.add_argument(
        "--tinker",
        action="store_true",
        help="train, sample and save for scripts that use the Tinker SDK; no vLLM is started",
    )
    tinker.add_argument(
        "--full", action="store_true", help="train all weights, whatever rank a client names"
    )
    tinker.add_argument(
        "--models",
        type=typed.positive,
        metavar="N",
        help=f"models in training at the same time (default {MODELS})",
    )
    tinker.add_argument(
        "--checkpoints",
        metavar="FOLDER",
        help=f"where clients' checkpoints are saved (default {CHECKPOINTS})",
    )
    command.set_defaults(more=[])


def run(options: argparse.Namespace) -> int:
    """Become the server."""
    if not options.tinker:
        _check_vllm(options)
        _become_vllm(options)
    return _serve_tinker(options)


def _become_vllm(options: argparse.Namespace) -> NoReturn:
    """Become vLLM's server."""
    from groupwise.models.gguf import checkpoint_folder
    from groupwise.rollout.vllm.server import demand_servable, serve

    demand_servable(options.model)
    serve(
        # `launch` writes the recipe's path in quotes, in which no shell replaces ~.
        str(expanded(checkpoint_folder(options.model))),
        host=options.host,
        port=options.port,
        rows=options.rows,
        dtype=options.dtype,
        cache=options.cache,
        lora_rank=options.lora_rank or 0,
        quantization=options.quantization,
        more=options.more,
    )


def _serve_tinker(options: argparse.Namespace) -> int:
    """Serve the Tinker SDK until Ctrl-C."""
    from groupwise.tinker.server import TinkerServer
    from groupwise.tinker.service import TinkerService, TinkerSettings

    _check_tinker(options)
    settings = TinkerSettings(
        model=options.model,
        root=expanded(options.checkpoints or CHECKPOINTS),
        dtype=options.dtype or "float32",
        full=options.full,
        largest_rank=options.lora_rank or LARGEST_RANK,
        models=options.models or MODELS,
        rows=options.rows,
    )
    service = TinkerService(settings)
    token = os.environ.get(TOKEN, "")
    with TinkerServer(service, host=options.host, port=options.port, token=token) as server:
        key = "the value of " + TOKEN if token else "tml-anything"
        print(f"{service.name} trains for the Tinker SDK.  In the script's environment:")
        print(f"  TINKER_BASE_URL=http://{options.host}:{server.port}   TINKER_API_KEY={key}")
        print(f"Checkpoints: {settings.root}.  Ctrl-C ends the server.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600.0)
    return 0


def _check_vllm(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that belong to --tinker."""
    if options.full or options.models is not None or options.checkpoints is not None:
        raise ConfigError("--full, --models and --checkpoints are for --tinker: leave them out")


def _check_tinker(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that belong to vLLM."""
    if options.cache is not None or options.quantization is not None or options.more:
        raise ConfigError(
            "--cache, --quantization, and what stands behind --, are for vLLM: leave them out"
        )
    if options.dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"--dtype must be float32 or bfloat16, got {options.dtype!r}")
