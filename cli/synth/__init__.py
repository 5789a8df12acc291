"""`mallee synth`: analyse, generate, compare; `mallee trace`: convert.

Knows traces, models and, for replays, the mocker. Must not know servers.
"""
