"""Session models without the trace: tables of many requests each, and sources drawn from them.

Knows session models. Must not let a single request through: see `tables.K`.
"""
