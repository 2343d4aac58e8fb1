"""Programs that a model wrote run here, apart from this machine.

- `limits`: says how much a program may use.
- `isolation`: starts a process by bubblewrap or by sandlock.
- `runner`: is that process: it forks a child for each program, and takes its rights away.
- `server`: is the other end of its pipes.
- `workspace`, `workspace_runner`: the same for a sandbox whose folder stays from call to call.
- `tools`: Python and a shell in such a sandbox, as tools of a model.
- `agent_sandbox`, `agent_runner`: the same for an agent, which reaches one address.
- `attacks`: tries to break out, before any program of a model runs.
- `remote`: asks a service, or a function of the user, to run programs elsewhere.
- `sandlock_launcher`: is the process that sandlock watches its sandbox from.

Nothing here knows of tests, rewards or models.
"""
