"""The vLLM engine: completions come from vLLM, which gets the policy's weights after every update.

- `engine`: implements `rollout.engine.Engine` by servers, or by vLLM in this process.
- `client`, `request_pool`: one request to a server, and several at a time.
- `server`: starts a server in an environment of its own.
- `weight_ranges`, `publisher`, `version_server`: which weights a process holds, versions of them in
  a folder, and its files by HTTP.
- `published`: a version of the weights, and a server that is brought to it.
- `delivery`: from an updated policy to servers that sample with it.
- `weight_sync`: whether servers can sample for a policy, and all of them at once.
- `colocated`: runs vLLM in this process.
- `scoring`: log-probs of given tokens, for a teacher on servers.
- `plugin`: what runs on vLLM's side; it imports nothing of this library.
"""
