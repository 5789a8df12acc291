"""A fleet's workers and other gateways: leases, events, bookings from the bus, and a link to each worker.

Knows the router, the bus and links. Must not know requests.
"""
