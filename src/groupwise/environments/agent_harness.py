"""A harness that starts an agent of a preset for each episode, in a sandbox, and hands its files to
the rewards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from groupwise.environments.agents import (
    PRESETS,
    AgentArgs,
    AgentStart,
    AgentTask,
    prompt_in,
    version_in,
)
from groupwise.environments.harness import (
    Ending,
    EpisodeRequest,
    ForkedPrograms,
    HarnessRun,
)
from groupwise.environments.programs import run_agent
from groupwise.sandbox.agent_sandbox import AgentSandbox, AgentSandboxSettings, search_path
from groupwise.sandbox.server import LIMITS
from groupwise.sandbox.tools import folder_files
from groupwise.utils import threads
from groupwise.utils.processes import WorkerProcess

PREFIX = "groupwise-agent-"
"""The beginning of the names of folders of agents without isolation."""
FAILED = 1500
"""Characters of what an agent printed last that a failure shows."""


class AgentHarness:
    """Runs an agent of a preset.

    The row's `files` lie in the agent's working folder.  Rewards see what became of them, as with
    the tools `python` and `shell`, and what the agent printed: `environments[i].files` and
    `.output`.
    """

    def __init__(self, agent: str, args: Mapping[str, Any], sandbox: Mapping[str, Any]) -> None:
        """Find the program, and prove its sandbox.   sandbox: the recipe's keys.

        Raises ConfigError for a wrong argument, a program that is not there, and where no isolation
        holds.
        """
        self.agent, self.args = agent, AgentArgs.read(agent, args)
        settings = AgentSandboxSettings.read(sandbox)
        self.program = self.args.found(agent)
        self._sandbox = AgentSandbox(settings.proved(), settings.limits(), self.program)
        self._programs = ForkedPrograms(run_agent)

    def start(self, request: EpisodeRequest) -> HarnessRun:
        """Start the agent and wait for its end in a thread."""
        fork = self._programs.fork()
        return HarnessRun(
            threads.begin(lambda: self._play(request, fork), f"agent-{request.id}"), fork.kill
        )

    def version(self) -> str:
        """Return the version that the program says it has.  Raises EnvironmentFailure."""
        start = AgentStart(arguments=PRESETS[self.agent].version, variables={})
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            answer = self._run(self._programs.fork(), Path(folder), start, {}, None)
        return version_in(answer["output"] + answer["errors"])

    def close(self) -> None:
        """Kill every agent that runs."""
        self._programs.close()

    def _play(self, request: EpisodeRequest, fork: WorkerProcess) -> Ending:
        files = folder_files(request.row.get("files") or {})
        address = urlsplit(request.base_url)
        base_url = request.base_url
        if self._sandbox.isolation is not None:
            base_url = f"http://127.0.0.1:{address.port}{address.path}"
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            task = AgentTask(
                prompt=prompt_in(request.row, self.args.prompt),
                base_url=base_url,
                api_key=request.api_key,
                model=request.model,
                home=f"{self._sandbox.root(Path(folder))}/home",
                args=self.args,
            )
            start = PRESETS[self.agent].begin(task)
            place = (str(address.hostname), address.port or 80)
            answer = self._run(fork, Path(folder), start, files, place)
        return self._ending(answer)

    def _run(
        self,
        fork: WorkerProcess,
        folder: Path,
        start: AgentStart,
        files: Mapping[str, str],
        address: tuple[str, int] | None,
    ) -> Mapping[str, Any]:
        """Run the program to its end.   address: of the endpoint; None: it needs none."""
        root = self._sandbox.root(folder)
        variables = {"PATH": search_path(self.program), "HOME": f"{root}/home", "LANG": "C.UTF-8"}
        isolated = self._sandbox.isolation is not None
        request = {
            "root": root,
            "home": dict(start.home),
            "files": dict(files),
            "command": [self.program, *start.arguments],
            "variables": variables | dict(start.variables) | dict(self.args.variables),
            "text": start.text,
            "limits": self._sandbox.limits.as_json(),
            "port": address[1] if isolated and address is not None else 0,
        }
        return self._programs.call(fork, self._sandbox.command(folder), request, address)

    def _ending(self, answer: Mapping[str, Any]) -> Ending:
        """Return what the rewards see.  An agent that a limit has ended is judged by its files."""
        output = answer["output"]
        stopped = answer["stopped"]
        if stopped:
            output += f"\n[stopped: {LIMITS.get(stopped, f'too many {stopped}')}]"
        failure = ""
        if answer["status"] != 0 and not stopped:
            printed = (answer["errors"].strip() or output.strip())[-FAILED:]
            failure = f"{self.agent} ended with status {answer['status']}: {printed}"
        return Ending(state={"files": answer["files"], "output": output}, failure=failure)
