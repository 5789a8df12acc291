"""Analysis of a trace: lengths, arrivals, prefix tree, reuse over time, sessions and their hierarchy.

Knows `traces` and `figures`. Must not know models, generation or replays.
"""
