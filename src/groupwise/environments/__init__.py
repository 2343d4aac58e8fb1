"""Who answers the policy: tools, conversations, and adapters to other people's environments.

In: the policy's turn. Out: the environment's answer. `tool_calls` reads the tool calls in a
    completion, in the form of its family. `conversation` has the protocols between engine and
    environments: `Conversation`, `Environment`, `Reply`.

`endpoint` serves the policy over HTTP to harnesses that drive their own loop; `harness_episodes`
makes episodes of what they ask for.
"""
