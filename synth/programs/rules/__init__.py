"""Programs made by rules, without a source: beams, depth-first search, UCT, swarms.

Knows lengths, widths and rates. Must not know traces.
"""
