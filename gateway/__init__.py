"""The gateway: jobs in, streams of branch deltas out; admission, routing, and the workers it reaches.

Knows tokens, the router, the bus and links. Must not know text, HTTP or Ray.
"""
