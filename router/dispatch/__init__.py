"""Requests that wait for a worker with room: admission limits, fair order, deadlines.

Knows tickets, tenants and time as an argument. Must not know workers' contents, sockets or tasks.
"""
