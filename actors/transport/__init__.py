"""Links from gateways to workers: ordered batches there, frames back, over sockets, Ray or one loop.

Knows bytes, order, silence and loss. Must not know jobs or routers.
"""
