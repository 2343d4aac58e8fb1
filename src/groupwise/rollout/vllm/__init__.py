"""The vLLM engine: completions come from vLLM, which gets the policy's weights after every update.

- `engine`: implements `rollout.engine.Engine` by servers, or by vLLM in this process.
- `client`, `request_pool`: one request to a server, and several at a time.
- `server`: starts a server in an environment of its own.
- `published`: a version of the weights, and how a server is brought to it.
- `weight_sync`: sends weights to servers.
- `colocated`: runs vLLM in this process.
- `scoring`: log-probs of given tokens, for a teacher on servers.
- `plugin`: what runs on vLLM's side; it imports nothing of this library.
"""
