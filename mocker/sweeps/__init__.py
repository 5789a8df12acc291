"""Many replays: in several processes at once, and over fleets, to find those that none dominates.

Knows `mocker.replay`. Must not know engines, routers or figures.
"""
