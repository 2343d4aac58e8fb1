"""Who answers the policy: tools, conversations, and adapters to other people's environments.

In: what the policy wrote. Out: what the world says next. `calls` reads the tool calls in a completion, in the form of its family.
`conversation` is what an engine asks of a world: `Conversation`, `World`, `Reply`.

`endpoint` serves the policy over HTTP to harnesses that drive their own loop; `captured` makes episodes of what they ask for.
"""
