"""The web page at `/ui`: the live forest of the caller's sessions, and the fleet for operators.

Knows the page's files and the events of `/v1/watch`. The page itself is a client of the API like any other:
what it shows and does, others can by the same paths.
"""
