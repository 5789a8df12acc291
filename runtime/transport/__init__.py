"""Links from gateways to workers over sockets: commands there, frames back, secret, silence, loss.

Knows bytes, order and bounds. Must not know jobs, routers or Ray.
"""
