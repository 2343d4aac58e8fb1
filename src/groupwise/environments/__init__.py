"""Who answers the policy: tools, conversations, and adapters to other people's environments.

In: the policy's turn.  Out: the environment's answer.

- `conversation`: the stream of a completion, and the protocols between engine and environment.
- `tool_episodes`: episodes with tools and environments, and their limits.
- `tool_calls`: reads the tool calls in a completion, in the form of its family.
- `schemas`: tools as the policy sees them.
- `runtime`, `instance`: run tools and environments in processes or threads; the two sides.
- `chat_codec`: chat messages to token ids and back.
- `endpoint`, `requests`: serve the policy over HTTP to programs that drive their own loop.
- `messages_api`, `responses_api`: the forms of Anthropic's and of OpenAI's newer API there.
- `harness`, `harness_episodes`, `programs`: agents, their episodes, and how they are started.
- `agents`, `agent_harness`: presets of agents that others wrote, and what runs them.
- `openenv`, `verifiers`, `procedural`, `playground`: adapters, and two built-in environments.

Nothing here knows rewards, training or an engine's inside.
"""
