"""Messages of workers and of other gateways, put in order and taken in.

Keeps the index and the loads true to them. Must not know prices, choices or the bus.
"""
