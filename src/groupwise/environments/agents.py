"""Presets of agents that others wrote: how each is started against an episode's address.

A preset is a row of `PRESETS`: the program, how it is installed, and a function from the episode to
arguments, variables and the files of a private home.  `agent_harness` runs it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from groupwise.errors import ConfigError, EnvironmentFailure
from groupwise.utils.spelling import nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTask:
    """An episode as a preset sees it."""

    prompt: str
    base_url: str
    """The address as OpenAI's clients take it, with `/v1`."""
    api_key: str
    model: str
    home: str
    """The folder of the private home, as the agent sees it."""
    args: AgentArgs


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentStart:
    """How an agent is started."""

    arguments: Sequence[str]
    variables: Mapping[str, str]
    home: Mapping[str, str] = field(default_factory=dict)
    """Files of the home, text by path."""
    text: str = ""
    """Standard input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One agent."""

    program: str
    install: str
    """The command that installs it."""
    begin: Callable[[AgentTask], AgentStart]
    version: tuple[str, ...] = ("--version",)
    """Arguments for which it prints its version."""
    knows: tuple[str, ...] = ()
    """Keys of `AgentArgs` that not every agent has."""


def _claude_code(task: AgentTask) -> AgentStart:
    args = task.args
    arguments = ["-p", "--model", task.model, "--dangerously-skip-permissions", *args.flags]
    arguments += ["--tools", ",".join(args.tools or ("Bash",))]
    if args.system is not None:
        arguments += ["--system-prompt", args.system]
    variables = {
        "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": task.api_key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",  # without it root may not skip permissions
    }
    return AgentStart(arguments=arguments, variables=variables, text=task.prompt)


CODEX_WITHOUT = (
    "apps",
    "goals",
    "image_generation",
    "multi_agent",
    "plugins",
    "shell_snapshot",
    "skill_search",
    "tool_suggest",
    "view_image",
)
"""Features of Codex that add tools or instructions and that no episode needs."""


def _codex(task: AgentTask) -> AgentStart:
    lines = [
        f"model = {json.dumps(task.model)}",
        'model_provider = "policy"',
        'web_search = "disabled"',
        "check_for_update_on_startup = false",
        "analytics.enabled = false",
        "feedback.enabled = false",
        'approval_policy = "never"',
        'sandbox_mode = "danger-full-access"',
    ]
    home: dict[str, str] = {}
    if task.args.system is not None:
        home[".codex/instructions.md"] = task.args.system
        place = json.dumps(f"{task.home}/.codex/instructions.md")
        lines.append(f"model_instructions_file = {place}")
    lines += ["[model_providers.policy]", 'name = "policy"', 'wire_api = "responses"']
    lines += [f"base_url = {json.dumps(task.base_url)}", 'env_key = "EPISODE_KEY"']
    lines += ["request_max_retries = 0", "stream_max_retries = 0", "[features]"]
    for feature in CODEX_WITHOUT:
        lines.append(f"{feature} = false")
    home[".codex/config.toml"] = "\n".join(lines) + "\n"
    arguments = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    arguments += [*task.args.flags, "-"]
    variables = {"CODEX_HOME": f"{task.home}/.codex", "EPISODE_KEY": task.api_key}
    return AgentStart(arguments=arguments, variables=variables, home=home, text=task.prompt)


def _opencode(task: AgentTask) -> AgentStart:
    options = {"baseURL": task.base_url, "apiKey": task.api_key}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "policy",
        "options": options,
        "models": {task.model: {"name": task.model}},
    }
    tools: dict[str, bool] = {"*": False}
    for name in task.args.tools or ("bash",):
        tools[name] = True
    build: dict[str, Any] = {"tools": tools}
    if task.args.system is not None:
        build["prompt"] = task.args.system
    config = {
        "provider": {"policy": provider},
        "model": f"policy/{task.model}",
        "permission": {"*": "allow"},
        "autoupdate": False,
        "share": "disabled",
        "agent": {"build": build},
    }
    variables = {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    }
    home = {".config/opencode/opencode.json": json.dumps(config)}
    arguments = ["run", *task.args.flags, "--", task.prompt]
    return AgentStart(arguments=arguments, variables=variables, home=home)


LIGHT_CLIENT = '''\
"""A model class for mini-swe-agent: chat completions at OPENAI_BASE_URL, without LiteLLM."""

import json
import os

import requests
from minisweagent.models.openrouter_model import OpenRouterModel


class Model(OpenRouterModel):
    def _query(self, messages, **kwargs):
        from minisweagent.models.utils.actions_toolcall import BASH_TOOL

        body = {"model": self.config.model_name, "messages": messages, "tools": [BASH_TOOL]}
        body |= self.config.model_kwargs | kwargs
        body.pop("drop_params", None)  # it is LiteLLM's
        answer = requests.post(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
            json=body,
        )
        answer.raise_for_status()
        return answer.json()
'''


