"""Searches over texts that branch: policies, the tree that they grow, and the order in which it grows.

Knows proposals of continuations and their values, as results of work that it asks for. Must not know
engines, HTTP or clocks: client and gateway carry the work out.
"""
