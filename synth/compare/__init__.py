"""Comparison of two traces, gate by gate, with the noise to expect.

Knows analyses and models. Must not know replays: those come in through a Protocol.
"""
