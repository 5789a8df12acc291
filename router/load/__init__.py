"""Load of the workers: bookings, paths in use, predicted contents.

Knows slots, waypoints and tokens. Must not know prices, leases or messages.
"""
