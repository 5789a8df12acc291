"""Engines as a service: a process's workers behind one host, their threads, leases and streams.

Knows engines through `worker.engine` alone. Must not know gateways' insides, HTTP, Ray or torch.
"""
