"""Requests of clients: each one's branches, what sees them pass, and the verbs for what runs.

Knows tokens, the dispatcher's shell and capsules. Must not know text, HTTP or Ray.
"""
