"""Graphs of calls: their nodes, what is checked before they run, and their runs as state machines.

Knows names, texts and clock values that it is given; must not know tokens, capsules' ids, HTTP or clients.
"""
