"""Small things that everyone uses.

In: plain values.  Out: plain values.

- `files`: files and folders that are whole or are not there.
- `processes`, `process_main`: worker processes whose calls have deadlines; the two sides.
- `threads`, `event_loop`: work beside the main thread.
- `http`: the HTTP server that viewer and endpoint share.
- `imports`, `built_in`: what a recipe names by `module:NAME`, or by a short name.
- `terminal`, `json_text`: text made harmless for a terminal and the log, and for lines of JSON.
- `secrets`, `redaction`: what is secret, and recipes and command lines without it.
- `spelling`: words suggested.
- `statistics`, `clock`, `batching`, `cache`: intervals, seconds by phase, batches of a bounded
  size, the user's cache.

Nothing here knows what a policy, a recipe or a run is.
"""
