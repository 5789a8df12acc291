"""Capsules as files: KV that is borrowed from a worker and sent, and KV that has come and is lent to one.

Knows the stream's format and the loans between processes. Must not know HTTP, the router, or engines.
"""
