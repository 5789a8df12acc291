"""Verbs of branches that run: tokens come into them, and they are cancelled.

Knows bodies and the gateway; texts become tokens elsewhere. Must not know workers.
"""
