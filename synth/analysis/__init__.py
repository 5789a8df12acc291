"""What a trace is like: lengths, arrivals, its prefix tree, reuse over time, sessions and their hierarchy.

Knows `traces` and `figures`. Must not know models, generation or replays.
"""
