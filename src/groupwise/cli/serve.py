"""`groupwise serve`: a model behind an address, by vLLM."""

from __future__ import annotations

import argparse

from groupwise.cli import arguments as typed

EXAMPLES = (
    (
        "groupwise serve my/model --port 8001                  then: groupwise train ..."
        " rollout.engine='{name: vllm, servers: [...]}'"
    ),
    (
        "groupwise serve my/model -- --tensor-parallel-size 2  what stands behind -- goes to vLLM"
        " as it is"
    ),
)


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
        default=0,
        metavar="N",
        help="take adapters up to this rank alone, and not merged into all weights",
    )
    command.set_defaults(more=[])


def run(options: argparse.Namespace) -> int:
    """Become the server."""
    from groupwise.models.gguf import checkpoint_folder
    from groupwise.rollout.vllm.server import demand_servable, serve
    from groupwise.utils.files import expanded

    demand_servable(options.model)
    serve(
        # `launch` writes the recipe's path in quotes, in which no shell replaces ~.
        str(expanded(checkpoint_folder(options.model))),
        host=options.host,
        port=options.port,
        rows=options.rows,
        dtype=options.dtype,
        cache=options.cache,
        lora_rank=options.lora_rank,
        more=options.more,
    )
