"""Graphs of calls, run at the client: built, carried out over the SDK's own calls, and shown.

Knows nodes, capsules and streams of branches; the clients load it when a graph is run.
"""
