"""Searches over texts that branch: policies, the tree that they grow, and the order in which it grows.

Knows proposals of continuations and their values, as results of work that it asks for; its runner has that
carried out. Must not know engines, HTTP or clocks: client and gateway give the steps.
"""
