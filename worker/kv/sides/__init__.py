"""KV of layers that keep less than every token: blocks of a window, states of recurrent layers.

Knows nodes and pools. Must not know requests, or what a block holds.
"""
