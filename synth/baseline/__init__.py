"""The published method as the baseline: walks through the tree of shared blocks, everything else on its own.

Knows traces, their prefix tree and its own random streams. Must not know sessions' clocks: that the model
has none is what it is compared for.
"""
