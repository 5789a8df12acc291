"""Broadcast between processes: a small bus over NATS, and its embedded broker.

Knows messages as bytes, bounded queues and child processes. Must not know routers, workers or HTTP.
"""
