"""Traces read into one form of workload: arrivals, shared text by id, dependencies, forks.

Knows the files' formats and the requests they describe. Must not know engines, routers or time.
"""
