"""Capsules: the whole execution state at a committed token boundary, and the rules by which they are kept.

Knows pins, budgets, times to live and tenants' use. Must not know tensors, HTTP or gateways.
"""
