"""Verbs of branches that run: tokens come into them.

Knows bodies and the service; texts become tokens elsewhere. Must not know workers.
"""
