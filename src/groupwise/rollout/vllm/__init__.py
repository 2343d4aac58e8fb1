"""The vLLM engine: completions come from vLLM, which gets the policy's weights after every update.

- `engine`: implements `rollout.engine.Engine` by servers, or by vLLM in this process.
- `addresses`: where the servers are: a list, a file that is read again, or a vllm-router.
- `pool`, `member`: the servers that are there, their versions, and who gets a request.
- `request`, `request_pool`: a request on its way, and those of one call of `generate`.
- `client`: one connection to a server.
- `server`: starts a server in an environment of its own.
- `weight_ranges`, `publisher`, `version_server`: which weights a process holds, versions of them in
  a folder, and its files by HTTP.
- `published`: a version of the weights, and a server that is brought to it.
- `delivery`: from an updated policy to a version that servers can fetch.
- `server_fitness`: whether a server can sample for a policy.
- `colocated`: runs vLLM in this process.
- `images`: what a request says of a prompt's images.
- `scoring`: log-probs of given tokens, for a teacher on servers.
- `plugin`: what runs on vLLM's side; it imports nothing of this library.

New weights reach a server in six steps.  `engine.VllmEngine.send_weights` hands them to
`delivery`, which has `publisher` write a version; `pool` tells each server; the server fetches the
version by HTTP or from the folder, checks it, and loads it (`plugin/groupwise_versions`).
"""