def _mini_swe(task: AgentTask) -> AgentStart:
    own: dict[str, Any] = {"agent": {"mode": "yolo", "cost_limit": 0.0, "confirm_exit": False}}
    if task.args.system is not None:
        own["agent"]["system_template"] = f"{{% raw %}}{task.args.system}{{% endraw %}}"
        own["agent"]["instance_template"] = "{{task}}"
    arguments = [f"--task={task.prompt}", "--yolo", "--exit-immediately", "-c", "mini.yaml"]
    arguments += ["-c", f"{task.home}/policy.yaml", "-o", f"{task.home}/trajectory.json"]
    arguments += task.args.flags
    home = {"policy.yaml": json.dumps(own)}  # JSON is YAML
    if task.args.light:
        home["policy_client.py"] = LIGHT_CLIENT
        arguments += ["--model", task.model, "--model-class", "policy_client.Model"]
    else:
        arguments += ["--model", f"openai/{task.model}"]
    variables = {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_BASE": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "PYTHONPATH": task.home,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_GLOBAL_CONFIG_DIR": task.home,
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return AgentStart(arguments=arguments, variables=variables, home=home)


PRESETS: Mapping[str, Preset] = {
    "claude-code": Preset(
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        begin=_claude_code,
        knows=("tools",),
    ),
    "codex": Preset(program="codex", install="npm install -g @openai/codex", begin=_codex),
    "opencode": Preset(
        program="opencode",
        install="npm install -g opencode-ai",
        begin=_opencode,
        knows=("tools",),
    ),
    "mini-swe": Preset(
        program="mini",
        install="pip install mini-swe-agent",
        begin=_mini_swe,
        version=("--help",),
        knows=("light",),
    ),
}


@dataclass(frozen=True, kw_only=True)
class AgentArgs:
    """What `environment.args` may say of an agent."""

    program: str = ""
    """Name or path of the program; empty: the preset's name, on the search path."""
    prompt: str = "prompt"
    """The column that holds the prompt."""
    system: str | None = None
    """Instructions in place of the agent's own, which are long."""
    tools: tuple[str, ...] = ()
    """The tools of Claude Code or OpenCode that the policy sees; empty: a shell."""
    light: bool = False
    """mini-swe-agent asks without LiteLLM, whose import takes seconds in each episode."""
    flags: tuple[str, ...] = ()
    """Further arguments of the program."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further variables."""

    @classmethod
    def read(cls, agent: str, keys: Mapping[str, Any]) -> AgentArgs:
        """Return the arguments of a recipe.  Raises ConfigError for a wrong key or value."""
        at, values = "environment.args", dict(keys)
        known = [one.name for one in fields(cls) if one.name not in ("tools", "light")]
        known += PRESETS[agent].knows
        for key, value in values.items():
            if key not in known:
                near = nearest(key, known)
                hint = "" if near is None else f" (did you mean {near}?)"
                raise ConfigError(f"{at}: {agent} has no {key!r}{hint}; it has {', '.join(known)}")
            if key in ("tools", "flags"):
                if not isinstance(value, list | tuple) or not all(
                    isinstance(v, str) for v in value
                ):
                    raise ConfigError(f"{at}.{key} must be a list of words, got {value!r}")
                values[key] = tuple(value)
            elif key == "variables":
                if not isinstance(value, Mapping):
                    raise ConfigError(f"{at}.{key} must be names with values, got {value!r}")
                values[key] = {str(name): str(one) for name, one in value.items()}
            elif key == "light":
                if not isinstance(value, bool):
                    raise ConfigError(f"{at}.{key} must be true or false, got {value!r}")
            elif not isinstance(value, str):
                raise ConfigError(f"{at}.{key} must be a text, got {value!r}")
        return cls(**values)

    def found(self, agent: str) -> str:
        """Return the path of the agent's program.  Raises ConfigError where there is none."""
        preset = PRESETS[agent]
        named = self.program or preset.program
        path = shutil.which(named)
        if path is None:
            raise ConfigError(
                f"environment.agent: the program {named!r} of {agent} is not there; install it"
                f" ({preset.install}), or say where it is: environment.args: {{program: PATH}}"
            )
        return path


def prompt_in(row: Mapping[str, Any], column: str) -> str:
    """Return the text that an agent is asked with: a text, or the last message of a conversation.

    Raises EnvironmentFailure for a row without one.

    >>> prompt_in({"prompt": [{"role": "user", "content": "Repair it."}]}, "prompt")
    'Repair it.'
    """
    value = row.get(column)
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        value = value[-1].get("content")
    if not isinstance(value, str):
        raise EnvironmentFailure(f"the row's column {column!r} holds no prompt: {value!r:.60}")
    return value


def version_in(printed: str) -> str:
    """Return the first version number in what a program prints.

    >>> version_in("codex-cli 0.171.0")
    '0.171.0'
    """
    number = re.search(r"\d+\.\d+(\.\d+)*", printed)
    return number[0] if number else "of an unknown version"
