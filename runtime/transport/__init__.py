"""Connections of workers' processes: commands of gateways and frames back, and the framing of KV transfers.

One listener a process (`listener`): the first byte of a connection says its kind, the greeting proves both
ends. Knows bytes, order and bounds. Must not know jobs, routers, KV or Ray.
"""
