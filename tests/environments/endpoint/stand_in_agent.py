"""A program that talks as Claude Code, Codex, OpenCode or mini-swe-agent does, by the name that it is started with.

It asks at the address that its variables or its home name, runs the shell commands that come back, and ends with a message
without one.  It imports the standard library alone.
"""

import json
import os
import pathlib
import subprocess
import sys
import urllib.error
import urllib.request

NAME = pathlib.Path(sys.argv[0]).name
HOME = pathlib.Path(os.environ["HOME"])
PROPERTIES = {"type": "object", "properties": {"command": {"type": "string"}}}


def post(url, key, body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        sys.exit(f"the model is not there: {error.read().decode()}")


def run(command):
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return ran.stdout + ran.stderr


def claude(prompt):
    arguments = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages?beta=true"
    tools = [{"name": name, "description": "Run.", "input_schema": PROPERTIES} for name in arguments["--tools"].split(",")]
    messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    body = {"model": arguments["--model"], "max_tokens": 32000, "system": arguments.get("--system-prompt", "I am Claude.")}
    while True:
        answer = post(url, os.environ["ANTHROPIC_API_KEY"], {**body, "messages": messages, "tools": tools})
        messages.append({"role": "assistant", "content": answer["content"]})
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        if not calls:
            return answer["content"][-1]["text"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": run(call["input"]["command"])} for call in calls]
        messages.append({"role": "user", "content": results})


def codex(prompt):
    settings = dict(line.split(" = ", 1) for line in (HOME / ".codex/config.toml").read_text().splitlines() if " = " in line)
    url = json.loads(settings["base_url"]) + "/responses"
    key = os.environ[json.loads(settings["env_key"])]
    tools = [{"type": "function", "name": "exec_command", "parameters": PROPERTIES, "strict": False}]
    tools.append({"type": "namespace", "name": "agents", "tools": []})
    system = "I am Codex."
    if "model_instructions_file" in settings:
        system = pathlib.Path(json.loads(settings["model_instructions_file"])).read_text()
    items = [{"role": "developer", "content": [{"type": "input_text", "text": system}]}, {"role": "user", "content": prompt}]
    while True:
        answer = post(url, key, {"model": "policy", "input": items, "tools": tools, "store": False})
        items += answer["output"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        if not calls:
            return answer["output"][-1]["content"][0]["text"]
        for call in calls:
            shown = run(json.loads(call["arguments"])["command"])
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": shown})


def chat(url, key, messages, tool):
    tools = [{"type": "function", "function": {"name": tool, "description": "Run.", "parameters": PROPERTIES}}]
    while True:
        answer = post(url + "/chat/completions", key, {"model": "policy", "messages": messages, "tools": tools})
        message = answer["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            shown = run(json.loads(call["function"]["arguments"])["command"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": shown})


def opencode(prompt):
    config = json.loads((HOME / ".config/opencode/opencode.json").read_text())
    options = config["provider"]["policy"]["options"]
    title = [{"role": "user", "content": f"A title for: {prompt}"}]
    post(options["baseURL"] + "/chat/completions", options["apiKey"], {"model": "policy", "messages": title})
    system = config["agent"]["build"].get("prompt", "I am OpenCode.")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
    return chat(options["baseURL"], options["apiKey"], messages, "bash")


def mini(prompt):
    agent = json.loads((HOME / "policy.yaml").read_text())["agent"]
    messages = [{"role": "system", "content": agent.get("system_template", "I am mini.")}, {"role": "user", "content": prompt}]
    return chat(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], messages, "bash")


def main():
    if sys.argv[-1] in ("--version", "--help"):
        print(f"{NAME} stand-in 1.2.3")
        return
    if NAME in ("claude", "codex"):
        prompt = sys.stdin.read()
    elif NAME == "opencode":
        prompt = sys.argv[-1]
    else:
        prompt = next(word.removeprefix("--task=") for word in sys.argv if word.startswith("--task="))
    print({"claude": claude, "codex": codex, "opencode": opencode, "mini": mini}[NAME](prompt))


if __name__ == "__main__":
    main()
