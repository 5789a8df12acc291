"""Counts and gauges as Prometheus families.

Knows the names and units of metrics. Must not know where they are counted or served.
"""
