"""Capsules as clients name them: where they are, their texts, what went on from them, and their verbs.

Knows the router's directory, workers and other gateways by questions, and the store. Must not know HTTP.
"""
