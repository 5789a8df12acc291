"""Graphs of calls from the client's side: they are built, followed as they run, and their tools carried out.

Knows nodes and events; must not know the clients, which give it what sends.
"""
