"""KV that workers lend each other, over sockets of its own: blocks by their places, with checksums.

Knows loans, bytes, bounds and waits. Must not know engines, routers, gateways or Ray.
"""
