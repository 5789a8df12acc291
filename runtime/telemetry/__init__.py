"""Counts and gauges as Prometheus families, and a process's own port for them.

Knows the names and units of metrics. Must not know where they are counted, or the API.
"""
