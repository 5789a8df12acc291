"""A fleet in virtual time: real routers and engines, simulated clients, one event heap.

Knows workloads, routers and mocked engines. Must not know processes or files, nor the wall clock except
to measure the simulation itself.
"""
