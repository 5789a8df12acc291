"""Trace files, read into and written from one form of workload: arrivals, shared text, dependencies, forks.

Knows the files' formats and the requests they describe. Must not know engines, routers, models or time.
"""
