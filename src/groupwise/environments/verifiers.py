"""Tasksets of verifiers (its v1 interface, 0.4.0) by name: verifiers plays and scores the episodes,
the endpoint writes the turns.

Its own harnesses start a process for each rollout; here a harness in this process asks for the
turns, unless the recipe names another one.  That harness has no tools of its own: tasksets that
bring MCP servers need one of verifiers' (`agent.harness.id`).

Needs the extra `verifiers`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.environments.harness import Ending, EpisodeRequest, HarnessRun, LoopHarness
from groupwise.errors import ConfigError, EnvironmentFailure

CHAT = "groupwise_chat"
"""The id of our harness, among verifiers' plug-ins."""
KEY = "GROUPWISE_EPISODE_KEY"
"""Environment variable that verifiers looks for a key in; there is none, because an episode is told
by its model's name.
"""
ROWS = 1_000
"""Tasks that are read of a taskset without end."""
START = 120.0
"""Seconds in which verifiers has to come up."""


class VerifiersHarness(LoopHarness):
    """One environment of verifiers, and an event loop on which its episodes are played."""

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        """name: of an installed taskset.   settings: what verifiers' `[env]` holds beside it:
        `taskset`, `agent`, `timeout` ...

        Raises ConfigError if verifiers is not here, or refuses the name or the settings.
        """
        vf = _library()
        settings = dict(settings or {})
        data = settings | {"taskset": {**settings.get("taskset", {}), "id": name}}
        try:
            roles = _roles(name, str(settings.get("id", "")))
            for role in roles:
                ours = {"harness": {"id": CHAT}, "runtime": {"type": "subprocess"}}
                data[role] = ours | dict(settings.get(role, {}))
            self.environment = vf.load_environment(vf.resolve_env_config(data))
        except Exception as error:  # somebody else's code, from import to validation
            raise ConfigError(
                f"environment.verifiers {name!r}: {type(error).__name__}: {str(error)[:500]}"
            ) from error
        if len(roles) > 1:
            raise ConfigError(
                f"environment.verifiers {name!r} has several agents ({', '.join(roles)}), whose"
                " rewards would be one reward: only an environment of one agent can be trained in"
            )
        super().__init__("verifiers", self.environment.serving, seconds=START)
        self.name = name
        self._tasks: list[Any] = []

    def rows(self, limit: int | None = None) -> list[dict[str, Any]]:
        """A row for each task: its prompt, and in the column `task` its number.  Raises ConfigError
        for a taskset that fails.
        """
        taskset = self.environment.taskset
        most = limit if limit is not None else None if taskset.bounded else ROWS
        try:
            self._tasks = list(itertools.islice(iter(taskset), most))
        except Exception as error:  # somebody else's code
            raise ConfigError(
                f"environment.verifiers {self.name!r}: its tasks cannot be read: {error}"
            ) from error
        return [
            {"prompt": task.data.prompt_text or self.name, "task": place}
            for place, task in enumerate(self._tasks)
        ]

    def start(self, request: EpisodeRequest) -> HarnessRun:
        """Play the task of the row on the event loop.  Raises ValueError for a row of another
        taskset.
        """
        place = request.row.get("task")
        if not isinstance(place, int) or not 0 <= place < len(self._tasks):
            raise ValueError(
                f"the column task holds {place!r}: the rows must be those of the taskset, which has"
                f" {len(self._tasks)}"
            )
        return self.play(self._ending(self._tasks[place], request))

    async def _ending(self, task: Any, request: EpisodeRequest) -> Ending:
        vf = _library()
        from verifiers.v1.configs.client import EvalClientConfig  # pyright: ignore

        root = request.base_url[: request.base_url.index("/episodes/")]
        client = EvalClientConfig(base_url=f"{root}/v1", api_key_var=KEY)
        # verifiers keeps one client for each address, so all episodes share one and are told apart
        # by their model's name.
        context = vf.ModelContext(model=request.id, client=client)
        (slot,) = self.environment.slots(task)
        return worth(await self.environment.run_slot(slot, context))


def worth(episode: Any) -> Ending:
    """Return the reward of an episode of verifiers: the mean over its traces that are trained.

    Raises EnvironmentFailure for an episode that failed.
    """
    if not episode.ok:
        errors = list(episode.errors)
        for trace in episode.traces:
            errors += trace.errors
        if not errors:
            raise EnvironmentFailure("verifiers gives no reason")
        raise EnvironmentFailure(f"{errors[-1].type}: {errors[-1].message}")
    rewards = [float(trace.reward) for trace in episode.traces if trace.agent.trainable]
    if not rewards:
        return Ending()
    return Ending(sum(rewards) / len(rewards))


def _roles(name: str, environment: str) -> list[str]:
    """Return the names of the agents of a taskset's environment."""
    from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.loaders import env_config_type  # pyright: ignore[reportMissingImports]

    return [
        role
        for role, field in env_config_type(name, environment).model_fields.items()
        if isinstance(field.default, AgentConfig)
    ]


def _library() -> Any:
    """verifiers, with our harness among its plug-ins.  Raises ConfigError if it is not here."""
    try:
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"environment.verifiers needs a package: pip install verifiers==0.4.0 ({error})"
        ) from error
    if CHAT not in sys.modules:
        sys.modules[CHAT] = _plugin(vf)
    return vf


def _plugin(vf: Any) -> Any:
    """A module that exports our harness, as verifiers looks for it."""
    from types import ModuleType

    import httpx
    from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
    from verifiers.v1.runtimes import ProgramResult  # pyright: ignore[reportMissingImports]

    class EndpointHarness(vf.Harness[vf.HarnessConfig]):
        """Asks for one turn behind the messages so far; a task whose user continues is resumed."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            """One request to the endpoint that verifiers holds between us."""
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            messages += (
                [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else _wired(prompt or (), message_to_wire)
            )
            body = {"model": ctx.model, "messages": messages}
            async with httpx.AsyncClient(
                timeout=None, trust_env=False, verify=False
            ) as client:  # plain HTTP to this machine
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    json=body,
                    headers={"Authorization": f"Bearer {secret}"},
                )
            if answer.status_code != 200:
                return ProgramResult(
                    exit_code=1, stdout="", stderr=f"{answer.status_code}: {answer.text[:2000]}"
                )
            return ProgramResult(exit_code=0, stdout="", stderr="")

    module = ModuleType(CHAT)
    vars(module).update(EndpointHarness=EndpointHarness, __all__=["EndpointHarness"])
    return module


def _wired(messages: Sequence[Any], message_to_wire: Callable[[Any], Any]) -> list[Any]:
    return [message_to_wire(message) for message in messages]
