"""Small things that everyone uses: whole files, processes and threads, terminal text, secrets,
seconds by phase.

In: plain values. Out: plain values. Nothing here knows what a policy, a recipe or a run is.
"""
