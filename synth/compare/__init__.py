"""How alike two traces are, gate by gate, with the noise that a reader should expect.

Knows analyses and models. Must not know replays: those come in through a Protocol.
"""
