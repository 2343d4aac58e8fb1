"""Small things that everyone uses: seconds by phase, the allocator, statistics.

In: plain values. Out: plain values. Nothing here knows what a policy, a recipe or a run is.
"""
