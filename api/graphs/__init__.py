"""Graphs of calls over HTTP: read, run on the gateway that took them, and followed by their clients.

Knows bodies, plans and the gateway; the rules of a run are `mallee.graphs`'. Must not know workers.
"""
