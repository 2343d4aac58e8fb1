"""The vLLM engine: completions come from vLLM, which gets the policy's weights after every update.

`engine` asks servers through `client` and `request_pool`; `server` starts one in an environment of
its own; `weight_sync` sends weights; `colocated` runs vLLM in this process; `plugin` is what runs
on vLLM's side.
"""
