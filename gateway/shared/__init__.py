"""The memory that gateways have in common: each asks the others over the bus for what it lacks.

Knows names, scopes and messages between gateways. Nothing of HTTP or of workers.
"""
