"""Capsules as clients name them: where they are, their texts, what went on from them, and their verbs.

Knows the router's directory, workers by questions, and other gateways' memories. Must not know HTTP.
"""
