"""Whether the servers that a recipe names are there, for `groupwise check`."""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.errors import GroupwiseError
from groupwise.models.policy import Policy
from groupwise.rollout.vllm.addresses import Addresses, Servers, addresses_of
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.member import ANSWER_SECONDS
from groupwise.rollout.vllm.published import VersionedServer
from groupwise.rollout.vllm.server_fitness import meet


@dataclass(frozen=True, slots=True)
class ServerState:
    """What one server, a list of them or a router answers."""

    good: bool
    text: str


def look_at_servers(servers: Servers, policy: Policy) -> list[ServerState]:
    """Ask every server that a recipe names whether it is there and can sample for a policy.

    The first state is that of the list: of the file, or of the router.
    """
    try:
        addresses = addresses_of(servers)
        urls = addresses.read()
    except GroupwiseError as error:
        return [ServerState(False, str(error))]
    states = [_look_at_list(addresses, servers, len(urls))]
    for url in urls:
        states.append(_look_at_one(Client(url), policy))
    return states


def _look_at_list(addresses: Addresses, servers: Servers, count: int) -> ServerState:
    named = f"{count} named"
    if addresses.router is not None:
        try:
            ready = addresses.router.is_ready()
        except GroupwiseError as error:
            return ServerState(False, str(error))
        if not ready:
            return ServerState(False, f"{addresses.router.name} has no healthy server")
        return ServerState(True, f"{addresses.router.name} is ready, {named}")
    if isinstance(servers, str):
        return ServerState(count > 0, f"{named} in {servers}, which is read again during a run")
    return ServerState(True, named)


def _look_at_one(client: Client, policy: Policy) -> ServerState:
    try:
        client.get("/health", timeout=ANSWER_SECONDS)
        facts = meet(client, policy)
        label = VersionedServer(client).version()
    except GroupwiseError as error:
        return ServerState(False, str(error))
    finally:
        client.close()
    text = (
        f"{client.name} decodes {facts['rows']} completions at a time, of up to"
        f" {facts['context']} tokens, in {facts['dtype']}; its weights are {label}"
    )
    return ServerState(True, text)
