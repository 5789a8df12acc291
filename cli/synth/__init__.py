"""`mallee synth`: analyse, generate, compare.

Knows traces, models and, for replays, the mocker. Must not know servers.
"""
